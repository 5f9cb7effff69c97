"""Replicas that come and go in virtual time: the same events as live, done at their instants.

A crash ends what the replica had, and nobody tells the routers, which find their connections broken or the port
closed. A removal is over when the replica is idle or its limit has passed. What is due after the end of the load is not
done any more.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from harness.churn import ChurnEvent
from harness.sim_clock import SimClock
from harness.sim_order import CHURN
from harness.sim_routers import SimRouters
from harness.sim_shown import SimShown


class World(Protocol):
    """What happens to replicas happens to requests."""

    def settle(self, replica: str) -> None:
        """Everything that a replica has shown by now has reached whom it concerns."""

    def break_connections(self, replica: str) -> None:
        """What a replica had ends without an end."""

    def holds(self, replica: str) -> bool:
        """Whether requests are under way there."""


class SimChurn:
    def __init__(
        self,
        events: tuple[ChurnEvent, ...],
        shown: SimShown,
        routers: SimRouters,
        world: World,
        clock: SimClock,
    ) -> None:
        self._shown = shown
        self._fleet = shown.fleet
        self._routers = routers
        self._world = world
        self._clock = clock
        self._leaving: dict[str, dict[str, Any]] = {}
        """Replicas whose removal is not over, and its line of the record."""
        self.record: list[dict[str, Any]] = [
            {"at_s": event.at_us / 1e6, "do": event.do, "replica": event.replica, "done_at_s": None} for event in events
        ]
        self._events = events

    def do(self, number: int, now_us: int) -> None:
        event, line = self._events[number], self.record[number]
        name = event.replica
        if event.do == "add":
            self._add(name, now_us)
        elif event.do == "drain":
            self._routers.drain(name, now_us)
        elif event.do == "crash":
            self._stop(name)
        elif event.do == "restart":
            self._restart(name)
        else:
            self._leaving[name] = line
            if name in self._fleet:
                self._routers.drain(name, now_us)
                self._clock.at(now_us + event.limit_us, CHURN, partial(self._leave, name, now_us + event.limit_us))
            self.look(name, now_us)
            return
        line["done_at_s"] = now_us / 1e6

    def look(self, name: str, now_us: int) -> None:
        """A request there has ended: a replica that only waited for that goes."""
        if name in self._leaving and not self._world.holds(name):
            self._leave(name, now_us)

    def _leave(self, name: str, now_us: int) -> None:
        line = self._leaving.pop(name, None)
        if line is None:
            return
        self._routers.remove(name, now_us)
        if name in self._fleet:
            self._stop(name)
        line["done_at_s"] = now_us / 1e6

    def _add(self, name: str, now_us: int) -> None:
        known = any(view.name == name for view in self._routers[0].replicas())
        if name not in self._fleet:
            self._fleet.boot(name)
            self._routers.add(name, now_us, anew=known)
        else:
            self._routers.add(name, now_us, anew=False)

    def _stop(self, name: str) -> None:
        self._world.settle(name)
        self._fleet.kill(name)
        self._shown.disconnected(name)
        self._world.break_connections(name)

    def _restart(self, name: str) -> None:
        if name in self._fleet:
            self._stop(name)
        self._fleet.boot(name)
