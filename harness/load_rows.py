"""Rows of the load generator: one JSON line a request, written when it ends, one file a process.

Every turn that a started session has gets a row, also those that were never sent because the session ended early:
their `sent_us` is null. So issued = ok + error + incomplete + cancelled holds over the rows that have one.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import msgspec

from harness.sse import CANCELLED, ERROR, INCOMPLETE, OK, TokenMeter

STATUSES = (OK, ERROR, INCOMPLETE, CANCELLED)


class Row(msgspec.Struct, kw_only=True):
    """One request; instants in microseconds since the plan's epoch, null when they did not happen."""

    request_id: str
    response_id: str | None = None
    ingress: str | None = None
    """The router that it met, where the load knows several."""
    session: str
    turn: int
    group: str | None
    rollout_step: int | None
    ready_us: int | None = None
    """When it could have been sent, had there been no cap on requests."""
    scheduled_us: int | None = None
    """When the request was due: the end of the previous answer and the pause, or the opening of the slot."""
    sent_us: int | None = None
    first_token_us: int | None = None
    second_token_us: int | None = None
    first_content_us: int | None = None
    last_token_us: int | None = None
    end_us: int | None = None
    """When the stream was closed."""
    phase: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_chunk_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: str | None = None
    chunk_gaps_us: list[int] = []
    status: str = CANCELLED
    error_class: str | None = None
    error: str | None = None
    api: str
    answer_ok: bool | None = None

    def take_meter(self, meter: TokenMeter, epoch_ns: int) -> None:
        """Fills in what the answer said, whole or not."""

        def us(instant_ns: int | None) -> int | None:
            return None if instant_ns is None else (instant_ns - epoch_ns) // 1000

        self.response_id = meter.response_id
        self.first_token_us, self.second_token_us = us(meter.first_ns), us(meter.second_ns)
        self.last_token_us, self.first_content_us = us(meter.last_ns), us(meter.content_ns)
        if meter.prompt_tokens is not None:
            self.prompt_tokens = meter.prompt_tokens
        self.cached_tokens = meter.cached_tokens
        self.token_source = meter.token_source
        self.output_tokens, self.first_chunk_tokens = meter.output_tokens, meter.first_chunk_tokens
        self.chunk_gaps_us = [gap // 1000 for gap in meter.gaps_ns]


class RowFiles:
    """The two files of this process; every line is out before the call returns."""

    def __init__(self, folder: str | Path, pid: int | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"locust-{pid or os.getpid()}"
        self.rows_path = folder / f"{name}.jsonl"
        self.events_path = folder / f"{name}.events.jsonl"
        self.failure: str | None = None
        """Why a line could not be written, once one could not; rows are missing from then on."""
        self._rows = self.rows_path.open("ab", buffering=0)
        self._events = self.events_path.open("ab", buffering=0)
        self.counts = dict.fromkeys(STATUSES, 0)
        """Rows of requests that were sent, by status."""
        self.unsent = 0
        """Rows of turns that were never sent."""

    def row(self, row: Row) -> None:
        if row.sent_us is None:
            self.unsent += 1
        else:
            self.counts[row.status] += 1
        self._write(self._rows, msgspec.json.encode(row) + b"\n")

    def event(self, event: str, **fields: Any) -> None:
        self._write(self._events, msgspec.json.encode({"event": event, **fields}) + b"\n")

    def _write(self, file: io.FileIO, line: bytes) -> None:
        """A line that the disk does not take is a fact to act on, not an exception in the middle of a request."""
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.failure = self.failure or f"{file.name}: {error.strerror}"

    def close(self) -> None:
        self._rows.close()
        self._events.close()
