"""Turns that a policy holds back, in the order in which it lets them go.

Pure. The head waits until the policy says that it need not, and whoever stands behind it waits with it, however
little it asks for (head-of-line blocking, as in the router that this is modelled on). A turn leaves by being placed
or by being given up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from routers.errors import NoReplica
from routers.view import Decision, TurnView

Placed = Callable[[Decision | NoReplica], None]


class Held(msgspec.Struct, frozen=True):
    turn: TurnView
    exclude: frozenset[str]
    since_us: int
    placed: Placed


class WaitingRoom:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, str]] = []
        self._held: dict[str, Held] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def enter(self, place: tuple[float, ...], held: Held) -> None:
        self._arrivals += 1
        self._held[held.turn.request_id] = held
        heapq.heappush(self._heap, (place, self._arrivals, held.turn.request_id))

    def head(self) -> Held | None:
        while self._heap and self._heap[0][2] not in self._held:
            heapq.heappop(self._heap)
        return self._held[self._heap[0][2]] if self._heap else None

    def leave(self, request_id: str) -> None:
        """What stays of it in the heap is stepped over when it is met."""
        del self._held[request_id]
