"""Ramped traffic for a replica that joined a running fleet, or was down and is back: let in bit by bit, being cold.

Law: the share of turns for which a new replica may be chosen grows in a straight line from `first_share` to all of them
over `ramp_s`, and a session (or a request without one) that was let in once stays let in: who is in is decided by a
hash against the share, not by a draw, so a session never goes back and forth.
"""

from __future__ import annotations

from routers.config import TIME_S_MAX, at_least, at_most
from routers.errors import OptionError
from routers.ring import xxh3

_HASHES = float(1 << 64)


class Ramp:
    """10 % at first, as the reference text on prefix-aware routing has it (which takes five minutes); off at 0 s."""

    def __init__(self, ramp_s: float = 0.0, first_share: float = 0.1) -> None:
        at_least(0, ramp_s=ramp_s, ramp_first_share=first_share)
        at_most(TIME_S_MAX, ramp_s=ramp_s)
        if first_share > 1:
            raise OptionError(f"ramp_first_share={first_share} is more than all turns: give a share from 0 to 1")
        self._ramp_us = round(1e6 * ramp_s)
        self._first = first_share
        self._since: dict[str, int] = {}

    def join(self, replica: str, now_us: int) -> None:
        if self._ramp_us:
            self._since[replica] = now_us

    def leave(self, replica: str) -> None:
        self._since.pop(replica, None)

    def share(self, replica: str, now_us: int) -> float:
        """Of all turns, 0..1; forgets a replica whose ramp is over."""
        since = self._since.get(replica)
        if since is None:
            return 1.0
        part = (now_us - since) / self._ramp_us
        if part >= 1:
            del self._since[replica]
            return 1.0
        return self._first + (1 - self._first) * max(0.0, part)

    def held_back(self, key: str, now_us: int) -> list[str]:
        """Replicas that the turn of this session (or request) may not have yet."""
        return [name for name in list(self._since) if xxh3(f"{key}@{name}") / _HASHES >= self.share(name, now_us)]

    def shares(self, now_us: int) -> dict[str, float]:
        """Of the replicas on their way."""
        return {name: self.share(name, now_us) for name in list(self._since)}
