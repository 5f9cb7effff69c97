"""A circuit breaker as routers in the field have it: a replica that failed several times in a row is left out a while.

Pure. Law: whoever is left out is let in again when its time is over, and the next answer decides. What counts as a
failure is the caller's to say, and that is where routers go wrong: one that counts a client's own errors closes its
whole fleet against healthy traffic. This router has no breaker unless that fault is asked for.
"""

from __future__ import annotations

from routers.config import at_least


class Breaker:
    """Open for `open_us` from the `threshold`-th failure in a row on; then one more failure opens it again."""

    def __init__(self, threshold: int, open_us: int = 60_000_000) -> None:
        at_least(1, breaker_threshold=threshold, breaker_open_us=open_us)
        self._threshold = threshold
        self._open_us = open_us
        self._failures: dict[str, int] = {}
        self._until: dict[str, int] = {}

    def failed(self, replica: str, now_us: int) -> None:
        self._failures[replica] = self._failures.get(replica, 0) + 1
        if self._failures[replica] >= self._threshold:
            self._until[replica] = now_us + self._open_us

    def served(self, replica: str, now_us: int) -> None:
        """Closes it, unless it is open: then the answer is to a request that was on its way before."""
        if now_us >= self._until.get(replica, 0):
            self.leave(replica)

    def leave(self, replica: str) -> None:
        """It left the fleet; another one under its name has done nothing yet."""
        self._failures.pop(replica, None)
        self._until.pop(replica, None)

    def open(self, now_us: int) -> frozenset[str]:
        """Replicas that take nothing now."""
        return frozenset(replica for replica, until in self._until.items() if now_us < until)
