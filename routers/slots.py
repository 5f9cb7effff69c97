"""Maps from 64-bit names to block numbers in flat memory: a few bytes a slot where a dict of objects takes a hundred.

Open addressing with linear probing; a removal shifts back what stood behind it, so there are no tombstones and nothing
to clean up. Law: at least a third of the slots are free, so a look-up meets two or three. Number 0 means none. The odd
thing: there are two of these classes, alike but for where a name stands and whether it needs mixing, because asking
which it is would cost as much as the probe.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_LEAST = 8


class _Slots:
    """What both share: the size, and growing."""

    __slots__ = ("_blocks", "_full", "_last", "_used")

    def __init__(self) -> None:
        self._size(_LEAST)

    def __len__(self) -> int:
        return self._used

    def _size(self, slots: int) -> None:
        self._blocks = array("I", bytes(4 * slots))
        self._last = slots - 1
        self._full = 2 * slots // 3
        self._used = 0

    def blocks(self) -> npt.NDArray[np.uint32]:
        """All blocks, as often as they have names; in no order that means anything."""
        every = np.frombuffer(self._blocks, dtype=np.uint32)
        return every[every > 0]

    def _refill(self, blocks: npt.NDArray[np.uint32], at: npt.NDArray[np.int64]) -> None:
        """Fill the empty slots at once, each block at the first free one from where it belongs; `at` becomes where that
        is. Round by round: of those that meet in a slot one stays, the others look at the next."""
        owner = np.zeros(self._last + 1, dtype=np.int64)  # of a slot: a block's place in the list, plus one
        todo = np.arange(len(blocks))
        while len(todo):
            tried = todo[owner[at[todo]] == 0]
            owner[at[tried]] = tried + 1
            todo = todo[owner[at[todo]] != todo + 1]
            at[todo] = (at[todo] + 1) & self._last
        np.frombuffer(self._blocks, dtype=np.uint32)[at] = blocks
        self._used = len(blocks)


class NamedSlots(_Slots):
    """Keeps the names itself and spreads them (Fibonacci hashing), whatever pattern an engine's hashes have."""

    __slots__ = ("_names", "_shift")

    def _size(self, slots: int) -> None:
        super()._size(slots)
        self._names = array("Q", bytes(8 * slots))
        self._shift = 64 - (slots - 1).bit_length()

    def get(self, name: int) -> int:
        """The block of that name, or 0."""
        blocks, names, last = self._blocks, self._names, self._last
        slot = (name * _GOLDEN >> self._shift) & last
        while block := blocks[slot]:
            if names[slot] == name:
                return block
            slot = (slot + 1) & last
        return 0

    def put(self, name: int, block: int) -> int:
        """The block that has the name already, which then keeps it; 0 when the name was new and has this block now."""
        if self._used >= self._full:
            self._grow()
        blocks, names, last = self._blocks, self._names, self._last
        slot = (name * _GOLDEN >> self._shift) & last
        while there := blocks[slot]:
            if names[slot] == name:
                return there
            slot = (slot + 1) & last
        blocks[slot] = block
        names[slot] = name
        self._used += 1
        return 0

    def pop(self, name: int) -> int:
        """The block of that name, which has it no more, or 0."""
        blocks, names, last, shift = self._blocks, self._names, self._last, self._shift
        hole = (name * _GOLDEN >> shift) & last
        while (found := blocks[hole]) and names[hole] != name:
            hole = (hole + 1) & last
        if not found:
            return 0
        slot = (hole + 1) & last
        while block := blocks[slot]:
            moved = names[slot]
            if (slot - (moved * _GOLDEN >> shift)) & last >= (
                slot - hole
            ) & last:  # it belongs before the hole, or there
                blocks[hole] = block
                names[hole] = moved
                hole = slot
            slot = (slot + 1) & last
        blocks[hole] = 0
        self._used -= 1
        return found

    def _grow(self) -> None:
        blocks = np.frombuffer(self._blocks, dtype=np.uint32)
        taken = np.flatnonzero(blocks)
        blocks, names = blocks[taken], np.frombuffer(self._names, dtype=np.uint64)[taken]
        self._size(2 * (self._last + 1))
        at = ((names * np.uint64(_GOLDEN)) >> np.uint64(self._shift)).astype(np.int64)
        self._refill(blocks, at)
        np.frombuffer(self._names, dtype=np.uint64)[at] = names


class KeySlots(_Slots):
    """`keys`: the name of each block by its number, kept by the owner and mixed well, so that its low bits will do."""

    __slots__ = ("_keys",)

    def __init__(self, keys: array[int]) -> None:
        self._keys = keys
        super().__init__()

    def get(self, key: int) -> int:
        """The block of that key, or 0."""
        blocks, keys, last = self._blocks, self._keys, self._last
        slot = key & last
        while block := blocks[slot]:
            if keys[block] == key:
                return block
            slot = (slot + 1) & last
        return 0

    def add(self, block: int) -> None:
        """A block whose key stands in `keys` already and is new here."""
        if self._used >= self._full:
            self._grow()
        blocks, last = self._blocks, self._last
        slot = self._keys[block] & last
        while blocks[slot]:
            slot = (slot + 1) & last
        blocks[slot] = block
        self._used += 1

    def drop(self, block: int) -> None:
        """A block that is here; its key must still stand."""
        blocks, keys, last = self._blocks, self._keys, self._last
        hole = keys[block] & last
        while blocks[hole] != block:
            hole = (hole + 1) & last
        slot = (hole + 1) & last
        while block := blocks[slot]:
            if (slot - keys[block]) & last >= (slot - hole) & last:
                blocks[hole] = block
                hole = slot
            slot = (slot + 1) & last
        blocks[hole] = 0
        self._used -= 1

    def _grow(self) -> None:
        blocks = self.blocks()
        self._size(2 * (self._last + 1))
        keys = np.frombuffer(self._keys, dtype=np.uint64)[blocks]
        self._refill(blocks, (keys & np.uint64(self._last)).astype(np.int64))
