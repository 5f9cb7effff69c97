"""Any workload as a trace in the native form, with a sidecar that states its block size and how it was rounded.

Ids of another block size are not made from the old ones: every prompt's tokens are generated and hashed anew, block by
block, each id from the block's tokens and the id before it. So equal ids are equal prefixes, at whatever size. A
session's later prompts begin with its earlier ones, so only new blocks are hashed, and memory is one session's.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from workloads.errors import TraceError
from workloads.sessions import Session, Turn
from workloads.spans import Span, common_prefix_tokens, prompt_tokens, token_ids
from workloads.streams import Streams
from workloads.table import WorkloadTable
from workloads.traces.files import sidecar_of
from workloads.traces.mooncake import BLOCK_SIZE
from workloads.traces.workload import Trace, read_trace

_ID_BITS = 63
"""Ids fit a signed 64-bit number; two blocks of a trace of a million blocks meet with a chance of 1 in 10 million."""


class BlockIds:
    """Ids of a conversation's blocks, chained; remembers the last prompt to go on from it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._spans: tuple[Span, ...] = ()
        self._ids: list[int] = []
        self._links: list[bytes] = []

    def of(self, prompt: tuple[Span, ...]) -> tuple[int, ...]:
        """One id a block, the partial block at the end included."""
        size = self.block_size
        kept = common_prefix_tokens(self._spans, prompt) // size
        del self._ids[kept:], self._links[kept:]
        tokens = _tokens_from(prompt, kept * size)
        link = self._links[-1] if self._links else b""
        ids = list(self._ids)
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            link = hashlib.blake2b(link + block.tobytes(), digest_size=16).digest()
            ids.append(int.from_bytes(link[:8], "little") >> (64 - _ID_BITS))
            if len(block) == size:
                self._links.append(link)
                self._ids.append(ids[-1])
        self._spans = prompt
        return tuple(ids)


def _tokens_from(prompt: tuple[Span, ...], place: int) -> Any:
    """Tokens of a prompt from a place on."""
    parts = []
    for span_id, tokens in prompt:
        if place < tokens:
            first = max(place, 0)
            parts.append(token_ids(span_id, first, tokens - first))
        place -= tokens
    return (np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)).astype("<i8")


def native_rows(sessions: Iterable[Session], block_size: int) -> Iterator[dict[str, Any]]:
    """Sessions as rows of the native form, a session's rows in a row.

    Times are rounded to whole milliseconds; a turn that has both a pause and an instant keeps the instant. The form
    waits for requests only, so whoever waits for a session waits for its last request; rows are held back until that
    is known. A name that nothing in the workload has is left out.
    """
    last: dict[str, str] = {}
    held: deque[list[dict[str, Any]]] = deque()
    for session in sessions:
        held.append(_rows(session, block_size))
        for turn in session.turns:
            if turn.name:
                last[turn.name] = _request_id(session, turn)
        last[session.session_id] = _request_id(session, session.turns[-1])
        while held and all(name in last for row in held[0] for name in row.get("wait_for", ())):
            yield from _named(held.popleft(), last)
    for rows in held:
        yield from _named(rows, last)


def _named(rows: list[dict[str, Any]], last: dict[str, str]) -> list[dict[str, Any]]:
    for row in rows:
        if "wait_for" in row:
            row["wait_for"] = [last[name] for name in row["wait_for"] if name in last]
    return rows


def _rows(session: Session, block_size: int) -> list[dict[str, Any]]:
    """A session's rows, which still wait for names as drivers know them."""
    ids = BlockIds(block_size)
    rows: list[dict[str, Any]] = []
    alone = len(session.turns) == 1 and not session.after and not session.turns[0].name
    for turn, prompt in session.prompts():
        row: dict[str, Any] = {}
        if not alone:
            row["session_id"] = session.session_id
            row["request_id"] = _request_id(session, turn)
        at_us = session.start_us if turn.index == 0 else turn.start_us
        if at_us is not None:
            row["timestamp"] = round(at_us / 1000)
        elif turn.index or session.after:
            row["delay"] = round(turn.think_us / 1000)
        waits = (*session.after, *turn.after) if turn.index == 0 else turn.after
        if waits:
            row["wait_for"] = list(waits)
        if turn.restart:
            row["prefix_reset"] = True
        if session.cache_salt is not None:
            row["cache_salt"] = session.cache_salt
        row["input_length"] = prompt_tokens(prompt)
        row["output_length"] = turn.output[1]
        row["hash_ids"] = ids.of(prompt)
        rows.append(row)
    return rows


def _request_id(session: Session, turn: Turn) -> str:
    return turn.name.removeprefix("request:") if turn.name else f"{session.session_id}#{turn.index}"


def convert_workload(
    workload: WorkloadTable, out: str | Path, *, streams: Streams, block_size: int | None = None
) -> dict[str, Any]:
    """Writes a workload as a native trace and its sidecar, and returns the sidecar. A workload without instants gives
    rows without `timestamp`. `block_size`: None takes a trace's own, else 512. Raises TraceError.

    The file appears when it is complete, under a name of its own until then.
    """
    place = Path(out)
    if isinstance(workload, Trace) and place.exists() and os.path.samefile(place, workload.path):
        raise TraceError(str(place), "would be written over while it is read: give the result another name")
    count = _Count()
    size = block_size or _own_block_size(workload) or BLOCK_SIZE
    sessions = _counted(workload, streams, count)
    partial = place.with_name(place.name + ".partial")
    try:
        with partial.open("wb") as file:
            for row in native_rows(sessions, size):
                file.write(msgspec.json.encode(row) + b"\n")
                count.rows += 1
        stated = _sidecar(workload, size, count)
        sidecar_of(place).write_bytes(msgspec.json.format(msgspec.json.encode(stated)) + b"\n")
        partial.replace(place)
    except OSError as error:
        raise TraceError(str(place), f"cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return stated


class _Count:
    rows = sessions = estimated = 0
    form: str | None = None
    source_block_size: int | None = None
    skipped: dict[str, int]

    def __init__(self) -> None:
        self.skipped = {}


def _counted(workload: WorkloadTable, streams: Streams, count: _Count) -> Iterator[Session]:
    drawn = _read(workload, streams, count) if isinstance(workload, Trace) else workload.draw(streams)
    for session in workload.completed(drawn, streams):
        count.sessions += 1
        yield session


def _read(workload: Trace, streams: Streams, count: _Count) -> Iterator[Session]:
    for conversation in read_trace(workload, streams):
        first = conversation.rows[0]
        count.form, count.skipped = conversation.form, conversation.reading.skipped
        count.source_block_size = first.block_size or count.source_block_size
        count.estimated += first.text is not None
        yield from conversation.sessions


def _own_block_size(workload: WorkloadTable) -> int | None:
    if not isinstance(workload, Trace):
        return None
    first = next(read_trace(workload, Streams(0)), None)
    return first.rows[0].block_size or None if first is not None else None


def _sidecar(workload: WorkloadTable, block_size: int, count: _Count) -> dict[str, Any]:
    same = count.source_block_size == block_size
    return {
        "format": "mooncake",
        "block_size": block_size,
        "hash_count": "ceil: the partial block at the end has an id",
        "hash_ids": "blake2b of the block's generated tokens and the id before, 63 bits; equal ids are equal prefixes",
        "rounding": {
            "time": "whole milliseconds",
            "shared_prefix": f"to whole blocks of {block_size} tokens",
            "answers": "a later prompt holds the earlier answer wherever its length allows; an answer that no later "
            "prompt of its own session repeats has no ids, so forks behind it do not share it",
            "tokens": "estimated from characters" if count.estimated else "as in the source",
        },
        "source": {
            "kind": workload.kind,
            "format": count.form,
            "file": Path(workload.path).name if isinstance(workload, Trace) else None,
            "block_size": count.source_block_size,
            "re_blocked": count.source_block_size is not None and not same,
            "left_out": count.skipped,
        },
        "sessions": count.sessions,
        "requests": count.rows,
    }
