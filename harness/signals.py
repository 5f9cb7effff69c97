"""Ctrl-C, SIGTERM and a closed terminal end a run once, in order, and never in the middle of keeping its data.

The first signal interrupts whatever is measured; further ones change nothing, because everything is already on its way
to a tidy end. Inside a `calm` block even the first one only waits until the block is over.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """While entered, turns the signals that end a program into one KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        """Whether anybody asked for the end."""
        self._calm = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in NUMBERS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """What happens in this block happens whole."""
        self._calm += 1
        try:
            yield
        finally:
            self._calm -= 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and not self._calm:
            raise KeyboardInterrupt
        print("ending; the data are being kept, one moment", file=sys.stderr, flush=True)
