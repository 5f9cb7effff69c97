"""Which lines of a file belong to which session, in 60 bytes a line: how interleaved sessions are read one by one.

A first pass notes for every line its place, number, session and arrival as numbers, never its content. The second
pass then reads one session after the other by seeking, in the order of their arrivals. So memory is bounded by 60
bytes a line (90 for a moment; 60 MB for a million requests, whatever their length) plus one session, and the file need
not be sorted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workloads.errors import TraceError
from workloads.traces.files import LINE_BYTES_MAX

Numbers = npt.NDArray[np.int64]
NO_TIME = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Member:
    """What a format says of a line in the first pass."""

    session: int
    """63 bits that name its session; in a tree, its own node."""
    parent: int | None = None
    """The node that it goes on from; -1 for a root; None when the trace is no tree."""
    at_us: int | None = None
    name: int | None = None
    """63 bits that name the row, when others may wait for it."""


class Index:
    """The lines of one file, by session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets, self._numbers = array("q"), array("q")
        self._sessions, self._parents, self._at, self._names = array("q"), array("q"), array("q"), array("q")
        self._tree = False
        self._order: Numbers = np.empty(0, dtype=np.int64)
        self._bounds: Numbers = np.empty(0, dtype=np.int64)
        self._named: tuple[Numbers, Numbers] | None = None

    def add(self, offset: int, number: int, member: Member) -> None:
        """Notes a line. Raises TraceError."""
        try:
            self._add(offset, number, member)
        except OverflowError as error:
            raise TraceError(f"{self.path}:{number}", "an id has more than 63 bits: number them anew") from error

    def _add(self, offset: int, number: int, member: Member) -> None:
        self._offsets.append(offset)
        self._numbers.append(number)
        self._sessions.append(member.session)
        self._at.append(NO_TIME if member.at_us is None else member.at_us)
        if member.parent is not None:
            self._tree = True
        if self._tree:
            self._parents.append(-1 if member.parent is None else member.parent)
        if member.name is not None:
            self._names.extend([-1] * (len(self._offsets) - 1 - len(self._names)))
            self._names.append(member.name)

    def close(self) -> None:
        """Ends the first pass."""
        sessions: Numbers = np.array(self._sessions, dtype=np.int64)
        if self._tree:
            sessions = self._branches(sessions)
            self._sessions = array("q", sessions.tobytes())
        by_session = np.argsort(sessions, kind="stable").astype(np.int64)
        grouped = sessions[by_session]
        starts = np.flatnonzero(np.concatenate(([True], grouped[1:] != grouped[:-1]))) if len(grouped) else grouped
        ends = np.append(starts[1:], len(grouped)).astype(np.int64)
        firsts = by_session[starts]
        place = np.lexsort((firsts, self._times()[firsts]))
        self._order = by_session
        self._bounds = np.stack((starts[place], ends[place]), axis=1) if len(grouped) else np.empty((0, 2), np.int64)
        if len(self._names):
            names: Numbers = np.array(self._names, dtype=np.int64)
            by_name = np.argsort(names, kind="stable").astype(np.int64)
            self._named = (names[by_name], by_name)

    def _branches(self, nodes: Numbers) -> Numbers:
        """A tree cut into paths: a node's first child goes on with its session, every other child opens one, which
        gets the child's name. Children come after their parents in the file or are roots."""
        count = len(nodes)
        by_node = np.argsort(nodes, kind="stable")
        known = nodes[by_node]
        wanted: Numbers = np.array(self._parents, dtype=np.int64)
        place = np.searchsorted(known, wanted)
        found = np.minimum(place, max(count - 1, 0))
        rows = np.arange(count)
        parent = np.where((wanted >= 0) & (known[found] == wanted), by_node[found], -1)
        parent = np.where(parent < rows, parent, -1)
        _, first_child = np.unique(parent, return_index=True)
        goes_on = np.zeros(count, dtype=bool)
        goes_on[first_child] = True
        root = np.where(goes_on & (parent >= 0), parent, rows)
        while True:
            further = root[root]
            if np.array_equal(further, root):
                return nodes[root]
            root = further

    def _times(self) -> Numbers:
        """Arrivals; a line without one counts as come with the last that has one above it."""
        at: Numbers = np.array(self._at, dtype=np.int64)
        known = np.where(at != NO_TIME, np.arange(len(at)), 0)
        return at[np.maximum.accumulate(known)] if len(at) else at

    @property
    def origin_us(self) -> int:
        """The earliest arrival; 0 when the trace has none."""
        at = np.array(self._at, dtype=np.int64)
        at = at[at != NO_TIME]
        return int(at.min()) if len(at) else 0

    def session_of(self, name: int) -> int | None:
        """The session of the row of that name; None when there is none."""
        if self._named is None:
            return None
        names, rows = self._named
        place = int(np.searchsorted(names, name))
        if place == len(names) or names[place] != name:
            return None
        return self._sessions[int(rows[place])]

    def sessions(self) -> Iterator[tuple[int, list[int]]]:
        """(session, its rows in the order of the file), by the arrival of the first row."""
        for first, end in self._bounds.tolist():
            rows = self._order[first:end].tolist()
            yield self._sessions[rows[0]], rows

    def read(self, rows: list[int]) -> list[tuple[int, bytes]]:
        """(line number, line) of these rows, from the file."""
        try:
            with self.path.open("rb") as file:
                found = []
                for row in rows:
                    file.seek(self._offsets[row])
                    found.append((self._numbers[row], file.readline(LINE_BYTES_MAX).strip(b"\xef\xbb\xbf \t\r\n")))
                return found
        except OSError as error:
            raise TraceError(str(self.path), f"cannot be read: {error.strerror}") from error
