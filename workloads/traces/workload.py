"""The workload `trace`: sessions of a recorded trace, read as a stream, as often as they are asked for.

Memory does not grow with the file: forms whose lines are requests of their own are read line by line, documents one
by one, and lines that share sessions through an index of 60 bytes a line. Sampling takes whole conversations, the
same ones for every seed; the seed names the text, so that two runs against one warm engine share nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from workloads.errors import TraceError, choose_from
from workloads.limits import at_least
from workloads.sessions import Session
from workloads.spans import SPAN_ID_BITS
from workloads.streams import Streams
from workloads.table import WorkloadTable
from workloads.traces.build import Builder, Timing
from workloads.traces.files import documents, lines, sidecar_of, trace_files
from workloads.traces.forms import DocumentForm, LineForm, Reading
from workloads.traces.index import Index
from workloads.traces.recognise import PEEKED_LINES, TRACE_FORMATS, recognise
from workloads.traces.rows import Row, digest

SPEEDUP_MAX = 1e6
"""A day in a tenth of a second; beyond it no two arrivals differ."""


class Trace(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "trace"`."""

    kind: ClassVar[str] = "trace"

    path: str
    """A file, or a folder whose .json, .jsonl and .csv files are read by name."""
    format: str = "auto"
    block_size: int | None = None
    """Tokens of a hash id's block; None: what a sidecar or the file says, else the form's own."""
    speedup: float = 1.0
    """2.0 sends twice as fast: all instants and pauses are divided by it."""
    sample: float = 1.0
    """Share of the conversations that are taken, each whole; a smaller share is part of a larger one."""
    sample_seed: int = 0
    """Another number takes other ones."""
    max_sessions: int | None = None
    """The first so many of these conversations; sub-agents of the last come on top."""
    idle_gap_cap_s: float | None = None
    """Longest pause within a session, in the trace's own time; 10 is AgentX's rule."""
    arrivals: Literal["trace", "slots"] = "trace"
    """trace: sessions start as recorded, where the trace says when; slots: a closed loop takes them in that order."""
    chars_per_token: float = 4.0
    """For forms that hold text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            trace_files(self.path)
        except TraceError as error:
            raise ValueError(str(error)) from error
        if self.format != "auto" and self.format not in TRACE_FORMATS:
            raise ValueError(f"no trace format {self.format!r}: {choose_from(self.format, ('auto', *TRACE_FORMATS))}")
        if self.block_size is not None:
            at_least("block_size", self.block_size, 1)
        if self.max_sessions is not None:
            at_least("max_sessions", self.max_sessions, 1)
        if not 1 / SPEEDUP_MAX <= self.speedup <= SPEEDUP_MAX:
            raise ValueError(
                f"speedup = {self.speedup:g}: give a factor above 0, 2 to send twice as fast "
                f"({1 / SPEEDUP_MAX:g} to {SPEEDUP_MAX:g})"
            )
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample = {self.sample:g}: give a share above 0, up to 1")
        if self.idle_gap_cap_s is not None and not 0 <= self.idle_gap_cap_s < math.inf:
            raise ValueError(f"idle_gap_cap_s = {self.idle_gap_cap_s:g}: give seconds, 0 or more")
        if not 0.1 <= self.chars_per_token <= 100:
            raise ValueError(f"chars_per_token = {self.chars_per_token:g}: give characters, from 0.1 to 100")

    @classmethod
    def prepare(cls, table: dict[str, Any]) -> dict[str, Any]:
        """The path is made absolute, because load processes run in folders of their own."""
        path = table.get("path")
        return table | {"path": os.path.abspath(path)} if isinstance(path, str) and path else table

    def session_count(self, streams: Streams) -> int:
        """Found by reading the trace once, and remembered for as long as the files do not change; no stream has a say
        in it."""
        stats = [path.stat() for path in trace_files(self.path)]
        key = (self, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))
        if key not in _COUNTS:
            _COUNTS[key] = sum(1 for _ in self.draw(Streams(0)))
        return _COUNTS[key]

    def draw(self, streams: Streams) -> Iterator[Session]:
        for read in read_trace(self, streams):
            yield from read.sessions


_COUNTS: dict[tuple[Trace, tuple[tuple[int, int], ...]], int] = {}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one conversation of the trace became, with its rows for whoever must know where it came from."""

    sessions: list[Session]
    rows: list[Row]
    reading: Reading
    form: str


def read_trace(trace: Trace, streams: Streams) -> Iterator[Conversation]:
    """The trace's conversations, in the order of their starts. Raises TraceError where a row cannot be read."""
    salt = streams["workloads.spans"].getrandbits(SPAN_ID_BITS)
    builder: Builder | None = None
    taken = 0
    files = trace_files(trace.path)
    for path in files:
        if trace.max_sessions is not None and taken >= trace.max_sessions:
            break
        name = recognise(path) if trace.format == "auto" else trace.format
        form = TRACE_FORMATS[name]()
        reading = Reading(str(path), trace.block_size or _stated_block_size(path), trace.chars_per_token)
        left = None if trace.max_sessions is None else trace.max_sessions - taken
        source = _Source(trace, path, form, reading, left)
        for origin_us, family in source.families():
            if builder is None:
                builder = Builder(salt, _timing(trace, origin_us))
            if len(files) > 1 and isinstance(form, LineForm):
                family = [[replace(row, session=f"{path.stem}:{row.session}") for row in rows] for rows in family]
            sessions = [builder.session(rows) for rows in family]
            yield Conversation(sessions, [row for rows in family for row in rows], reading, name)
            taken += 1
    if not taken:
        some = "raise sample" if trace.sample < 1 else "every row was a failed one, or none was there"
        raise TraceError(trace.path, f"no conversation is left to send: {some}")


def _timing(trace: Trace, origin_us: int) -> Timing:
    cap_s = trace.idle_gap_cap_s
    return Timing(
        origin_us=origin_us,
        speedup=trace.speedup,
        idle_gap_cap_us=None if cap_s is None else round(cap_s * 1e6),
        use_instants=trace.arrivals == "trace",
    )


def _stated_block_size(path: Path) -> int | None:
    """Block size that a converted trace's sidecar states."""
    sidecar = sidecar_of(path)
    if not sidecar.exists():
        return None
    try:
        stated = msgspec.json.decode(sidecar.read_bytes()).get("block_size")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError, OSError) as error:
        raise TraceError(str(sidecar), "cannot be read: remove it, or convert the trace again") from error
    return stated if isinstance(stated, int) else None


class _Source:
    """The conversations of one file as rows: lists of sessions that belong together."""

    def __init__(
        self, trace: Trace, path: Path, form: LineForm | DocumentForm, reading: Reading, left: int | None
    ) -> None:
        self._trace, self._path, self._form, self._reading, self._left = trace, path, form, reading, left

    def families(self) -> Iterator[tuple[int, list[list[Row]]]]:
        """(the trace's first instant, rows by session); as many as are still wanted."""
        if isinstance(self._form, DocumentForm):
            found = self._documents(self._form)
        else:
            form = self._form
            peeked = islice(self._lines(form), PEEKED_LINES)
            shared = any(form.member(line, number, self._reading) is not None for number, line in peeked)
            found = self._indexed(form) if shared else self._alone(form)
        for number, family in enumerate(found):
            if self._left is not None and number >= self._left:
                return
            yield family

    def _lines(self, form: LineForm) -> Iterator[tuple[int, bytes]]:
        for _, number, line in self._events(form):
            yield number, line

    def _events(self, form: LineForm) -> Iterator[tuple[int, int, bytes]]:
        first = True
        for offset, number, line in lines(self._path):
            if first and form.begin(line, self._reading):
                first = False
                continue
            first = False
            yield offset, number, line

    def _wanted(self, key: int) -> bool:
        share = self._trace.sample
        return share >= 1 or digest("sample", self._trace.sample_seed, key) < share * (1 << SPAN_ID_BITS)

    def _in_time(self, row: Row, last_us: int) -> int:
        at_us = last_us if row.at_us is None else row.at_us
        if at_us < last_us and self._trace.arrivals == "trace":
            raise row.fault(
                f"arrives {(last_us - at_us) / 1e6:g} s before the row above it: sort the file by arrival, "
                'or use arrivals = "slots"'
            )
        return max(at_us, last_us)

    def _alone(self, form: LineForm) -> Iterator[tuple[int, list[list[Row]]]]:
        """Every line is a session."""
        origin_us: int | None = None
        last_us = 0
        for number, line in self._lines(form):
            rows = form.rows([(number, line)], self._reading)
            for row in rows:
                if row.session != f"row{number}":
                    raise row.fault(
                        f"belongs to a session, which none of the first {PEEKED_LINES} rows does: put rows with "
                        "sessions first, or into a file of their own"
                    )
                if origin_us is None:
                    origin_us = last_us = row.at_us or 0
                last_us = self._in_time(row, last_us)
                if self._wanted(digest(row.session)):
                    yield origin_us, [[row]]

    def _documents(self, form: DocumentForm) -> Iterator[tuple[int, list[list[Row]]]]:
        origin_us: int | None = None
        last_us = 0
        for line, document in documents(self._path):
            family = [
                [_renamed(row, row.wait_for) for row in rows]
                for rows in form.conversations(document, line, self._reading)
            ]
            if not family:
                continue
            first = family[0][0]
            if origin_us is None:
                origin_us = last_us = first.at_us or 0
            last_us = self._in_time(first, last_us)
            if self._wanted(digest(first.session)):
                yield origin_us, family

    def _indexed(self, form: LineForm) -> Iterator[tuple[int, list[list[Row]]]]:
        """Lines that share sessions."""
        index = Index(self._path)
        for offset, number, line in self._events(form):
            member = form.member(line, number, self._reading)
            if member is None:
                raise TraceError(
                    f"{self._path}:{number}", "names no session, which other rows do: give it one, or a request_id"
                )
            index.add(offset, number, member)
        index.close()
        origin_us = index.origin_us
        kept: set[int] | None = None
        if self._left is not None:
            chosen = (key for key, _ in index.sessions() if self._wanted(key))
            kept = {key for key, _ in zip(chosen, range(self._left), strict=False)}
        for key, places in index.sessions():
            if self._wanted(key) and (kept is None or key in kept):
                rows = form.rows(index.read(places), self._reading)
                if rows:
                    yield origin_us, [[self._resolved(row, key, index, kept) for row in rows]]

    def _resolved(self, row: Row, key: int, index: Index, kept: set[int] | None) -> Row:
        """The row without what it need not wait for: its own session's rows, and conversations that are not taken."""
        waits = []
        for name in row.wait_for:
            session = index.session_of(digest(name))
            if session is None:
                raise row.fault(f"waits for {name!r}, which is no row's request_id: remove it, or add that row")
            if session != key and self._wanted(session) and (kept is None or session in kept):
                waits.append(name)
        return _renamed(row, tuple(waits))


def _renamed(row: Row, waits: tuple[str, ...]) -> Row:
    """Names of requests as drivers see them: none of them is a session's."""
    if row.name is None and not row.wait_for:
        return row
    name = None if row.name is None else f"request:{row.name}"
    return replace(row, name=name, wait_for=tuple(f"request:{w}" for w in waits))
