"""The locustfile as its users start it: several processes, the web UI, arguments, and how each way ends."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import suppress

import pytest

from harness.tests.load_process import LOCUSTFILE, ROOT, SMALL, Result, drawn, run, started
from harness.tests.sse_server import honest, serve


def test_several_processes_share_the_sessions_and_send_nothing_twice(tmp_path):
    workload = SMALL | {"sessions": 11}
    result, requests = run(tmp_path, honest, workload, "--processes", "2", "--expect-workers", "2", concurrency=4)
    assert result.code == 0, result.output
    ids = [r.headers["x-request-id"] for r in requests]
    assert sorted(ids) == sorted(f"{s.session_id}-{t}" for s in drawn(workload) for t in range(2))
    result.assert_accounted()
    assert sorted(e["issued"] for e in result.ends) == [10, 12]
    assert {e["rank"] for e in result.events if e["event"] == "start"} == {0, 1}
    assert re.search(r"Aggregated +22 +0\(", result.output)


@pytest.mark.parametrize(
    ("workload", "users", "says"),
    [
        ({"kind": "rl-rollout", "barrier": True, "steps": 1}, 4, "the workload has barrier = true and 2 workers"),
        (SMALL, 1, "1 users cannot be spread over 2 workers"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(tmp_path, workload, users, says):
    result, requests = run(tmp_path, honest, workload, "--processes", "2", "--expect-workers", "2", concurrency=users)
    assert result.code == 2, result.output
    assert says in result.output
    assert not requests


def test_a_plan_that_cannot_be_used_ends_the_process_with_one_line_and_code_2(tmp_path):
    with started(
        tmp_path,
        [
            sys.executable,
            "-m",
            "locust",
            "-f",
            str(LOCUSTFILE),
            "--headless",
            "--host",
            "http://x",
            "--routebench-plan",
            str(tmp_path / "none.json"),
        ],
    ) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "error: cannot read the load plan" in output
    assert "Traceback" not in output


def test_the_module_prints_the_path_of_the_locustfile():
    done = subprocess.run(
        [sys.executable, "-m", "harness.locustfile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(LOCUSTFILE)


TINY = """
name = "tiny"
routers = ["round-robin"]
[workload]
kind = "multi-turn"
sessions = 5
turns = 2
output_tokens = 4
[load]
concurrency = 3
"""


def by_hand(tmp_path, *arguments, locustfile=LOCUSTFILE):
    """Locust as a user starts it, with a scenario and without a plan."""
    (tmp_path / "tiny.toml").write_text(TINY)
    return [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(locustfile),
        "--scenario",
        str(tmp_path / "tiny.toml"),
        "--rows-dir",
        str(tmp_path / "rows"),
        *arguments,
    ]


def test_the_web_ui_runs_the_sessions_once_a_start_and_each_start_on_fresh_text(tmp_path):
    def call(path, **form):
        body = urllib.parse.urlencode(form).encode() if form else None
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=body, timeout=5).read()

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
    with (
        serve(honest) as server,
        started(
            tmp_path, by_hand(tmp_path, "--host", server.url, "--web-host", "127.0.0.1", "--web-port", str(port))
        ) as process,
    ):
        wait_for(lambda: call("/"))
        page = call("/").decode()
        assert all(f'"{argument}"' in page for argument in ("scenario", "seed", "api", "rows_dir", "answers"))
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
            )
            wait_for(lambda start=start: len(server.requests) == 10 * start)
            wait_for(lambda: b'"state": "stopped"' in call("/stats/requests").replace(b'":"', b'": "'))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert "start 2, so seed 43 for a cold cache" in output
    prompts = [request.body["prompt"][:40] for request in server.requests]
    first, second = prompts[:10], prompts[10:]
    assert not [p for p in second if p in first]
    for folder in (tmp_path / "rows", tmp_path / "rows" / "start-2"):
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
    ],
)
def test_wrong_arguments_end_a_headless_run_with_code_2(tmp_path, arguments, says):
    with started(tmp_path, by_hand(tmp_path, "--headless", "--host", "http://127.0.0.1:9", *arguments)) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"error: {says}" in output
    assert "Traceback" not in output
