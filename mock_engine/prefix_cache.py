"""Which content is resident: block keys to the blocks that hold them, oldest copy first.

Two blocks may hold equal content; a key disappears with its last copy. A lookup walks a sequence's leading keys until
one is missing, so a survivor whose ancestor is gone can never hit.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, cast

from mock_engine.events import BlockHash

_LOOKUP = 128  # keys looked up at a time


class Indexed(Protocol):
    index: int


BlockT = TypeVar("BlockT", bound=Indexed)


class PrefixCache(Generic[BlockT]):
    """`blocks` counts resident blocks, copies included."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockT | dict[int, BlockT]] = {}  # a dict only where there are copies
        self._copied = 0  # how many dicts there are
        self.blocks = 0

    def insert(self, key: BlockHash, block: BlockT) -> None:
        self.blocks += 1
        found = self._blocks.setdefault(key, block)
        if found is block:
            return
        if isinstance(found, dict):
            found[block.index] = block
        else:
            self._copied += 1
            self._blocks[key] = {found.index: found, block.index: block}

    def remove(self, key: BlockHash, block: BlockT) -> None:
        self.blocks -= 1
        found = self._blocks[key]
        if isinstance(found, dict):
            del found[block.index]
            if found:
                return
            self._copied -= 1
        del self._blocks[key]

    def longest(self, keys: Sequence[BlockHash], blocks_max: int) -> list[BlockT]:
        """The oldest copies of the leading keys, up to the first that is missing."""
        chain: list[BlockT] = []
        for start in range(0, blocks_max, _LOOKUP):
            found = [*map(self._blocks.get, keys[start : min(start + _LOOKUP, blocks_max)])]
            complete = None not in found
            if not complete:
                del found[found.index(None) :]
            if self._copied:
                found = [next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in found]
            chain += cast("list[BlockT]", found)
            if not complete:
                break
        return chain

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._blocks

    def keys(self) -> set[BlockHash]:
        return set(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self._copied = 0
        self.blocks = 0
