"""The locustfile of routebench: sessions against a router, with Locust's web UI or headless.

    locust -f "$(python -m harness.locustfile)" --host http://127.0.0.1:8080

Run as a module it prints its own path. A run is finite: when nothing is left to send or to wait for the test stops by
itself, and a new start in the web UI goes on with the next seed, so that no cache flatters it. The number of users is
the number of slots of a closed loop; an open one needs one user a process. `--routebench-plan` is how the harness
itself starts Locust. A locustfile of your own needs three lines:

    from harness.locustfile import LoadUser
    class Chat(LoadUser):
        host = "http://127.0.0.1:8080"

`--gate RULES.toml` or `--gate-baseline BASELINE` judges each test as `routebench gate` does, and sets the exit code.
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

import os
import socket
import tempfile
import time
from typing import Any, Literal

import gevent
import msgspec
from locust import events, runners
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from harness.errors import HarnessError, UsageError
from harness.live_figures import Figures
from harness.load_arguments import add_arguments, replicas_of, scenario_of, share_max, whole_number
from harness.load_plan import LoadPlan, read_plan
from harness.load_run import LoadRun
from harness.load_watch import WATCH_S, Watch, end_with
from harness.planned import check_together
from harness.users import LoadUser, SessionUser, SlotStages, row_ended
from harness.web_tab import WebTab
from workloads import Streams, make_workload

__all__ = ["CONTROL", "LoadUser", "SessionUser", "SlotStages", "row_ended"]

SHARE = "routebench_share"
ALL_DONE = "routebench_all_done"
CSV_SLACK_S = 0.2
RUN_TIME_SLACK_S = 1.0
"""A test that Locust's --run-time ended may have begun so much after Locust's own count."""
LOADED_BY, STARTED_BY = os.getpid(), os.getppid()
"""With --processes Locust forks its workers after it has loaded this file."""
LOST_AFTER_LOOKS = 3
"""Looks in a row at which a worker was missing before it is given up."""
runners.HEARTBEAT_LIVENESS = 12
"""Heartbeats, one a second, that a worker may owe before Locust calls it missing. Locust's own 3 are fewer than a busy
machine costs a worker that draws its sessions, and Locust ends the test when all are missing at once."""


class LoadControl:
    """Listens to Locust's events; one per process."""

    def __init__(self, events: Any) -> None:
        self._round = 0
        self._file_plan: LoadPlan | None = None
        self._share: dict[str, Any] | None = None
        self._waiting_for: set[str] = set()
        self._watch: Watch | None = None
        self._figures = Figures()
        """Of this process' requests, or on a master of all workers' together."""
        self._sent_figures = Figures()
        self._tab: WebTab | None = None
        self._trial: Any = None
        """A `harness.locust_gate.Trial`: how the test that runs will be judged; None without a gate."""
        self._judging: gevent.Greenlet | None = None
        self._all_sent = False
        """Whether the test that runs has nothing left to send or to wait for."""
        events.init_command_line_parser.add_listener(add_arguments)
        events.init.add_listener(self._init)
        events.test_start.add_listener(self._test_start)
        events.test_stopping.add_listener(self._test_stopping)
        events.test_stop.add_listener(self._test_stop)
        events.cpu_warning.add_listener(self._cpu_warning)
        events.report_to_master.add_listener(self._report)
        events.worker_report.add_listener(self._take_report)
        events.quitting.add_listener(self._quitting)

    def _init(self, environment: Any, **_: Any) -> None:
        options, runner = environment.parsed_options, environment.runner
        try:
            if options.routebench_plan:
                self._file_plan = read_plan(options.routebench_plan)
                slots = self._file_plan.slots
                gevent.spawn(end_with, STARTED_BY if os.getpid() == LOADED_BY else LOADED_BY)
            else:
                slots = scenario_of(options).load.slots
            share_max(options)
            if not isinstance(runner, WorkerRunner):
                self._gate_of(options)
        except HarnessError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        if options.num_users is None:
            options.num_users = slots or max(1, options.expect_workers)
        if options.spawn_rate is None:
            options.spawn_rate = min(100, options.num_users)
        if isinstance(runner, WorkerRunner):
            runner.register_message(SHARE, self._take_share)
        elif isinstance(runner, MasterRunner):
            runner.register_message(ALL_DONE, self._worker_done)
        if environment.web_ui is not None:
            self._tab = WebTab(environment.web_ui)

    def _test_start(self, environment: Any, **_: Any) -> None:
        environment.routebench_run = None
        runner = environment.runner
        self._figures, self._sent_figures = Figures(), Figures()
        self._trial, self._judging, self._all_sent = None, None, False
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
                self._set_gate(environment, plan, shares=1)
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
            "wall_ns": time.time_ns(),
            "machine": socket.gethostname(),
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
        scenario = scenario_of(options)
        seed = whole_number(options.seed) if options.seed else scenario.seed
        drive: dict[str, Any] = scenario.load.drive()
        if scenario.load.slots is not None:
            drive["concurrency"] = max(1, share["users"])
        return LoadPlan(
            **drive,
            workload=scenario.workload,
            seed=seed + share["round"],
            rows_dir=share["rows_dir"],
            epoch_ns=share["epoch_ns"],
            api=options.api or scenario.load.api,
            model=options.model or scenario.load.model,
            replicas=replicas_of(options.replicas),
            session_header=scenario.load.session_header,
            request_timeout_s=scenario.load.request_timeout_s,
            answers=options.answers,
        )

    def _start_run(self, environment: Any, plan: LoadPlan, share: dict[str, Any]) -> None:
        run = LoadRun(
            plan,
            rank=share["rank"],
            of=share["of"],
            start_ns=share["epoch_ns"],
            on_all_done=lambda: self._all_done(environment),
        )
        run.files.event(
            "start",
            t_us=run.us(time.monotonic_ns()),
            starts_us=run.start_us,
            arm=plan.arm,
            host=_host(environment),
            api=plan.api,
            seed=plan.seed,
            kind=plan.workload.get("kind"),
            rank=run.rank,
            of=run.of,
            users=share["users"],
            machine=socket.gethostname(),
        )
        run.on_row.append(self._figures.add)
        run.on_row.append(lambda row: row_ended.fire(row=row, environment=environment))
        environment.routebench_run = run
        self._watch = Watch(run)

    def _announce(self, environment: Any, plan: LoadPlan) -> None:
        if self._tab is not None:
            self._tab.begin(self._figures, plan.replicas, _host(environment))
        sessions = make_workload(plan.workload).session_count(Streams(plan.seed))
        again = f" (start {self._round}, so seed {plan.seed} for a cold cache)" if self._round > 1 else ""
        slots = f"{environment.runner.target_user_count} slots" if plan.slots else f"{plan.arrival} arrivals"
        print(
            f"routebench: {sessions} sessions of {plan.workload['kind']}, seed {plan.seed}{again}, {plan.api}, "
            f"{slots}, to {_host(environment)}; rows in {plan.rows_dir}",
            flush=True,
        )

    def _send_shares(self, environment: Any) -> None:
        runner = environment.runner
        share = self._new_share(environment)
        plan = self._plan(environment, share)
        nodes = [node.id for node in (*runner.clients.ready, *runner.clients.running, *runner.clients.spawning)]
        check_together(make_workload(plan.workload), plan, len(nodes))
        if runner.target_user_count < len(nodes):
            raise UsageError(
                f"{runner.target_user_count} users cannot be spread over {len(nodes)} workers, each of "
                "which has a share of the sessions: ask for at least one user per worker"
            )
        self._set_gate(environment, plan, shares=len(nodes))
        self._waiting_for = set(nodes)
        for rank, node in enumerate(nodes):
            runner.send_message(SHARE, share | {"rank": rank, "of": len(nodes)}, node)
        self._announce(environment, plan)
        gevent.spawn(self._watch_workers, environment)

    def _take_share(self, environment: Any, msg: Any, **_: Any) -> None:
        share = msg.data
        if share["machine"] != socket.gethostname():  # the clocks of two machines have nothing in common but the date
            share["epoch_ns"] = time.monotonic_ns() - (time.time_ns() - share["wall_ns"])
        self._share = share

    def _worker_done(self, environment: Any, msg: Any, **_: Any) -> None:
        self._waiting_for.discard(msg.node_id)
        if not self._waiting_for:
            self._all_sent = True
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
                    self._all_sent = True
                    _end_test(environment)

    def _all_done(self, environment: Any) -> None:
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.send_message(ALL_DONE, {})
        else:
            self._all_sent = True
            gevent.spawn(_end_test, environment)

    def _test_stopping(self, environment: Any, **_: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        if run is not None:
            run.stop()

    def _test_stop(self, environment: Any, **_: Any) -> None:
        if self._trial is not None:
            self._judging = gevent.spawn(self._judge, environment, self._trial, self._why_ended(environment))
            self._trial = None
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

    # -- the gate -------------------------------------------------------------------------------------------------

    def _gate_of(self, options: Any) -> Any:
        """The judge that the arguments ask for, or None. Raises UsageError."""
        if self._file_plan is not None or not (options.gate or options.gate_baseline or options.gate_router):
            return None
        from harness.locust_gate import Judge  # brings the reports along, which nobody else here needs

        return Judge.of(options, scenario_of(options))

    def _set_gate(self, environment: Any, plan: LoadPlan, *, shares: int) -> None:
        judge = self._gate_of(environment.parsed_options)
        if judge is not None:
            scenario = scenario_of(environment.parsed_options)
            self._trial = judge.trial(scenario, plan, _host(environment) or "", shares=shares)

    def _why_ended(self, environment: Any) -> Literal["whole", "limit", "stopped"]:
        options, shape = environment.parsed_options, environment.shape_class
        if self._all_sent:
            return "whole"
        if options.headless:  # a signal comes as `quitting`, before the test is stopped
            return "limit"
        if options.run_time and self._trial.seconds > options.run_time - RUN_TIME_SLACK_S:
            return "limit"
        return "limit" if shape is not None and shape.tick() is None else "stopped"

    def _judge(self, environment: Any, trial: Any, ended: Literal["whole", "limit", "stopped"]) -> None:
        environment.process_exit_code = 2  # stands where the judging itself breaks down
        try:
            environment.process_exit_code = trial.verdict(ended, environment.stop_timeout or 0)
        except HarnessError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            environment.process_exit_code = error.exit_code

    def _report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        new = self._figures.since(self._sent_figures)
        self._sent_figures.merge(new.pack())
        data[SHARE] = new.pack()

    def _take_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        self._figures.merge(data.get(SHARE) or {})

    def _cpu_warning(self, environment: Any, cpu_usage: float = 0.0, **_: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        if run is not None:
            run.files.event("cpu_warning", t_us=run.us(time.monotonic_ns()), cpu_percent=cpu_usage, by="locust")

    def _quitting(self, environment: Any, **_: Any) -> None:
        if self._trial is not None:  # Ctrl-C: Locust stops the test only after this
            self._judge(environment, self._trial, "stopped")
            self._trial = None
        elif self._judging is not None:
            self._judging.join()
        # With a plan the rows tell what failed, and whoever gave the plan judges; otherwise Locust's own rule holds.
        if self._file_plan is not None and environment.process_exit_code is None:
            environment.process_exit_code = 0
        allowed = share_max(environment.parsed_options)
        if allowed is not None and environment.process_exit_code is None:
            total = environment.stats.total  # Locust counts every request once, over all workers
            failed = total.num_requests == total.num_failures or total.fail_ratio > allowed
            environment.process_exit_code = 1 if failed else 0


def _host(environment: Any) -> str | None:
    """The address under test: the command line's, or that of a locustfile of one's own."""
    own = (getattr(user, "host", None) for user in environment.user_classes)
    return environment.host or next((host for host in own if host), None)


def _end_test(environment: Any) -> None:
    """The command line ends with its test; the web UI stays for the next start."""
    options = environment.parsed_options
    if options.headless:
        if options.csv_prefix:  # Locust writes these files every so often and not once more at the end
            environment.runner.stop()
            gevent.sleep(CSV_STATS_INTERVAL_SEC + CSV_SLACK_S)
        environment.runner.quit()
        return
    environment.runner.stop()
    if options.autostart and options.autoquit != -1:
        gevent.sleep(options.autoquit)
        environment.runner.quit()
        environment.web_ui.stop()


CONTROL = LoadControl(events)
