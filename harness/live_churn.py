"""Replicas that come and go during a live arm: processes are started and killed, and routers of ours are told.

The arm's loop calls `tick` and never waits here for a process: one that is to join is started some seconds ahead, so
that it joins on time, and a removal is looked at again until it is over. Instants count from the load's own start, as
its processes wrote it down. What could not be done is in the record with its reason; what is due after the load's end
is not done any more. A process that ends by order of the list is no lost one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.arm import Arm
from harness.churn import ChurnEvent
from harness.errors import ProcessLost
from harness.event_sources import ReplicaAddress
from harness.fleet import launch_replica
from harness.json_lines import read_json_lines
from harness.merge import load_start_us
from harness.processes import Child, Children, call, get_json

BOOT_AHEAD_S = 5.0
"""A Python process needs about one on an idle machine."""
LOOK_S = 0.1
"""How often a replica that is waited for is looked at."""
ANSWER_S = 2.0


class LiveChurn:
    """`ingresses`: our routers by name, empty where the router is not ours and cannot be told."""

    def __init__(
        self,
        arm: Arm,
        children: Children,
        replicas: Sequence[ReplicaAddress],
        ingresses: Mapping[str, str],
        *,
        epoch_ns: int,
        folder: Path,
    ) -> None:
        self.record: list[dict[str, Any]] = [
            {"at_s": event.at_us / 1e6, "do": event.do, "replica": event.replica, "done_us": None}
            for event in arm.scenario.churn
        ]
        self._arm = arm
        self._children = children
        self._ingresses = ingresses
        self._epoch_ns = epoch_ns
        self._folder = folder
        self._addresses = {replica.name: replica for replica in replicas}
        ours = self._addresses if self.record else ()  # engines that run elsewhere have no process here
        self._processes = {name: children.find(f"replica-{name}") for name in ours}
        self._known = set(self._addresses)
        """Those that routers count as theirs."""
        self._lives = dict.fromkeys(self._addresses, 0)
        self._coming: dict[int, tuple[Child, ReplicaAddress]] = {}
        """Processes started for an event that is not done yet."""
        self._todo = list(range(len(self.record)))
        self._start_us: int | None = None

    def prepare(self) -> None:
        """Before the load starts: what joins in its first seconds is started now."""
        self._boot(0)

    def wait_s(self, at_most: float) -> float:
        """How long the arm's loop may sleep."""
        if not self._todo or self._start_us is None:
            return at_most
        event = self._arm.scenario.churn[self._todo[0]]
        left_s = (self._start_us + event.at_us - self._now_us()) / 1e6
        return min(at_most, max(left_s, 0.01) if left_s > 0 else LOOK_S)

    def tick(self) -> None:
        """Does what is due. Raises ProcessLost for a replica that was started to join and ended by itself."""
        if not self._todo:
            return
        if self._start_us is None:
            self._start_us = load_start_us(read_json_lines(self._folder.glob("locust-*.events.jsonl")))
            if self._start_us is None:
                return
        now_us = self._now_us() - self._start_us
        self._boot(now_us)
        waits: set[str] = set()
        """A replica's events happen in order, others do not wait for it."""
        for number in list(self._todo):
            event = self._arm.scenario.churn[number]
            if event.at_us > now_us:
                break
            if event.replica not in waits and self._over(number, event, now_us):
                self._todo.remove(number)
            else:
                waits.add(event.replica)

    def _now_us(self) -> int:
        return (time.monotonic_ns() - self._epoch_ns) // 1000

    def _boot(self, now_us: int) -> None:
        for number in self._todo:
            event = self._arm.scenario.churn[number]
            if event.at_us - now_us > BOOT_AHEAD_S * 1e6:
                return
            if event.do == "add" and number not in self._coming and not self._earlier(number, event.replica):
                process = self._processes.get(event.replica)
                if process is None or not process.running or process.dismissed:
                    self._coming[number] = self._launch(event.replica, None)

    def _earlier(self, number: int, replica: str) -> bool:
        """Whether something else is to happen to the replica first, so that its process may still be there."""
        return any(n < number and self.record[n]["replica"] == replica for n in self._todo)

    def _launch(self, name: str, place: ReplicaAddress | None) -> tuple[Child, ReplicaAddress]:
        """A process of that name, at a new place or the old one."""
        life = self._lives[name] = self._lives.get(name, -1) + 1
        seed = self._arm.seed_for(f"engine.{name}.{life}" if life else f"engine.{name}")
        return launch_replica(
            self._children,
            self._arm.scenario,
            name,
            epoch_ns=self._epoch_ns,
            seed=seed,
            log_dir=self._folder,
            place=place,
        )

    # ---- what is done -------------------------------------------------------------------------------------------

    def _over(self, number: int, event: ChurnEvent, now_us: int) -> bool:
        """Whether the event is done with, one way or the other."""
        line = self.record[number]
        try:
            if not self._do(number, event, now_us):
                return False
        except OSError as error:
            line["error"] = str(getattr(error, "reason", error))
        else:
            line["done_us"] = self._now_us()
        return True

    def _do(self, number: int, event: ChurnEvent, now_us: int) -> bool:
        """Goes on with an event; True when it is done. Raises OSError where somebody did not do as told."""
        name = event.replica
        process = self._processes.get(name)
        if event.do == "add":
            return self._add(number, name, process)
        assert process is not None
        if event.do == "drain":
            self._drain(name)
        elif event.do == "crash":
            process.dismissed = True
            process.send(signal.SIGKILL)
        elif event.do == "restart":
            return self._restart(number, name, process)
        else:
            return self._remove(number, name, process, late=now_us > event.at_us + event.limit_us)
        return True

    def _add(self, number: int, name: str, process: Child | None) -> bool:
        if process is not None and process.running and not process.dismissed:
            self._join(self._addresses[name])
            return True
        if number not in self._coming:
            self._coming[number] = self._launch(name, None)
        if not self._ready(number):
            return False
        self._processes[name], self._addresses[name] = self._coming.pop(number)
        if name in self._known:
            self._leave(name)
        self._join(self._addresses[name])
        return True

    def _restart(self, number: int, name: str, process: Child) -> bool:
        if process.running and not process.dismissed:
            call("POST", f"{self._addresses[name].url}/mock/restart", timeout_s=ANSWER_S)
            return True
        if number not in self._coming:
            self._coming[number] = self._launch(name, self._addresses[name])
        if not self._ready(number):
            return False
        self._processes[name], _ = self._coming.pop(number)
        return True

    def _remove(self, number: int, name: str, process: Child, *, late: bool) -> bool:
        line = self.record[number]
        if process.running and not process.dismissed:
            if "drained" not in line:
                self._drain(name)
                line["drained"] = True
            if not late and self._in_flight(name):
                return False
            process.dismissed = True
        self._leave(name)
        process.send(signal.SIGKILL if late else signal.SIGTERM)
        line.pop("drained", None)
        return True

    def _ready(self, number: int) -> bool:
        child, address = self._coming[number]
        if not child.running:
            raise ProcessLost(child.why_ended())
        try:
            get_json(f"{address.url}/health", LOOK_S)
        except OSError:
            return False
        return True

    # ---- what routers are told ----------------------------------------------------------------------------------

    def _join(self, replica: ReplicaAddress) -> None:
        events = {"events": replica.kv_events} if replica.kv_events else {}
        body = msgspec.json.encode({"name": replica.name, "url": replica.url, **events})
        self._known.add(replica.name)
        for url in self._ingresses.values():
            call("POST", f"{url}/router/replicas", body, timeout_s=ANSWER_S)

    def _drain(self, name: str) -> None:
        for url in self._ingresses.values():
            call("POST", f"{url}/router/replicas/{name}/drain", timeout_s=ANSWER_S)

    def _leave(self, name: str) -> None:
        self._known.discard(name)
        for url in self._ingresses.values():
            call("DELETE", f"{url}/router/replicas/{name}", timeout_s=ANSWER_S)

    def _in_flight(self, name: str) -> int:
        """What the routers have under way there."""
        return sum(
            replica["in_flight"]
            for url in self._ingresses.values()
            for replica in get_json(f"{url}/router/replicas", ANSWER_S)
            if replica["name"] == name
        )
