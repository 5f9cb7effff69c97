"""How many measured requests are under way, added up over time, as whoever sends them counts.

Pure. Rows say when each request was sent and ended; this count knows nothing of them, so that the two can be held
against each other.
"""

from __future__ import annotations


class InFlight:
    """Instants in microseconds, which never go back."""

    __slots__ = ("_count", "_held_us", "_since_us")

    def __init__(self) -> None:
        self._count = self._held_us = self._since_us = 0

    def begin(self, now_us: int) -> None:
        self._note(now_us, 1)

    def end(self, now_us: int) -> None:
        self._note(now_us, -1)

    @property
    def held_us(self) -> int:
        """The time of all requests together, until the last of them began or ended."""
        return self._held_us

    def _note(self, now_us: int, change: int) -> None:
        self._held_us += self._count * (now_us - self._since_us)
        self._count += change
        self._since_us = now_us
