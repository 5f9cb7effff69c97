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
from harness.fleet import ReplicaAddress, clear_caches, start_ingresses, start_replicas
from harness.live_churn import LiveChurn
from harness.load_plan import LoadPlan
from harness.merge import merge_rows
from harness.processes import PYTHON, Child, Children
from harness.router_samples import RouterWatch
from harness.signals import Interruption

POLL_S = 0.2
DRAIN_S = 20.0
"""How long Locust may take to write its last rows after it was asked to stop."""
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def run_live_arm(
    arm: Arm,
    folder: Path,
    *,
    interruption: Interruption,
    on_phase: Callable[[str], None],
    on_done: Callable[[int], None],
) -> ArmRows:
    """Runs one arm in `folder` and returns its rows, also what was measured before Ctrl-C or a lost process.

    Raises StartError if something did not come up.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    epoch_ns = time.monotonic_ns()
    facts: dict[str, Any] = {"lost": []}
    with Children(folder) as children:
        try:
            _measure(arm, folder, children, epoch_ns, facts, on_phase, on_done)
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
) -> None:
    scenario = arm.scenario
    on_phase("starting replicas")
    replicas: list[ReplicaAddress] = []
    if not arm.router.url or scenario.fleet.urls:  # a router that already runs has engines of its own
        replicas = start_replicas(children, scenario, epoch_ns=epoch_ns, seed_for=arm.seed_for, log_dir=folder)
    facts["cached_blocks"] = clear_caches(replicas) if replicas else None
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
        watch.sample()
        children.require_alive(but=(locust,))
        children.measure()
        on_done(rows.count())
        time.sleep(churn.wait_s(POLL_S))
    on_done(rows.count())
    if locust.exit_code not in (0, 1):  # 1 is Locust's own word for "some requests failed"; the rows say which
        raise ProcessLost(locust.why_ended())
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
    users = str(load.slots or load.processes)
    several = ["--processes", str(load.processes), "--expect-workers", str(load.processes)]
    return children.start(
        "locust",
        [
            *PYTHON,
            "-m",
            "locust",
            "-f",
            str(LOCUSTFILE),
            "--headless",
            "--host",
            url,
            "--users",
            users,
            "--spawn-rate",
            users,
            "--only-summary",
            "--stop-timeout",
            "5",
            "--routebench-plan",
            str(plan_file),
            *(several if load.processes > 1 else []),
        ],
    )


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
