"""LRU stack distances of prefix blocks: the hits of every cache size at once, in one pass (Mattson et al. 1970).

A cache of C blocks under LRU holds the C most recently used ones, so a block is a hit exactly when fewer than C others
were used since. A request first looks for its leading blocks, then uses all of its blocks, the last one first: a
chain's front is then always more recent than its rest, as engines see to by freeing the deepest block first, and what
is resident of a chain is a prefix of it.

Uses are numbered. Blocks that were used together have numbers in a row, so a request costs one query and one update
per run of blocks and not per block: O(log n) each, on a Fenwick tree that counts the numbers which a later use has
made void.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class _RangeFenwick:
    """Counters 0 .. size - 1: add to a range, ask for a prefix sum; O(log size) both."""

    __slots__ = ("_linear", "_slope", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._slope = [0] * (size + 2)
        self._linear = [0] * (size + 2)

    def add(self, first: int, stop: int) -> None:
        """Counts `first .. stop - 1` once more."""
        self._add(first + 1, 1, first)
        self._add(stop + 1, -1, -stop)

    def _add(self, i: int, slope: int, linear: int) -> None:
        end, slopes, linears = self.size + 1, self._slope, self._linear
        while i <= end:
            slopes[i] += slope
            linears[i] += linear
            i += i & -i

    def below(self, stop: int) -> int:
        """Sum of the counters `0 .. stop - 1`."""
        slope = linear = 0
        i = stop
        slopes, linears = self._slope, self._linear
        while i > 0:
            slope += slopes[i]
            linear += linears[i]
            i -= i & -i
        return slope * stop - linear


class StackDistances:
    """Feed it requests in their order, then ask for the hits of any cache size."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        """Each block's place in the arrays."""
        self._use = np.empty(1 << 12, dtype=np.int64)
        """Number of each block's last use."""
        self._next = 0
        self._void = _RangeFenwick(1 << 12)
        self._void_total = 0
        self._changes: dict[int, int] = {}
        """Where the number of hits changes its slope: hits of size C are the distances below C."""
        self.lookups = 0
        """Blocks asked for."""

    def request(self, keys: Sequence[int], asked: int) -> tuple[int, Counts]:
        """A request that uses the blocks `keys`, of which it asks for the first `asked`.

        Returns how many of these an infinite cache holds, and all blocks' numbers in the order of their first use,
        by which a caller may keep figures of its own. Keys name prefixes: what is known of them comes first.
        """
        self.lookups += asked
        slots, known = self._number(keys)
        uses = self._use[slots[:known]]
        hits = min(known, asked)
        for first, count in _runs(uses[:hits]):
            # numbers first, first - 1, ... of one run: each has one live number more above it
            rank = (self._next - first - 1) - (self._void_total - self._void.below(first + 1))
            self._changes[rank] = self._changes.get(rank, 0) + 1
            self._changes[rank + count] = self._changes.get(rank + count, 0) - 1
        if self._next + len(slots) > self._void.size:
            self._renumber(self.distinct - (len(slots) - known), len(slots))
            uses = self._use[slots[:known]]
        for first, count in _runs(uses):
            self._void.add(first - count + 1, first + 1)
        self._void_total += known
        top = self._next + len(slots) - 1
        self._use[slots] = np.arange(top, top - len(slots), -1, dtype=np.int64)
        self._next += len(slots)
        return hits, slots

    def _number(self, keys: Sequence[int]) -> tuple[Counts, int]:
        """(the blocks' places, how many of them were known); new ones get the next."""
        slots, before = self._slots, len(self._slots)
        known = bisect_left(range(len(keys)), True, key=lambda i: keys[i] not in slots)
        places = np.empty(len(keys), dtype=np.int64)
        places[:known] = list(map(slots.__getitem__, keys[:known]))
        places[known:] = np.arange(before, before + len(keys) - known)
        slots.update(zip(keys[known:], range(before, before + len(keys) - known), strict=True))
        if len(slots) > len(self._use):
            self._use = np.concatenate((self._use, np.empty(max(len(slots), len(self._use)), dtype=np.int64)))
        return places, known

    def _renumber(self, used: int, coming: int) -> None:
        """Gives the live numbers anew without gaps; the tree doubles until they fill at most half of it."""
        order = np.argsort(self._use[:used], kind="stable")
        self._use[order] = np.arange(used, dtype=np.int64)
        self._next = used
        size = self._void.size
        while size < 2 * (self._next + coming):
            size *= 2
        self._void = _RangeFenwick(size)
        self._void_total = 0

    @property
    def distinct(self) -> int:
        """Different blocks used: from this size on a cache hits as an infinite one."""
        return len(self._slots)

    def curve(self) -> tuple[Counts, Counts]:
        """(sizes, hits): with `sizes[i]` blocks, `hits[i]` of the blocks asked for are hits; between two sizes hits
        grow by the same number per block, so linear interpolation is exact. Sizes rise from 0."""
        places = np.array(sorted(self._changes), dtype=np.int64)
        slopes = np.cumsum(np.array([self._changes[int(p)] for p in places], dtype=np.int64))
        if not len(places):
            return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        grown = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(slopes[:-1] * np.diff(places))))
        if places[0] > 0:
            places, grown = np.concatenate(([0], places)), np.concatenate(([0], grown))
        return places, grown

    def hits(self, blocks: int) -> int:
        """Hits of a cache of so many blocks."""
        sizes, hits = self.curve()
        return round(float(np.interp(blocks, sizes, hits)))


def _runs(uses: Counts) -> list[tuple[int, int]]:
    """(first, length) of each stretch of numbers that fall by one."""
    if not len(uses):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(uses) != -1) + 1, [len(uses)]))
    return list(zip(uses[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True))
