"""Finds stop strings in an answer that grows token by token.

The law: no character is shown that may still turn out to be a part of a stop string. Stop strings are not looked for
before `min_tokens`.
"""

from __future__ import annotations

from mock_engine.sampling import Sampling


class StopScanner:
    """Finds stop strings in growing text and says how much of it may be shown already."""

    def __init__(self, sampling: Sampling) -> None:
        self._stops = sampling.stop
        self._include = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._hold = 0 if sampling.include_stop else max(map(len, sampling.stop)) - 1
        self._window = max(map(len, sampling.stop)) - 1
        self.text = ""
        self._scanned = 0
        self._shown = 0

    def push(self, piece: str, tokens: int) -> str | None:
        """Adds the text of token number `tokens`; the stop string that is complete now, or None."""
        self.text += piece
        start = max(0, self._scanned - self._window)
        if tokens <= self._min_tokens:
            self._scanned = len(self.text) + self._window
            return None
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        self._scanned = max(self._scanned, len(self.text))
        if not found:
            return None
        at, stop = min(found, key=lambda hit: hit[0])
        self.text = self.text[: at + len(stop) if self._include else at]
        return stop

    def take(self, final: bool = False) -> str:
        """Text that may be shown and has not been."""
        end = len(self.text) if final else max(self._shown, len(self.text) - self._hold)
        piece, self._shown = self.text[self._shown : end], end
        return piece
