"""Instants of one answer's tokens, kept as the engine gives them: single instants and whole jumps.

A jump is shared by all requests that were in it; its instants are laid out at most once, and only when an answer
that passed through it has ended.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mock_engine import Run

Instants = npt.NDArray[np.int64]


class Jump:
    """A run of like steps whose instants are laid out on demand."""

    __slots__ = ("_instants", "_run", "tokens")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._instants: Instants | None = None
        self.tokens = run.steps

    def instants_us(self) -> Instants:
        if self._instants is None:
            self._instants = self._run.token_instants_us()
        return self._instants


class TokenTimes:
    """Collects instants in order; microseconds."""

    __slots__ = ("_parts", "count")

    def __init__(self) -> None:
        self._parts: list[int | Jump] = []
        self.count = 0

    def add(self, instant_us: int) -> None:
        self._parts.append(instant_us)
        self.count += 1

    def add_jump(self, jump: Jump) -> None:
        self._parts.append(jump)
        self.count += jump.tokens

    def instants_us(self) -> Instants:
        """All instants in order."""
        parts: list[Instants] = []
        singles: list[int] = []
        for part in self._parts:
            if isinstance(part, int):
                singles.append(part)
                continue
            if singles:
                parts.append(np.array(singles, dtype=np.int64))
                singles = []
            parts.append(part.instants_us())
        if singles:
            parts.append(np.array(singles, dtype=np.int64))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
