"""The prefix blocks of an index as rows of flat arrays: a number stands for a block, 0 for none.

A block has the key of its whole prefix (see `hashing`), of which it is number `depth`, its parent, and the sets of
replicas that hold it (`holders`) and that hold it with everything before it (`reach`), as bit sets. Law: a block's
parent is here as long as the block is. Children of one parent are a doubly linked list; the root, number 1, links none,
because nobody asks for them and there are as many as prompts. Equal bit sets are one object, so a row costs about fifty
bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from routers.slots import KeySlots

NONE, ROOT = 0, 1
_MASKS_MAX = 65_536


class Blocks:
    __slots__ = (
        "_before",
        "_free",
        "_masks",
        "_next",
        "by_key",
        "child",
        "depth",
        "holders",
        "keys",
        "lower",
        "parent",
        "reach",
    )

    def __init__(self) -> None:
        self.keys = array("Q", (0, 0))
        self.parent = array("I", (0, 0))
        self.depth = array("I", (0, 0))
        self.holders = [0, -1]  # every replica holds the empty prefix
        self.reach = [0, -1]
        self.child = array("I", (0, 0))  # the first of its children
        self._next = array("I", (0, 0))  # its next sibling; of a free row the next free one
        self._before = array("I", (0, 0))
        self._free = NONE
        self.by_key = KeySlots(self.keys)
        self.lower: dict[int, dict[str, int]] = {}  # tier -> bit set of a block's holders there, for host and disk
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        """Without the root."""
        return len(self.by_key)

    def mask(self, bits: int) -> int:
        """The one object for this bit set."""
        if len(self._masks) > _MASKS_MAX:
            self._masks.clear()
        return self._masks.setdefault(bits, bits)

    def child_of(self, parent: int, key: int) -> int:
        """The block of that key, which is a child of `parent` if it is anything."""
        if parent != ROOT:
            only = self.child[parent]
            if not only or self.keys[only] == key:
                return only
            if not self._next[only]:
                return NONE
        return self.by_key.get(key)

    def add(self, key: int, parent: int) -> int:
        """A new child, held by nobody."""
        block = self._free
        if block:
            self._free = self._next[block]
            self.keys[block], self.parent[block] = key, parent
            self.depth[block] = self.depth[parent] + 1
            self.holders[block] = self.reach[block] = 0
        else:
            block = len(self.keys)
            self.keys.append(key)
            self.parent.append(parent)
            self.depth.append(self.depth[parent] + 1)
            self.holders.append(0)
            self.reach.append(0)
            self.child.append(NONE)
            self._next.append(NONE)
            self._before.append(NONE)
        first = NONE
        if parent != ROOT:
            first, self.child[parent] = self.child[parent], block
            if first:
                self._before[first] = block
        self._next[block], self._before[block] = first, NONE
        self.by_key.add(block)
        return block

    def prune(self, block: int) -> None:
        """Take the block away, and what of its ancestors is of no use without it, if nobody holds it on any tier and it
        leads to nothing."""
        while block != ROOT and not self.holders[block] and not self.child[block] and block not in self.lower:
            parent, after, before = self.parent[block], self._next[block], self._before[block]
            if after:
                self._before[after] = before
            if before:
                self._next[before] = after
            elif parent != ROOT:
                self.child[parent] = after
            self.by_key.drop(block)
            self.keys[block] = self.parent[block] = NONE
            self._next[block], self._free = self._free, block
            block = parent

    def children(self, block: int) -> Iterator[int]:
        """Not asked of the root."""
        child = self.child[block]
        while child:
            yield child
            child = self._next[child]
