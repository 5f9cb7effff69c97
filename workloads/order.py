"""The order in which a workload's requests go out when every answer takes a known time: the drivers' rule, executed.

Pure, and its own clock: a heap of instants. Slots take the sessions that wait for one; sessions with a `start_us` or
an `after` start by themselves. What waits is looked for again whenever something ends. A session that waits for
something which the workload never yields is started when nothing else is left, so every request goes out once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from workloads.sessions import Session, Turn
from workloads.spans import Span

ANSWER_US_PER_TOKEN = 20_000
"""50 tokens a second and stream: a usual reading of a served 8B model; only the interleaving depends on it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as it goes out."""

    at_us: int
    session: Session
    turn: Turn
    prompt: tuple[Span, ...]


def answer_us(turn: Turn) -> int:
    """How long an answer takes when nobody measured it."""
    return turn.output[1] * ANSWER_US_PER_TOKEN


def requests_in_order(
    sessions: Iterable[Session], concurrency: int, duration_us: Callable[[Turn], int] = answer_us
) -> Iterator[Sent]:
    """Requests by instant, ties in the order in which they became known. `concurrency` is the number of slots."""
    if concurrency < 1:
        raise ValueError(f"concurrency = {concurrency}: at least 1 slot is needed")
    return _Order(sessions, concurrency, duration_us).run()


_ANSWERED, _DUE = 0, 1
"""At one instant an answer ends before a request goes out."""


class _Order:
    def __init__(self, sessions: Iterable[Session], slots: int, duration_us: Callable[[Turn], int]) -> None:
        self._coming = iter(sessions)
        self._next = next(self._coming, None)
        self._slots = slots
        self._duration_us = duration_us
        self._ended: set[str] = set()
        self._heap: list[tuple[int, int, int, Session, int]] = []
        self._parked: dict[str, list[tuple[Session, int]]] = {}
        """What waits, under the first name that it still waits for."""
        self._count = 0
        self._contexts: dict[str, list[Span]] = {}

    def run(self) -> Iterator[Sent]:
        now_us = 0
        while True:
            self._fill(now_us)
            if not self._heap and not self._unpark(now_us):
                return
            now_us, kind, _, session, index = heapq.heappop(self._heap)
            turn = session.turns[index]
            if kind == _DUE:
                context = self._contexts.setdefault(session.session_id, [])
                if turn.restart:
                    context.clear()
                context.extend(turn.input)
                yield Sent(now_us, session, turn, tuple(context) if turn.front is None else (turn.front, *context))
                context.append(turn.output)
                self._push(now_us + self._duration_us(turn), _ANSWERED, session, index)
            else:
                self._answered(now_us, session, turn)

    def _fill(self, now_us: int) -> None:
        """Takes sessions: one for each free slot, and everything that starts by itself up to now or the next event."""
        while True:
            session = self._next
            if session is None:
                return
            if session.waits_for_a_slot:
                if self._slots == 0:
                    return
                self._slots -= 1
            elif session.start_us is not None and not session.after:
                due_us = session.start_us
                if self._heap and self._heap[0][0] < due_us:
                    return
            self._next = next(self._coming, None)
            self._plan(now_us, session, 0)

    def _plan(self, now_us: int, session: Session, index: int) -> None:
        """Sends a turn when its time has come, or parks it until what it waits for has ended."""
        turn = session.turns[index]
        waits = (*session.after, *turn.after) if index == 0 else turn.after
        missing = next((name for name in waits if name not in self._ended), None)
        if missing is not None:
            self._parked.setdefault(missing, []).append((session, index))
            return
        start_us = max(turn.start_us or 0, session.start_us or 0 if index == 0 else 0)
        self._push(max(now_us + turn.think_us, start_us), _DUE, session, index)

    def _answered(self, now_us: int, session: Session, turn: Turn) -> None:
        if turn.index + 1 < len(session.turns):
            self._plan(now_us, session, turn.index + 1)
        else:
            self._contexts.pop(session.session_id, None)
            if session.waits_for_a_slot:
                self._slots += 1
            self._end(now_us, session.session_id)
        if turn.name is not None:
            self._end(now_us, turn.name)

    def _end(self, now_us: int, name: str) -> None:
        self._ended.add(name)
        for session, index in self._parked.pop(name, ()):
            self._plan(now_us, session, index)

    def _unpark(self, now_us: int) -> bool:
        """Everything that still goes on waits: for a slot that a waiting session holds, or for what never comes."""
        if self._next is not None:
            self._slots += 1
            self._fill(now_us)
            return True
        if not self._parked:
            return False
        self._end(now_us, next(iter(self._parked)))
        return True

    def _push(self, at_us: int, kind: int, session: Session, index: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_us, kind, self._count, session, index))
