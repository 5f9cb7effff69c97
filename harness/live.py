"""A live arm: real replicas, a real router and Locust, each a process, measured from outside.

The harness only starts, watches and stops; every figure comes from files that the processes write themselves
(the load generator's rows, the engines' and the router's logs), which are joined when the arm is over. Whatever
ends the arm early (Ctrl-C, a dead process), the rows written until then are kept.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from harness.arm import Arm, ArmRows
from harness.errors import ProcessLost
from harness.event_sources import ReplicaAddress, deaf_note
from harness.fleet import HOST, clear_caches, start_ingresses, start_replicas
from harness.json_lines import read_json_lines
from harness.live_churn import LiveChurn
from harness.load_plan import LoadPlan
from harness.merge import merge_rows
from harness.processes import PYTHON, Child, Children, free_ports
from harness.router_samples import RouterWatch
from harness.signals import Interruption

POLL_S = 0.2
DRAIN_S = 20.0
"""How long Locust may take to write its last rows after it was asked to stop."""
STOP_S = "5"
"""Seconds that Locust gives users of its own when it stops; our requests end with the run."""
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def run_live_arm(
    arm: Arm,
    folder: Path,
    *,
    interruption: Interruption,
    on_phase: Callable[[str], None],
    on_done: Callable[[int], None],
    on_warn: Callable[[str], None],
) -> ArmRows:
    """Runs one arm in `folder` and returns its rows, also what was measured before Ctrl-C or a lost process.

    Raises StartError if something did not come up.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    epoch_ns = time.monotonic_ns()
    facts: dict[str, Any] = {"lost": [], "silent": []}
    with Children(folder) as children:
        try:
            _measure(arm, folder, children, epoch_ns, facts, on_phase, on_done, on_warn)
        except ProcessLost as lost:
            facts["lost"].append(str(lost))
        except KeyboardInterrupt:
            on_phase("interrupted")
        with interruption.calm():
            on_phase("collecting")
            _stop_load(children)
            children.stop()
            facts["cpu_s"] = children.cpu_s()
            return merge_rows(arm, folder, facts)


def _measure(
    arm: Arm,
    folder: Path,
    children: Children,
    epoch_ns: int,
    facts: dict[str, Any],
    on_phase: Callable[[str], None],
    on_done: Callable[[int], None],
    on_warn: Callable[[str], None],
) -> None:
    scenario = arm.scenario
    on_phase("starting replicas")
    replicas: list[ReplicaAddress] = []
    if not arm.router.url or scenario.fleet.urls:  # a router that already runs has engines of its own
        replicas = start_replicas(children, scenario, epoch_ns=epoch_ns, seed_for=arm.seed_for, log_dir=folder)
    facts["cached_blocks"] = clear_caches(replicas) if replicas else None
    if arm.router.hears_events(scenario.engine.block_size):
        facts["deaf"] = deaf_note(arm.router.name, replicas)
    on_phase("starting router")
    ingresses = start_ingresses(children, arm, replicas, epoch_ns=epoch_ns, log_dir=folder)
    ours = {} if arm.router.foreign else ingresses
    churn = LiveChurn(arm, children, replicas, ours, epoch_ns=epoch_ns, folder=folder)
    facts["churn"] = churn.record
    churn.prepare()
    on_phase("starting load")
    locust = start_load(arm, folder, children, ingresses, epoch_ns, replicas)
    rows = _RowCounter(folder)
    watch = RouterWatch(ours, folder)
    on_phase("measuring")
    while locust.running:
        churn.tick()
        for said in watch.sample():
            facts["silent"].append(f"{arm.label}: {said}")
            on_warn(facts["silent"][-1])
        children.require_alive(but=(locust,))
        children.measure()
        on_done(rows.count())
        time.sleep(churn.wait_s(POLL_S))
    on_done(rows.count())
    if locust.exit_code != 0:  # failed requests are no failure of a load generator that has a plan
        raise ProcessLost(locust.why_ended())
    events = read_json_lines(folder.glob("locust-*.events.jsonl"))
    ended = sum(event.get("event") == "end" for event in events)
    if ended < scenario.load.processes:
        raise ProcessLost(
            f"{scenario.load.processes - ended} of {scenario.load.processes} load processes ended without their last "
            f"word, so rows are missing; {locust.why_ended()}"
        )
    children.require_alive(but=(locust,))


def start_load(
    arm: Arm,
    folder: Path,
    children: Children,
    ingresses: Mapping[str, str],
    epoch_ns: int,
    replicas: Sequence[ReplicaAddress] = (),
) -> Child:
    """Starts Locust headless against the router. It ends by itself when nothing is left to send or to wait for."""
    url = next(iter(ingresses.values()))
    scenario, load = arm.scenario, arm.scenario.load
    drive: dict[str, Any] = load.drive()
    plan = LoadPlan(
        **drive,
        workload=scenario.workload,
        seed=arm.workload_seed,
        api=load.api,
        model=load.model,
        session_header=load.session_header,
        request_timeout_s=load.request_timeout_s,
        replicas={replica.name: replica.url for replica in replicas},
        ingresses=dict(ingresses),
        spread=arm.setup.spread,
        answers=scenario.answers,
        verify_answers=scenario.verify_answers,
        rows_dir=str(folder),
        epoch_ns=epoch_ns,
    )
    plan_file = folder / "load-plan.json"
    plan_file.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    users = load.slots or load.processes
    several = ["--processes", str(load.processes), "--expect-workers", str(load.processes), *meeting_place()]
    more = ["--stop-timeout", STOP_S, *(several if load.processes > 1 else [])]
    return children.start("locust", locust_command(plan_file, url, users, *more))


def meeting_place() -> list[str]:
    """Arguments by which the processes of one Locust meet at a port of their own on loopback; Locust's default is one
    and the same for all tests of a machine, and open to its network."""
    port = free_ports(1)[0]
    return f"--master-bind-host {HOST} --master-bind-port {port} --master-host {HOST} --master-port {port}".split()


def locust_command(plan_file: Path, url: str, users: int, *more: str) -> list[str]:
    """Locust headless with a plan against a router; `more` are arguments of its own."""
    told = {"-f": LOCUSTFILE, "--host": url, "--users": users, "--spawn-rate": users, "--routebench-plan": plan_file}
    words = [word for name, value in told.items() for word in (name, str(value))]
    return [*PYTHON, "-m", "locust", "--headless", "--only-summary", *words, *more]


def _stop_load(children: Children) -> None:
    """Asks Locust to end first, so that it can still write what was in flight."""
    for child in children:
        if child.name == "locust" and child.running:
            child.stop(signal.SIGTERM, DRAIN_S)


class _RowCounter:
    """Counts rows as they are appended, reading only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._count = 0

    def count(self) -> int:
        for path in self._folder.glob("locust-*.jsonl"):
            if path.name.endswith(".events.jsonl"):
                continue
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
                self._read[path] = file.tell()
                self._count += new.count(b"\n")
        return self._count
