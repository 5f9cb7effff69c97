"""Events per replica over a sliding window, as production-stack's statistics count them.

Law: a count is the number of events not older than the window. A replica that never had one is told apart from one
whose events are all too old: the first is unknown, the second is zero.
"""

from __future__ import annotations

from collections import deque


class WindowCounts:
    def __init__(self, window_s: float = 60.0) -> None:
        self._window_us = round(1e6 * window_s)
        self._events: dict[str, deque[int]] = {}

    def add(self, replica: str, at_us: int) -> None:
        self._events.setdefault(replica, deque()).append(at_us)

    def count(self, replica: str, now_us: int) -> int | None:
        """None for a replica that never had an event."""
        events = self._events.get(replica)
        if events is None:
            return None
        while events and events[0] < now_us - self._window_us:
            events.popleft()
        return len(events)

    def forget(self, replica: str) -> None:
        self._events.pop(replica, None)
