"""The clock of a simulation: a heap of instants, each with what is to happen then.

What falls on one instant happens in the order of `harness.sim_order`, and within that in the order in which it was set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimClock:
    def __init__(self) -> None:
        self.now_us = 0
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, instant_us: int, kind: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (instant_us, kind, self._order, action))

    @property
    def next_us(self) -> int | None:
        """The next instant at which anything was set to happen."""
        return self._heap[0][0] if self._heap else None

    def go(self) -> None:
        """Does the next thing."""
        instant, _, _, action = heapq.heappop(self._heap)
        self.now_us = max(self.now_us, instant)
        action()

    def go_until(self, kind: int) -> None:
        """Does what is due by now and comes before things of this kind."""
        while self._heap and self._heap[0][:2] < (self.now_us, kind):
            self.go()
