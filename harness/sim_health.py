"""Replicas that are down, in virtual time: when a router finds out, and when it looks again.

The same rules and spacing as our router process. Law: an ingress knows only of connections of its own requests and of
its own looks; a look meets the fleet as the instant's comings and goings have left it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from harness.sim_clock import SimClock
from harness.sim_order import POLL
from harness.sim_routers import SimRouters
from harness.sim_shown import SimShown
from routers import HEALTH_INTERVAL_MS

_INTERVAL_US = 1000 * HEALTH_INTERVAL_MS


class SimHealth:
    """`busy()`: whether anything is still to come that a look could matter to."""

    def __init__(self, routers: SimRouters, shown: SimShown, clock: SimClock, busy: Callable[[], bool]) -> None:
        self._routers = routers
        self._shown = shown
        self._clock = clock
        self._busy = busy
        self._doubted: set[tuple[int, str]] = set()

    def broken(self, place: int, replica: str) -> None:
        """At that ingress: it took no connection, or broke one before it answered."""
        now_us = self._clock.now_us
        if self._routers.unreachable(place, replica, now_us):
            self._clock.at(now_us, POLL, partial(self._look, place, replica, now_us))

    def doubted(self, place: int, replica: str) -> None:
        """At that ingress: it broke off in the middle of an answer."""
        if (place, replica) not in self._doubted:
            self._doubted.add((place, replica))
            self._clock.at(self._clock.now_us, POLL, partial(self._ask, place, replica))

    def answered(self, place: int, replica: str) -> None:
        if replica in self._routers[place].down:
            self._routers.reachable(place, replica, self._clock.now_us)

    def _ask(self, place: int, replica: str) -> None:
        self._doubted.discard((place, replica))
        if replica not in self._shown.fleet:
            self.broken(place, replica)

    def _look(self, place: int, replica: str, since_us: int) -> None:
        if self._routers[place].down.since_us().get(replica) != since_us:
            return  # it answered, or left, or went down anew
        if replica in self._shown.fleet:
            self._shown.before_release()
            self._routers.reachable(place, replica, self._clock.now_us)
        elif self._busy():
            self._clock.at(self._clock.now_us + _INTERVAL_US, POLL, partial(self._look, place, replica, since_us))
