"""Request log: one JSON line per request when it ends, written a few times a second and never per request.

Lines are appended whole, so a router that is killed leaves a readable file, at most half a second short.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

FLUSH_S = 0.5


class RequestLog:
    """Without a path it swallows what it is given."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        self._lines: list[bytes] = []
        self._encoder = msgspec.json.Encoder()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._file is not None:
            self._task = asyncio.get_running_loop().create_task(self._flush_regularly())

    def add(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._lines.append(self._encoder.encode(row))

    def flush(self) -> None:
        if self._file is not None and self._lines:
            lines, self._lines = self._lines, []
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flush()
