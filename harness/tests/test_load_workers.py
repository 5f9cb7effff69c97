"""Workers of one load that fall silent: one that comes back costs nothing, one that is gone costs its share."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from harness.tests.load_process import Result, command, plan_for, run, started
from harness.tests.sse_server import honest, serve
from harness.tests.test_processes import gone

PACED = {"kind": "multi-turn", "sessions": 8, "turns": 4, "think_time_ms": 500, "output_tokens": 4}
LOCUSTS_OWN_PORT = 5557
SILENT_S = 5.0
"""Beyond the three heartbeats of a second after which Locust's master calls a worker missing."""
WAIT_S = 60.0
"""Loose: five Python processes start on a machine that does other things."""


def spoil(tmp_path, what):
    """Runs four workers, does `what(pid)` to one of them once all have rows, and returns what was left behind."""
    with serve(honest) as server:
        plan = plan_for(tmp_path, PACED | {"first_input_tokens": 40, "input_tokens": 8}, concurrency=8)
        arguments = command(tmp_path, server.url, plan, "--processes", "4", "--expect-workers", "4")
        with started(tmp_path, arguments) as process:
            deadline = time.monotonic() + WAIT_S
            while len(rows := sorted(Path(plan.rows_dir).glob("locust-*[0-9].jsonl"))) < 4 or not all(
                path.stat().st_size for path in rows
            ):
                assert time.monotonic() < deadline, "four workers never sent anything"
                time.sleep(0.05)
            pid = int(rows[0].name.removeprefix("locust-").removesuffix(".jsonl"))
            what(pid)
            output, _ = process.communicate(timeout=WAIT_S)
        return Result(plan.rows_dir, process.returncode, output)


def test_a_worker_that_was_blocked_for_seconds_does_not_end_the_run(tmp_path):
    def block(pid):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENT_S)
        os.kill(pid, signal.SIGCONT)

    result = spoil(tmp_path, block)
    assert result.code == 0, result.output
    result.assert_accounted()
    assert len(result.rows) == 8 * 4
    assert {row["status"] for row in result.rows} == {"ok"}


def test_a_port_that_somebody_else_has_is_none_of_a_tests_business(tmp_path):
    with socket.socket() as taken, contextlib.suppress(OSError):
        taken.bind(("127.0.0.1", LOCUSTS_OWN_PORT))  # where Locust's processes meet by default; taken is taken
        taken.listen()
        result, _ = run(tmp_path, honest, PACED, "--processes", "2", "--expect-workers", "2", concurrency=8)
    assert result.code == 0, result.output
    result.assert_accounted()


def test_workers_end_when_their_master_is_killed(tmp_path):
    with serve(honest) as server:
        plan = plan_for(tmp_path, PACED | {"turns": 200}, concurrency=8)
        arguments = command(tmp_path, server.url, plan, "--processes", "2", "--expect-workers", "2")
        with started(tmp_path, arguments) as master:
            deadline = time.monotonic() + WAIT_S
            while len(files := list(Path(plan.rows_dir).glob("locust-*[0-9].jsonl"))) < 2:
                assert time.monotonic() < deadline, "two workers never began"
                time.sleep(0.05)
            workers = [int(path.name.removeprefix("locust-").removesuffix(".jsonl")) for path in files]
            assert all(psutil.Process(pid).ppid() == master.pid for pid in workers)
            master.kill()
            assert all(gone(pid) for pid in workers)


def test_a_worker_that_died_is_named_and_its_share_is_missing(tmp_path):
    result = spoil(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))
    assert result.code == 3, result.output
    assert "was lost; its share is incomplete" in result.output
    assert len(result.ends) == 3
    assert 0 < len(result.rows) < 8 * 4
    whole = {row["session"] for row in result.rows if row["turn"] == 3}
    assert len(whole) >= 6, "the sessions of the other three end as planned"
