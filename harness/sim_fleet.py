"""The engines of a simulation: which are there, how far each has run, and when one next shows something.

An engine is left behind until somebody must know its state, then it jumps there at once. Law: what an engine did is
handed on (`file`) in the order in which it did it; `life` tells one engine of a name from the next, so that nothing
that a dead one was about to show is taken for the new one's. Through all its lives a name keeps its place among
instants that tie.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any

from harness.arm import Arm
from harness.sim_caches import CacheView
from mock_engine import Engine, Run, Step

_COUNTERS = ("hit_tokens", "query_tokens", "evicted_blocks", "preemptions")
_GAUGES = ("running", "waiting", "used_blocks", "active_decode_blocks")


class SimFleet:
    """`keep_caches`: follow what each engine holds, for policies that hear more than events."""

    def __init__(
        self,
        arm: Arm,
        make_engine: Callable[..., Engine],
        file: Callable[[str, Run | Step], None],
        *,
        keep_caches: bool,
    ) -> None:
        self._arm = arm
        self._make_engine = make_engine
        self._file = file
        self._engines: dict[str, Engine] = {}
        self._lives: dict[str, int] = {}
        self._next_us: dict[str, int | None] = {}
        self._soonest: list[tuple[int, int, str]] = []
        """(instant at which an engine shows something, place of the engine, its name); stale ones stay until met."""
        self._places: dict[str, int] = {}
        self._last_sample: dict[str, tuple[int, int]] = {}
        self.caches: dict[str, CacheView] = {}
        self._keep_caches = keep_caches
        for name in arm.scenario.fleet.names:
            self.boot(name)

    def __iter__(self) -> Iterator[tuple[str, Engine]]:
        """Those that are there, in the order in which they began."""
        return iter(list(self._engines.items()))

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __contains__(self, name: object) -> bool:
        return name in self._engines

    def life(self, name: str) -> int:
        """Which of its lives a replica is in; another one's events are no news of this one."""
        return self._lives[name]

    # ---- coming and going ---------------------------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """A cold engine of that name, in place of one that may be there."""
        scenario = self._arm.scenario
        life = self._lives[name] = self._lives.get(name, -1) + 1
        stream = f"engine.{name}.{life}" if life else f"engine.{name}"
        rng = random.Random(self._arm.seed_for(stream))
        self._engines[name] = self._make_engine(scenario.engine, cost=scenario.preset.cost, rng=rng)
        self._places.setdefault(name, len(self._places))
        self._next_us[name] = None
        self._last_sample[name] = (0, 0)
        self._forget_cache(name)

    def kill(self, name: str) -> None:
        """Gone, with everything it held."""
        del self._engines[name]
        self._next_us[name] = None
        self._lives[name] += 1
        self._forget_cache(name)

    def _forget_cache(self, name: str) -> None:
        if self._keep_caches:
            before = self.caches.get(name)
            self.caches[name] = CacheView(self._arm.scenario.engine.block_size)
            self.caches[name].generation = before.generation + 1 if before is not None else 0

    # ---- time ---------------------------------------------------------------------------------------------------

    def advance(self, name: str, horizon_us: int) -> None:
        """Runs one engine up to an instant; what it did is filed under the instants at which it shows."""
        for done in self._engines[name].run_until(horizon_us):
            self._file(name, done)
        self.note_next(name)

    def note_next(self, name: str) -> None:
        """To be called when an engine was given something to do, or relieved of it."""
        instant = self._engines[name].next_us()
        if instant != self._next_us[name]:
            self._next_us[name] = instant
            if instant is not None:
                heapq.heappush(self._soonest, (instant, self._places[name], name))

    def soonest(self) -> tuple[int, str] | None:
        """The next instant at which an engine shows something, and which."""
        while self._soonest and self._next_us[self._soonest[0][2]] != self._soonest[0][0]:
            heapq.heappop(self._soonest)
        return (self._soonest[0][0], self._soonest[0][2]) if self._soonest else None

    @property
    def busy(self) -> bool:
        return any(instant is not None for instant in self._next_us.values())

    # ---- samples ------------------------------------------------------------------------------------------------

    def samples(self, now_us: int) -> Iterator[dict[str, Any]]:
        """A row of every engine that is there; the arm's own columns come on top."""
        for name, engine in self:
            self.advance(name, now_us)
            snapshot = engine.snapshot()
            busy_us, steps = self._last_sample[name]
            self._last_sample[name] = (snapshot.busy_us, snapshot.steps)
            step_us = (snapshot.busy_us - busy_us) / (snapshot.steps - steps) if snapshot.steps > steps else None
            yield {
                "t_us": now_us,
                "replica": name,
                **{key: getattr(snapshot, key) for key in (*_GAUGES, *_COUNTERS)},
                "step_us_mean": step_us,
                "late_us_p99": None,
            }
