"""Starts the load generator as a real process against a scripted server, and reads what it left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness.json_lines import read_json_lines
from harness.live import LOCUSTFILE, locust_command, meeting_place
from harness.load_plan import LoadPlan
from harness.sse import ERROR_CLASSES
from harness.tests.sse_server import serve
from workloads import Streams, make_workload

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"kind": "multi-turn", "turns": 2, "first_input_tokens": 40, "input_tokens": 8, "output_tokens": 4}


class Result:
    """What a load process left behind."""

    def __init__(self, rows_dir, code, output):
        self.code, self.output = code, output
        files = list(Path(rows_dir).glob("locust-*.jsonl"))
        self.rows = read_json_lines(p for p in files if not p.name.endswith(".events.jsonl"))
        self.events = read_json_lines(p for p in files if p.name.endswith(".events.jsonl"))
        self.ends = [e for e in self.events if e["event"] == "end"]

    def row(self, session, turn):
        return next(r for r in self.rows if r["session"].startswith(session) and r["turn"] == turn)

    def assert_accounted(self):
        """issued = ok + error + incomplete + cancelled, in the account and in the rows, and no row twice."""
        sent = [r for r in self.rows if r["sent_us"] is not None]
        assert sum(e["issued"] for e in self.ends) == len(sent)
        for status in ("ok", "error", "incomplete", "cancelled"):
            assert sum(e[status] for e in self.ends) == sum(r["status"] == status for r in sent)
        assert sum(e["not_sent"] for e in self.ends) == len(self.rows) - len(sent)
        assert len({r["request_id"] for r in self.rows}) == len(self.rows)
        assert {r["error_class"] for r in self.rows} - {None} <= set(ERROR_CLASSES)


def command(tmp_path, url, plan, *extra, users=None):
    plan_file = tmp_path / "plan.json"
    plan_file.write_bytes(msgspec.json.encode(plan))
    meet = meeting_place() if "--processes" in extra else []
    return locust_command(plan_file, url, users or plan.slots or 1, *extra, *meet)


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


def worker_of(port):
    """A worker of the master at a port."""
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--worker", "--master-port", port]


def plan_for(tmp_path, workload, **fields):
    return LoadPlan(
        **{
            "workload": workload,
            "seed": 7,
            "rows_dir": str(tmp_path / "rows"),
            "concurrency": 3,
            "epoch_ns": time.monotonic_ns(),
            **fields,
        }
    )


@contextmanager
def started(tmp_path, arguments):
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(tmp_path, script, workload, *extra, users=None, replicas=None, interrupt_after=None, **fields):
    """A whole headless run; returns (what it left, requests that the server got).

    `replicas` makes the plan's from the server's address; `interrupt_after` sends SIGINT after so many requests.
    """
    with serve(script) as server:
        plan = plan_for(tmp_path, workload, **fields, **({"replicas": replicas(server.url)} if replicas else {}))
        with started(tmp_path, command(tmp_path, server.url, plan, *extra, users=users)) as process:
            if interrupt_after:
                limit = time.monotonic() + 30
                while len(server.requests) < interrupt_after and time.monotonic() < limit:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
            return Result(plan.rows_dir, process.returncode, output), server.requests


def drawn(workload, seed=7):
    return list(make_workload(workload).sessions(Streams(seed)))
