"""Workers of one load that fall silent: one that comes back costs nothing, one that is gone costs its share."""

import os
import signal
import time
from pathlib import Path

from harness.tests.load_process import Result, command, plan_for, started
from harness.tests.sse_server import honest, serve

PACED = {"kind": "multi-turn", "sessions": 8, "turns": 4, "think_time_ms": 500, "output_tokens": 4}
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


def test_a_worker_that_died_is_named_and_its_share_is_missing(tmp_path):
    result = spoil(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))
    assert result.code == 3, result.output
    assert "was lost; its share is incomplete" in result.output
    assert len(result.ends) == 3
    assert 0 < len(result.rows) < 8 * 4
    whole = {row["session"] for row in result.rows if row["turn"] == 3}
    assert len(whole) >= 6, "the sessions of the other three end as planned"
