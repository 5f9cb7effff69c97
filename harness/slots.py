"""Session slots: who takes the next session, and when the next rollout step may begin.

Pure. A slot is held by one session from its first turn to its last. A workload with a barrier hands out sessions of
a rollout step only when every rollout of the step before has ended; a slot that comes too early waits.
"""

from __future__ import annotations

from workloads import Session, Streams, Workload


class Slots:
    """Hands sessions to slots in the workload's order."""

    def __init__(self, workload: Workload, streams: Streams) -> None:
        self._sessions = iter(workload.sessions(streams))
        self._barrier = workload.barrier
        self._next: Session | None = next(self._sessions, None)
        self._step: int | None = None
        self._alive = 0
        self._waiting: list[int] = []

    def take(self, slot: int) -> Session | None:
        """The slot's next session; None when there is none now. `ended` names a slot that a barrier held back."""
        session = self._next
        if session is None:
            return None
        if self._barrier and self._alive and session.rollout_step != self._step:
            self._waiting.append(slot)
            return None
        self._step = session.rollout_step
        self._alive += 1
        self._next = next(self._sessions, None)
        return session

    def ended(self, session: Session) -> list[int]:
        """Tells that a session has ended; returns the slots that may now take one, besides its own."""
        self._alive -= 1
        if self._alive or not self._waiting:
            return []
        woken, self._waiting = self._waiting, []
        return woken
