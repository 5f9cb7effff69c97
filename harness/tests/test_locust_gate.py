"""The gate inside Locust: its verdict on the rows of the test is how Locust exits, with one process or several."""

import json
import signal
import socket
import time
from types import SimpleNamespace

import msgspec
import pytest

from harness.locust_gate import Judge, Trial
from harness.router_entry import RouterEntry
from harness.scenario import load_scenario
from harness.tests.load_process import by_hand, started, worker_of
from harness.tests.sse_server import honest, serve

HEADLESS = ("--headless", "--only-summary")
LOOSE = "samples_min = 5\n[bounds]\nttft_ms = ['p(99)<60000']\nerrors = ['value<=0']\n"
"""Milliseconds that no machine of ours exceeds: what is tested is the way from the rule to the exit code."""
TIGHT = LOOSE + "e2e_ms = ['p(99)<0.0001']\n"
FEW = "samples_min = 11\n[bounds]\ne2e_ms = ['p(99)<0.0001']\n"
UNKNOWN = LOOSE + "preemptions = ['value<=0']\n"
OUTCOMES = ("pass", "regression", None, "invalid", "inconclusive")


def rules(tmp_path, text):
    (tmp_path / "rules.toml").write_text(text)
    return ("--gate", str(tmp_path / "rules.toml"))


def locust(tmp_path, *arguments, script=honest, interrupt_after=None):
    """(exit code, output) of a headless test."""
    with (
        serve(script) as server,
        started(tmp_path, by_hand(tmp_path, *HEADLESS, "--host", server.url, *arguments)) as process,
    ):
        if interrupt_after:
            limit = time.monotonic() + 30
            while len(server.requests) < interrupt_after and time.monotonic() < limit:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


def verdict(tmp_path, rows="rows"):
    return json.loads((tmp_path / rows / "gate.json").read_text())


@pytest.mark.parametrize(("text", "code"), [(LOOSE, 0), (TIGHT, 1), (UNKNOWN, 3), (FEW, 4)])
def test_the_exit_code_is_the_gates(tmp_path, text, code):
    found, output = locust(tmp_path, *rules(tmp_path, text))
    assert found == code, output
    assert (verdict(tmp_path)["outcome"], verdict(tmp_path)["exit_code"]) == (OUTCOMES[code], code)
    assert f"gate exits {code}" in output
    assert "Traceback" not in output


def test_what_only_our_engines_tell_is_unknown_and_a_bound_on_it_says_so(tmp_path):
    _, output = locust(tmp_path, *rules(tmp_path, UNKNOWN))
    assert "preemptions is unknown in this run, so nothing was checked" in " ".join(output.split())


def test_a_test_is_compared_with_an_earlier_one_of_the_same_scenario(tmp_path):
    bounds = rules(tmp_path, LOOSE + "\n[[rule]]\nexact = ['requests', 'errors']\n")
    first, output = locust(tmp_path, *rules(tmp_path, LOOSE), "--rows-dir", str(tmp_path / "before"))
    assert first == 0, output
    rules(tmp_path, LOOSE + "\n[[rule]]\nexact = ['requests', 'errors']\n")
    same, output = locust(tmp_path, *bounds, "--gate-baseline", str(tmp_path / "before"))
    assert same == 0, output
    other, output = locust(
        tmp_path, *bounds, "--gate-baseline", str(tmp_path / "before"), "--seed", "5", "--rows-dir", str(tmp_path / "b")
    )
    assert other == 3, output
    assert "other-seed: seed 5 where the baseline has 42" in " ".join(output.split())


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("[bounds]\nttft = ['p(99)<5']\n", (), "ttft"),
        ("relative = ['ttft_ms:p99:+5%']\n", (), "compares with a baseline: give --gate-baseline"),
        (LOOSE, ("--gate-baseline", "nowhere"), "nowhere: no run folder"),
        (LOOSE, ("--gate-router", "mine"), "give --gate-baseline, too"),
        (LOOSE, ("--gate", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_a_gate_that_cannot_judge_is_said_before_anything_is_sent(tmp_path, text, more, says):
    named = () if "--gate-router" in more else rules(tmp_path, text)
    code, output = locust(tmp_path, *named, *more)
    assert code == 2, output
    assert says in output
    assert "requests sent" not in output
    assert "Traceback" not in output


def test_rows_of_another_test_are_never_judged_with_this_ones(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "locust-1.jsonl").write_text("")
    code, output = locust(tmp_path, *rules(tmp_path, LOOSE))
    assert code == 2, output
    assert "holds rows of another test" in output


def test_an_interrupted_test_is_not_judged(tmp_path):
    """Answers take half a second, so that some are left to send when the first has come."""
    code, output = locust(tmp_path, *rules(tmp_path, LOOSE), script=lambda r: [500.0, *honest(r)], interrupt_after=2)
    assert code == 3, output
    assert "partial: this run is partial, not complete" in " ".join(output.split())


def test_a_test_with_a_time_limit_is_judged_on_what_it_sent(tmp_path):
    """Ten answers of 700 ms one after the other take 7 s at least, so that a limit of 3 s always cuts."""
    code, output = locust(
        tmp_path,
        *rules(tmp_path, "errors_max = 1.0\n[bounds]\nrequests = ['value>=1']\n"),
        *("--run-time", "3", "--users", "1"),
        script=lambda request: [700.0, *honest(request)],
    )
    assert code == 0, output
    assert "a time limit or a shape ended the test" in " ".join(output.split())


@pytest.mark.parametrize(("text", "code"), [(LOOSE, 0), (TIGHT, 1)])
def test_several_processes_are_judged_on_the_rows_of_all(tmp_path, text, code):
    found, output = locust(tmp_path, *rules(tmp_path, text), "--processes", "2", "--users", "3")
    assert found == code, output
    assert json.loads((tmp_path / "rows" / "run.json").read_text())["routers"]["router"]["requests"] == 10


def test_a_master_judges_what_its_workers_wrote(tmp_path):
    code, output = distributed(tmp_path, *rules(tmp_path, TIGHT))
    assert code == 1, output
    assert json.loads((tmp_path / "rows" / "run.json").read_text())["routers"]["router"]["requests"] == 10


def distributed(tmp_path, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with serve(honest) as server:
        master = by_hand(
            tmp_path, *HEADLESS, "--host", server.url, "--master", "--master-bind-port", port,
            "--master-bind-host", "127.0.0.1", "--expect-workers", "2", "--users", "3", *arguments,
        )  # fmt: skip
        worker = worker_of(port)
        with started(tmp_path, master) as lead, started(tmp_path, worker) as first, started(tmp_path, worker) as second:
            output, _ = lead.communicate(timeout=60)
            for process in (first, second):
                process.communicate(timeout=20)
    return lead.returncode, output


def test_a_share_that_left_no_end_makes_the_run_invalid(tmp_path, monkeypatch, capsys):
    """As when a worker wrote on another machine, or was killed."""
    monkeypatch.setattr("harness.locust_gate.ENDS_WAIT_S", 0.0)
    code, output = locust(tmp_path)
    assert code == 0, output
    (tmp_path / "rules.toml").write_text(LOOSE)
    scenario = load_scenario(str(tmp_path / "tiny.toml"))
    options = SimpleNamespace(gate=str(tmp_path / "rules.toml"), gate_baseline="", gate_router="")
    trial = Trial(Judge.of(options, scenario), scenario_of_test(scenario), tmp_path / "rows", 2, time.monotonic())
    assert trial.verdict("whole", 0.0) == 3
    assert "load process 2 of 2" in " ".join(capsys.readouterr().out.split())


def scenario_of_test(scenario):
    return msgspec.structs.replace(scenario, routers=(RouterEntry(name="router", url="http://127.0.0.1:9"),))
