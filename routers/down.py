"""Replicas that are down: since when, and what a router does about them.

Pure. Law: down is who took no connection or broke one, until it answers again; nobody is down for an error that it
answered with, since a replica that answers is there. A down replica is still a member of the fleet: what is believed of
its cache is for its events to say. The odd thing: the first look at it is due at once, so that a connection that broke
for a reason of its own costs its replica a moment and not an interval.
"""

from __future__ import annotations

from routers.config import at_least

HEALTH_INTERVAL_MS = 1000
"""Between two looks at a replica that is down. HAProxy looks every 2 s (`inter`), which with its `rise 2` is 4 s until
it believes; one answer is enough here, and a second is little beside the time in which an engine loads its weights."""

RETRIES_MAX = 3
"""Other replicas that a request is sent to, if one took no connection or broke it before it answered: HAProxy's
`retries` with `option redispatch`. Few, because a request that kills its replica must not meet them all."""


class Down:
    """`interval_ms` 0: nobody looks, so nobody is taken out either, and every turn finds out for itself."""

    def __init__(self, interval_ms: int = HEALTH_INTERVAL_MS) -> None:
        at_least(0, health_interval_ms=interval_ms)
        self._interval_us = 1000 * interval_ms
        self._since: dict[str, int] = {}
        self.times = 0
        """How often a replica went down."""

    def __contains__(self, name: object) -> bool:
        return name in self._since

    def __bool__(self) -> bool:
        return bool(self._since)

    def since_us(self) -> dict[str, int]:
        return dict(self._since)

    def enter(self, name: str, now_us: int) -> bool:
        """Whether that is news."""
        if not self._interval_us or name in self._since:
            return False
        self._since[name] = now_us
        self.times += 1
        return True

    def was_long(self, name: str, now_us: int) -> bool:
        """Down for an interval or longer: at the first look it was still gone, so it was no connection's own trouble
        and its cache is likely lost."""
        return name in self._since and now_us - self._since[name] >= self._interval_us

    def leave(self, name: str) -> bool:
        """Whether that is news."""
        return self._since.pop(name, None) is not None
