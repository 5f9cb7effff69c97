"""The locustfile as its users start it: several processes, the web UI, arguments, and how each way ends."""

import csv
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import suppress

import msgspec
import pytest

from harness.live import LOCUSTFILE, locust_command
from harness.tests.load_process import ROOT, SMALL, TINY, Result, by_hand, drawn, run, started, worker_of
from harness.tests.sse_server import honest, serve


def test_several_processes_share_the_sessions_and_send_nothing_twice(tmp_path):
    workload = SMALL | {"sessions": 11}
    result, requests = run(tmp_path, honest, workload, "--processes", "2", "--expect-workers", "2", concurrency=4)
    assert result.code == 0, result.output
    ids = [r.headers["x-request-id"] for r in requests]
    assert sorted(ids) == sorted(f"{s.session_id}-{t}" for s in drawn(workload) for t in range(2))
    result.assert_accounted()
    assert sorted(e["issued"] for e in result.ends) == [10, 12]
    held_us = sum(r["end_us"] - r["sent_us"] for r in result.rows)
    assert sum(e["held_us"] for e in result.ends) >= held_us - len(result.rows), "counted from before each is sent on"
    assert {e["rank"] for e in result.events if e["event"] == "start"} == {0, 1}
    assert re.search(r"Aggregated +22 +0\(", result.output)


@pytest.mark.parametrize(
    ("workload", "users", "says"),
    [
        ({"kind": "rl-rollout", "barrier": True, "steps": 1}, 4, "has barrier = true and 2 load processes"),
        (SMALL, 1, "1 users cannot be spread over 2 workers"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(tmp_path, workload, users, says):
    result, requests = run(tmp_path, honest, workload, "--processes", "2", "--expect-workers", "2", concurrency=users)
    assert result.code == 2, result.output
    assert says in result.output
    assert not requests


def test_a_plan_that_cannot_be_used_ends_the_process_with_one_line_and_code_2(tmp_path):
    with started(tmp_path, locust_command(tmp_path / "none.json", "http://x", 1)) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "error: cannot read the load plan" in output
    assert "Traceback" not in output


def test_the_module_prints_the_path_of_the_locustfile():
    done = subprocess.run(
        [sys.executable, "-m", "harness.locustfile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(LOCUSTFILE)


def fleet(request):
    """Stands for a router of ours with two engines behind it, and for these engines."""
    if request.path == "/router/state":
        host = request.headers["host"]
        body = msgspec.json.encode({"replicas": [{"name": n, "url": f"http://{host}/{n}"} for n in ("r0", "r1")]})
    elif request.path.endswith("/metrics"):
        body = b"".join(
            b'vllm:%b{engine="0"} %d.0\n' % (name, value * request.number)
            for name, value in (
                (b"prefix_cache_hits_total", 1),
                (b"prefix_cache_queries_total", 4),
                (b"time_to_first_token_seconds_count", 1),
                (b"time_to_first_token_seconds_sum", 2),
            )
        )
    else:
        return honest(request)
    return [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]


def test_the_web_ui_runs_the_sessions_once_a_start_and_each_start_on_fresh_text(tmp_path):
    def completions():
        return [request for request in server.requests if request.path == "/v1/completions"]

    def tab():
        (found,) = (t for t in json.loads(call("/stats/requests"))["extended_stats"] if t["key"] == "routebench")
        return {line["where"]: line for line in found["data"]}

    def call(path, **form):
        body = urllib.parse.urlencode(form).encode() if form else None
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=body, timeout=5).read()

    def rows_of(start):
        return tmp_path / "rows" / f"start-{start}" if start > 1 else tmp_path / "rows"

    def wait_for(done):
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            with suppress(OSError):
                if done():
                    return
            time.sleep(0.1)
        pytest.fail("Locust did not get that far in 30 s")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "rules.toml").write_text("[bounds]\nerrors = ['count==0']\n")
    with (
        serve(fleet) as server,
        started(
            tmp_path, by_hand(tmp_path, "--host", server.url, "--web-host", "127.0.0.1", "--web-port", str(port))
        ) as process,
    ):
        wait_for(lambda: call("/"))
        page = call("/").decode()
        assert all(
            f'"{argument}"' in page
            for argument in (
                "scenario",
                "seed",
                "api",
                "rows_dir",
                "answers",
                "load",
                "replicas",
                "gate",
                "gate_baseline",
                "gate_router",
            )
        )
        assert '"num_users": 3' in page
        assert "routebench_plan" not in page
        for start in (1, 2):
            # The form sends every argument as text.
            call(
                "/swarm",
                user_count=3,
                spawn_rate=3,
                host=server.url,
                scenario=str(tmp_path / "tiny.toml"),
                seed="",
                api="",
                model="",
                answers="live",
                rows_dir=str(tmp_path / "rows"),
                replicas="",
                load="",
                fail_share_max="",
                gate=str(tmp_path / "rules.toml"),
                gate_baseline="",
                gate_router="",
            )
            wait_for(lambda start=start: len(completions()) == 10 * start)
            wait_for(lambda: b'"state": "stopped"' in call("/stats/requests").replace(b'":"', b'": "'))
            wait_for(lambda start=start: (rows_of(start) / "gate.json").is_file())
        assert tab()["all requests"]["requests"] == "10"
        assert tab()["all requests"]["hits"] == "0.0 %"
        assert float(tab()["all requests"]["ttft"]) > 0
        wait_for(lambda: tab().get("r1", {}).get("hits") == "25.0 %")
        assert tab()["r0"]["ttft"] == "2,000.0"
        assert b'"title": "Routebench"' in call("/").replace(b'":"', b'": "')
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert "start 2, so seed 43 for a cold cache" in output
    assert output.count("routebench: gate exits 0") == 2
    assert process.returncode == 0
    prompts = [request.body["prompt"][:40] for request in completions()]
    first, second = prompts[:10], prompts[10:]
    assert not [p for p in second if p in first]
    for folder in (rows_of(1), rows_of(2)):
        result = Result(folder, process.returncode, output)
        result.assert_accounted()
        assert [r["status"] for r in result.rows] == ["ok"] * 10


def test_a_locustfile_of_ones_own_needs_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("from harness.locustfile import *\n")
    with (
        serve(honest) as server,
        started(
            tmp_path,
            by_hand(
                tmp_path,
                "--headless",
                "--only-summary",
                "--host",
                server.url,
                "--seed",
                "5",
                "--answers",
                "known",
                locustfile=tmp_path / "mine.py",
            ),
        ) as process,
    ):
        output, _ = process.communicate(timeout=30)
    result = Result(tmp_path / "rows", process.returncode, output)
    assert result.code == 0, output
    result.assert_accounted()
    expected = drawn({"kind": "multi-turn", "sessions": 5, "turns": 2, "output_tokens": 4}, seed=5)
    assert {r["session"] for r in result.rows} == {s.session_id for s in expected}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scenario", "quikstart"], "no scenario named 'quikstart'"),
        (["--seed", "many"], "seed = 'many': give a whole number"),
        (["--load", "driver=rate"], "needs rate_per_s"),
        (["--fail-share-max", "5"], "give a share from 0 to 1"),
        (["--replicas", "r0=nowhere"], "write name=http://host:port"),
    ],
)
def test_wrong_arguments_end_a_headless_run_with_code_2(tmp_path, arguments, says):
    with started(tmp_path, by_hand(tmp_path, "--headless", "--host", "http://127.0.0.1:9", *arguments)) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "error: " in output
    assert says in output
    assert "Traceback" not in output


MINE = """
from harness.locustfile import LoadUser, row_ended
class Chat(LoadUser):
    host = "{url}"
@row_ended.add_listener
def said(row, environment, **_):
    print("mine:", row.session, row.turn, row.status, flush=True)
"""


def test_three_lines_point_a_locustfile_of_ones_own_at_a_router_and_it_hears_of_every_row(tmp_path):
    with serve(honest) as server:
        (tmp_path / "mine.py").write_text(MINE.format(url=server.url))
        arguments = by_hand(
            tmp_path,
            "--headless",
            "--only-summary",
            "--load",
            "driver=rate,rate_per_s=50,concurrency=9",
            "--csv",
            str(tmp_path / "mine"),
            "--html",
            str(tmp_path / "mine.html"),
            locustfile=tmp_path / "mine.py",
        )
        with started(tmp_path, arguments) as process:
            output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        assert output.count("mine: s0000") == 10
        assert f"poisson arrivals, to {server.url};" in output
        assert 'All users spawned: {"Chat": 1}' in output
    stats = list(csv.DictReader((tmp_path / "mine_stats.csv").open()))
    assert [(line["Type"], line["Name"], line["Request Count"]) for line in stats if line["Type"] != "METRIC"] == [
        ("POST", "/v1/completions", "10"),
        ("", "Aggregated", "10"),
    ]
    assert "/v1/completions" in (tmp_path / "mine.html").read_text()


@pytest.mark.parametrize(("share", "code"), [("", 1), ("0.5", 0), ("0.05", 1)])
def test_the_exit_code_follows_the_share_of_failures_that_one_allows(tmp_path, share, code):
    def one_fails(request):
        return [None] if request.number == 3 else honest(request)

    with (
        serve(one_fails) as server,
        started(
            tmp_path,
            by_hand(tmp_path, "--headless", "--only-summary", "--host", server.url, "--fail-share-max", share),
        ) as process,
    ):
        output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output


SHAPED = """
from harness.locustfile import LoadUser, SlotStages, row_ended
class Chat(LoadUser):
    host = "{url}"
ended = []
class Steps(SlotStages):
    stages = ((4, 1), (36, 3))
    def get_run_time(self):
        return len(ended)
@row_ended.add_listener
def count(row, environment, **_):
    ended.append(row)
"""
"""Its seconds are requests that have ended, so that no machine is too slow for a stage."""


def test_a_shape_opens_slots_as_it_goes_and_ends_the_test(tmp_path):
    """Answers take 300 ms. One slot until four have ended at least, since Locust looks once a second; then three, until
    40 have. Of the 100 that there are some stay unsent, and some are under way."""
    with serve(lambda request: [300.0, *honest(request)]) as server:
        (tmp_path / "mine.py").write_text(SHAPED.format(url=server.url))
        arguments = by_hand(tmp_path, "--headless", "--only-summary", locustfile=tmp_path / "mine.py")
        (tmp_path / "tiny.toml").write_text(TINY.replace("sessions = 5", "sessions = 50"))
        with started(tmp_path, arguments) as process:
            output, _ = process.communicate(timeout=90)
    result = Result(tmp_path / "rows", process.returncode, output)
    result.assert_accounted()
    rows = sorted((r for r in result.rows if r["sent_us"] is not None), key=lambda r: r["sent_us"])
    flying = [sum(o["sent_us"] <= r["sent_us"] < o["end_us"] for o in rows) for r in rows]
    assert set(flying[:4]) == {1}
    assert max(flying) == 3
    assert 40 <= len(rows) < 100
    assert {r["status"] for r in rows} == {"ok", "cancelled"}


def test_a_master_and_its_workers_send_what_one_process_would(tmp_path):
    """The figures come from raw rows, so equal rows are equal figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with serve(honest) as server:
        common = ["--headless", "--only-summary", "--host", server.url, "--answers", "known"]
        with started(tmp_path, by_hand(tmp_path, *common, "--rows-dir", str(tmp_path / "one"))) as process:
            output, _ = process.communicate(timeout=30)
        one = Result(tmp_path / "one", process.returncode, output)
        master = by_hand(
            tmp_path, *common, "--master", "--master-bind-port", port, "--master-bind-host", "127.0.0.1",
            "--expect-workers", "2", "--users", "3",
        )  # fmt: skip
        worker = worker_of(port)
        with started(tmp_path, master) as lead, started(tmp_path, worker) as first, started(tmp_path, worker) as second:
            output, _ = lead.communicate(timeout=40)
            for process in (first, second):
                process.communicate(timeout=20)
        several = Result(tmp_path / "rows", lead.returncode, output)
    assert (one.code, several.code) == (0, 0), output
    several.assert_accounted()
    assert len(several.ends) == 2
    columns = ("request_id", "prompt_tokens", "output_tokens", "cached_tokens", "status", "phase", "answer_ok")
    assert sorted(tuple(r[c] for c in columns) for r in one.rows) == sorted(
        tuple(r[c] for c in columns) for r in several.rows
    )
    assert re.search(r"Aggregated +10 +0\(", output)
