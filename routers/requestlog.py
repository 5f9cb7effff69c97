"""Request log: one JSON line per request when it ends, written a few times a second and never per request.

Lines are appended whole, so a router that is killed leaves a readable file, at most half a second short.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from routers.view import Decision

FLUSH_S = 0.5


class Life(msgspec.Struct):
    """One request as the log shall tell of it, filled as it goes."""

    request_id: str
    received_us: int
    session_id: str | None = None
    prompt_tokens: int | None = None
    decision: Decision | None = None
    routed_us: int | None = None
    sent_us: int | None = None
    first_byte_us: int | None = None
    status: int | None = None
    error: str | None = None
    attempts: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None

    def row(self, ended_us: int) -> dict[str, Any]:
        decision = self.decision
        return {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "replica": decision.replica if decision is not None else None,
            "reason": decision.reason if decision is not None else None,
            "rule": decision.rule if decision is not None else None,
            "believed_hit_tokens": decision.believed_hit_tokens if decision is not None else None,
            "received_us": self.received_us,
            "routed_us": self.routed_us,
            "sent_us": self.sent_us,
            "first_byte_us": self.first_byte_us,
            "ended_us": ended_us,
            "status": self.status,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "attempts": self.attempts,
            "scores": decision.scores if decision is not None else None,
            "cached_tokens": self.cached_tokens,
        }


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
