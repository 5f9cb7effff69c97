"""The locustfile of routebench: sessions against a router, with Locust's web UI or headless.

    locust -f "$(python -m harness.locustfile)" --host http://127.0.0.1:8080

Run as a module it prints its own path. A run is finite: when all sessions have been used up the test stops by
itself, and a new start in the web UI goes on with the next seed, so that no cache flatters it. The number of users
is the number of session slots. `--routebench-plan` is how the harness itself starts Locust. A locustfile of your own
needs `from harness.locustfile import *` only.

The process that has the web UI or the command line (the only one, or the master) decides seed, folder and shares; a
worker gets its share in a message that Locust delivers before the order to spawn users. A worker reports when its
sessions have ended, and the master ends the test when all that are left have.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).resolve())
    sys.exit(0)

# Locust puts this file's folder on the import path; its module names are not meant to be found there.
_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
if str(Path(_HERE).parent) not in sys.path:
    sys.path.append(str(Path(_HERE).parent))

import resource
import socket
import tempfile
import time
from typing import Any

import gevent
import msgspec
from locust import events
from locust.runners import MasterRunner, WorkerRunner

from harness.errors import HarnessError, UsageError
from harness.load_plan import PATHS, LoadPlan, read_plan
from harness.users import LoadRun, SessionUser
from workloads import make_workload

__all__ = ["CONTROL", "SessionUser"]

SHARE = "routebench_share"
ALL_DONE = "routebench_all_done"
WATCH_S = 1.0
"""Spacing of the load generator's look at itself."""
LOST_AFTER_LOOKS = 10
"""Looks in a row at which a worker was silent before it is given up."""
CPU_WINDOW = 5
"""Looks over which a CPU share is averaged before it is called too high."""
CPU_SHARE_MAX = 0.9
"""Locust's own bound: one process runs on one core, and above this its clock readings come late."""


class LoadControl:
    """Listens to Locust's events; one per process."""

    def __init__(self, events: Any) -> None:
        self._round = 0
        self._file_plan: LoadPlan | None = None
        self._share: dict[str, Any] | None = None
        self._waiting_for: set[str] = set()
        self._watch: Watch | None = None
        events.init_command_line_parser.add_listener(self._arguments)
        events.init.add_listener(self._init)
        events.test_start.add_listener(self._test_start)
        events.test_stopping.add_listener(self._test_stopping)
        events.test_stop.add_listener(self._test_stop)
        events.cpu_warning.add_listener(self._cpu_warning)
        events.quitting.add_listener(self._quitting)

    def _arguments(self, parser: Any, **_: Any) -> None:
        add = parser.add_argument
        add("--scenario", default="quickstart", help="built-in scenario, or TOML file, that has the workload")
        add("--seed", default="", help="seed of the sessions, a whole number (default: the scenario's)")
        add("--api", choices=["", *PATHS], default="", help="how prompts travel (default: the scenario's)")
        add("--model", default="", help="model name of every request (default: the scenario's)")
        add(
            "--answers",
            choices=["live", "known"],
            default="live",
            help="history takes the answers that come, or those that our mocks are known to give",
        )
        add("--rows-dir", default="", help="folder for raw rows (default: a new temporary one)")
        add(
            "--routebench-plan",
            default=None,
            include_in_web_ui=False,
            help="JSON file with a complete load plan, in place of the arguments above",
        )

    def _init(self, environment: Any, **_: Any) -> None:
        options, runner = environment.parsed_options, environment.runner
        try:
            if options.routebench_plan:
                self._file_plan = read_plan(options.routebench_plan)
                slots = self._file_plan.concurrency
            else:
                slots = _scenario(options).load.concurrency
        except HarnessError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        if options.num_users is None:
            options.num_users = slots
        if options.spawn_rate is None:
            options.spawn_rate = min(100, options.num_users)
        if isinstance(runner, WorkerRunner):
            runner.register_message(SHARE, self._take_share)
        elif isinstance(runner, MasterRunner):
            runner.register_message(ALL_DONE, self._worker_done)

    def _test_start(self, environment: Any, **_: Any) -> None:
        environment.routebench_run = None
        runner = environment.runner
        try:
            if isinstance(runner, WorkerRunner):
                if self._share is None:
                    raise UsageError(
                        "this worker got no share of the sessions: start master and workers with the same "
                        "locustfile and version"
                    )
                self._start_run(environment, self._plan(environment, self._share), self._share)
            elif isinstance(runner, MasterRunner):
                self._send_shares(environment)
            else:
                share = self._new_share(environment)
                plan = self._plan(environment, share)
                self._start_run(environment, plan, share)
                self._announce(environment, plan)
        except (HarnessError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            environment.process_exit_code = 2
            gevent.spawn(_end_test, environment)

    def _new_share(self, environment: Any) -> dict[str, Any]:
        """All of it, with what the deciding process decides."""
        number, self._round = self._round, self._round + 1
        return {
            "rank": 0,
            "of": 1,
            "round": number,
            "epoch_ns": time.monotonic_ns(),
            "users": environment.runner.target_user_count,
            "rows_dir": self._folder(environment, number),
        }

    def _folder(self, environment: Any, number: int) -> str:
        """Where rows go without a plan; every start has a folder of its own."""
        if self._file_plan is not None:
            return self._file_plan.rows_dir
        asked: str = environment.parsed_options.rows_dir
        if not asked:
            return tempfile.mkdtemp(prefix="routebench-rows-")
        return str(Path(asked).resolve() / f"start-{number + 1}") if number else str(Path(asked).resolve())

    def _plan(self, environment: Any, share: dict[str, Any]) -> LoadPlan:
        """The plan of this start; a start after the first takes the next seed."""
        options = environment.parsed_options
        if self._file_plan is not None:
            return msgspec.structs.replace(self._file_plan, seed=self._file_plan.seed + share["round"])
        scenario = _scenario(options)
        seed = _whole_number(options.seed) if options.seed else scenario.seed
        return LoadPlan(
            workload=scenario.workload,
            seed=seed + share["round"],
            rows_dir=share["rows_dir"],
            epoch_ns=share["epoch_ns"],
            api=options.api or scenario.load.api,
            model=options.model or scenario.load.model,
            concurrency=max(1, share["users"]),
            ramp_us=round(scenario.load.ramp_s * 1e6),
            session_header=scenario.load.session_header,
            request_timeout_s=scenario.load.request_timeout_s,
            answers=options.answers,
        )

    def _start_run(self, environment: Any, plan: LoadPlan, share: dict[str, Any]) -> None:
        run = LoadRun(plan, rank=share["rank"], of=share["of"], on_all_done=lambda: self._all_done(environment))
        run.files.event(
            "start",
            t_us=run.us(time.monotonic_ns()),
            arm=plan.arm,
            host=environment.host,
            api=plan.api,
            seed=plan.seed,
            kind=plan.workload.get("kind"),
            rank=run.rank,
            of=run.of,
            sessions=run.sessions_total,
            users=share["users"],
            machine=socket.gethostname(),
        )
        environment.routebench_run = run
        self._watch = Watch(run)

    def _announce(self, environment: Any, plan: LoadPlan) -> None:
        sessions = make_workload(plan.workload).session_count
        again = f" (start {self._round}, so seed {plan.seed} for a cold cache)" if self._round > 1 else ""
        slots = environment.runner.target_user_count
        print(
            f"routebench: {sessions} sessions of {plan.workload['kind']}, seed {plan.seed}{again}, {plan.api}, "
            f"{slots} slots, to {environment.host}; rows in {plan.rows_dir}",
            flush=True,
        )

    def _send_shares(self, environment: Any) -> None:
        runner = environment.runner
        share = self._new_share(environment)
        plan = self._plan(environment, share)
        nodes = [node.id for node in (*runner.clients.ready, *runner.clients.running, *runner.clients.spawning)]
        if make_workload(plan.workload).barrier and len(nodes) > 1:
            raise UsageError(
                f"the workload has barrier = true and {len(nodes)} workers are connected: only one "
                "process can see when a step has ended; use one worker, or barrier = false"
            )
        if runner.target_user_count < len(nodes):
            raise UsageError(
                f"{runner.target_user_count} users cannot be spread over {len(nodes)} workers, each of "
                "which has a share of the sessions: ask for at least one user per worker"
            )
        self._waiting_for = set(nodes)
        for rank, node in enumerate(nodes):
            runner.send_message(SHARE, share | {"rank": rank, "of": len(nodes)}, node)
        self._announce(environment, plan)
        gevent.spawn(self._watch_workers, environment)

    def _take_share(self, environment: Any, msg: Any, **_: Any) -> None:
        self._share = msg.data

    def _worker_done(self, environment: Any, msg: Any, **_: Any) -> None:
        self._waiting_for.discard(msg.node_id)
        if not self._waiting_for:
            gevent.spawn(_end_test, environment)

    def _watch_workers(self, environment: Any) -> None:
        """Ends the test when nobody is left to wait for. A worker that is too busy to be heard may come back; one that
        is gone leaves a file without an end line, and its sessions are missing from the rows."""
        runner = environment.runner
        silent_looks: dict[str, int] = {}
        while self._waiting_for:
            gevent.sleep(WATCH_S)
            if runner.state in ("stopping", "stopped", "cleanup"):
                return
            missing = {node.id for node in runner.clients.missing}
            for node in sorted(self._waiting_for):
                silent_looks[node] = silent_looks.get(node, 0) + 1 if node in missing else 0
                if node in runner.clients and silent_looks[node] < LOST_AFTER_LOOKS:
                    continue
                print(f"error: worker {node} was lost; its share is incomplete", file=sys.stderr, flush=True)
                environment.process_exit_code = 3
                self._waiting_for.discard(node)
                if not self._waiting_for:
                    _end_test(environment)

    def _all_done(self, environment: Any) -> None:
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.send_message(ALL_DONE, {})
        else:
            gevent.spawn(_end_test, environment)

    def _test_stopping(self, environment: Any, **_: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        if run is not None:
            run.stop()

    def _test_stop(self, environment: Any, **_: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        if run is None:
            return
        environment.routebench_run = None
        facts = self._watch.stop() if self._watch else {}
        run.finish(**facts)
        if not isinstance(environment.runner, WorkerRunner):
            print(
                f"routebench: {run.issued} requests sent: "
                + ", ".join(f"{n} {status}" for status, n in run.files.counts.items())
                + f"; {run.files.unsent} turns not sent; rows in {run.files.rows_path}",
                flush=True,
            )

    def _cpu_warning(self, environment: Any, cpu_usage: float = 0.0, **_: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        if run is not None:
            run.files.event("cpu_warning", t_us=run.us(time.monotonic_ns()), cpu_percent=cpu_usage, by="locust")

    def _quitting(self, environment: Any, **_: Any) -> None:
        # With a plan the rows tell what failed, and whoever gave the plan judges; otherwise Locust's own rule holds.
        if self._file_plan is not None and environment.process_exit_code is None:
            environment.process_exit_code = 0


class Watch:
    """The load generator's look at itself: its CPU share, and how late its own loop wakes it."""

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self._late_us: list[int] = []
        self._shares: list[float] = []
        self._cpu_s = time.process_time()
        self._warned = False
        self._greenlet = gevent.spawn(self._look)

    def _look(self) -> None:
        while True:
            wall_ns, cpu_s = time.monotonic_ns(), time.process_time()
            gevent.sleep(WATCH_S)
            passed_s = (time.monotonic_ns() - wall_ns) / 1e9
            self._late_us.append(max(0, round((passed_s - WATCH_S) * 1e6)))
            self._shares.append((time.process_time() - cpu_s) / passed_s)
            recent = self._shares[-CPU_WINDOW:]
            if len(recent) == CPU_WINDOW and sum(recent) / CPU_WINDOW > CPU_SHARE_MAX and not self._warned:
                self._warned = True
                self._run.files.event(
                    "cpu_warning",
                    t_us=self._run.us(time.monotonic_ns()),
                    by="routebench",
                    cpu_percent=round(100 * sum(recent) / CPU_WINDOW, 1),
                )

    def stop(self) -> dict[str, Any]:
        """What the end line says of this process."""
        self._greenlet.kill()
        late = sorted(self._late_us)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return {
            "cpu_s": round(time.process_time() - self._cpu_s, 6),
            "cpu_share_max": round(max(self._shares), 4) if self._shares else None,
            "loop_late_us_p99": late[max(0, -(-99 * len(late) // 100) - 1)] if late else None,
            "loop_late_us_max": late[-1] if late else None,
            "rss_max_kib": rss // 1024 if sys.platform == "darwin" else rss,
        }


def _scenario(options: Any) -> Any:
    from harness.scenario import load_scenario  # the other rooms' imports are not needed when a plan is given

    return load_scenario(options.scenario)


def _whole_number(text: str) -> int:
    if not str(text).isdecimal():
        raise UsageError(f"seed = {text!r}: give a whole number from 0, or leave it empty for the scenario's own")
    return int(text)


def _end_test(environment: Any) -> None:
    """The command line ends with its test; the web UI stays for the next start."""
    options = environment.parsed_options
    if options.headless:
        environment.runner.quit()
        return
    environment.runner.stop()
    if options.autostart and options.autoquit != -1:
        gevent.sleep(options.autoquit)
        environment.runner.quit()
        environment.web_ui.stop()


CONTROL = LoadControl(events)
