"""Which prefixes are resident, in the words of a router that knows tokens and not this engine's hashes.

Fed by the KV events of each step, it keeps the tokens of resident blocks and nothing else, so it is as bounded as the
cache. A prefix is named by XXH3-64 (seed 1337) over its u32 little-endian tokens, computed when somebody asks and then
kept. Blocks under a salt or an adapter are left out: their tokens alone do not say who may hit them. The odd thing is
an event that announces resident blocks again (a second copy, a full report): residency itself is asked of the cache.
"""

from __future__ import annotations

import base64
import heapq
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

from mock_engine.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent
from mock_engine.wire import external_hash

TOKEN_HASH_SEED = 1337
REPORT_TOKENS_MIN = 256  # a shorter prefix is not worth a detour
BLOOM_BITS_PER_HASH = 10  # with seven hashes, fewer than 1 % of absent prefixes seem present
BLOOM_HASHES = 7
BLOOM_BITS_MIN = 1024
FORMS = ("top-k", "bloom")


class _Block:
    __slots__ = ("children", "depth", "name", "parent", "tokens")

    def __init__(self, parent: BlockHash | None, depth: int, tokens: bytes) -> None:
        self.parent = parent
        self.depth = depth  # blocks of the prefix that ends here
        self.tokens = tokens
        self.children = 0
        self.name: int | None = None


class ResidentPrefixes:
    """One rank's. `holds` says whether the cache has a block now."""

    def __init__(self, block_size: int, holds: Callable[[BlockHash], bool]) -> None:
        self.block_size = block_size
        self.generation = 0  # changes with the content
        self._holds = holds
        self._blocks: dict[BlockHash, _Block] = {}
        self._ends: set[BlockHash] = set()  # blocks that no resident block continues

    def __len__(self) -> int:
        return len(self._blocks)

    def observe(self, events: Iterable[KvEvent]) -> None:
        """The events of a step, once the cache is as they leave it."""
        changed = False
        for event in events:
            if isinstance(event, BlockStored):
                changed |= self._store(event)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    changed |= self._drop(key)
            elif isinstance(event, AllBlocksCleared):
                self.clear()
        self.generation += changed

    def clear(self) -> None:
        if self._blocks:
            self._blocks.clear()
            self._ends.clear()
            self.generation += 1

    def _store(self, event: BlockStored) -> bool:
        parent = event.parent_block_hash
        above = None if parent is None else self._blocks.get(parent)
        if event.token_ids is None or any(event.extra_keys or ()) or (parent is not None and above is None):
            return False
        data = _little_endian(event.token_ids)
        step = 4 * event.block_size
        changed = False
        for at, key in enumerate(event.block_hashes):
            block = self._blocks.get(key)
            if block is None:
                if not self._holds(key):
                    break
                depth = 1 if above is None else above.depth + 1
                block = self._blocks[key] = _Block(parent, depth, data[at * step : (at + 1) * step])
                self._ends.add(key)
                if parent is not None and above is not None:
                    above.children += 1
                    self._ends.discard(parent)
                changed = True
            parent, above = key, block
        return changed

    def _drop(self, key: BlockHash) -> bool:
        block = self._blocks.get(key)
        if block is None or self._holds(key):
            return False
        del self._blocks[key]
        self._ends.discard(key)
        above = None if block.parent is None else self._blocks.get(block.parent)
        if above is not None and block.parent is not None:
            above.children -= 1
            if not above.children:
                self._ends.add(block.parent)
        return True

    # -- what is told ----------------------------------------------------------------------------------------------

    def longest(self, count: int, tokens_min: int = REPORT_TOKENS_MIN) -> list[tuple[int, int, BlockHash]]:
        """(token hash, tokens, key of the last block) of the longest prefixes that nothing resident continues."""
        size = self.block_size
        ends = [(self._blocks[key].depth, key) for key in self._ends]
        chosen = heapq.nlargest(count, [end for end in ends if end[0] * size >= tokens_min])
        return [(self._name(key), depth * size, key) for depth, key in chosen]

    def token_hashes(self) -> list[int]:
        """Of every resident prefix; each block is the end of one."""
        for key in reversed(self._blocks):  # a block came after its parent, so most chains are named from their end
            if self._blocks[key].name is None:
                self._name_all(key)
        return [block.name for block in self._blocks.values() if block.name is not None]

    def _chain(self, key: BlockHash) -> list[_Block]:
        chain = []
        at: BlockHash | None = key
        while at is not None:
            block = self._blocks[at]
            chain.append(block)
            at = block.parent
        chain.reverse()
        return chain

    def _name(self, key: BlockHash) -> int:
        block = self._blocks[key]
        if block.name is None:
            tokens = b"".join([one.tokens for one in self._chain(key)])
            block.name = xxhash.xxh3_64_intdigest(tokens, TOKEN_HASH_SEED)
        return block.name

    def _name_all(self, key: BlockHash) -> None:
        running = xxhash.xxh3_64(seed=TOKEN_HASH_SEED)
        for block in self._chain(key):
            running.update(block.tokens)
            if block.name is None:
                block.name = running.intdigest()


class PrefixReport:
    """The body of `GET /prefix_cache_state` over all ranks of a replica, made anew only when something changed."""

    def __init__(self, ranks: Sequence[ResidentPrefixes], top_k: int, past_generations: int = 0) -> None:
        self._ranks = ranks
        self._top_k = top_k
        self._past = past_generations
        self._made: dict[str, tuple[int, dict[str, Any]]] = {}

    @property
    def generation(self) -> int:
        return self._past + sum(rank.generation for rank in self._ranks)

    def body(self, form: str) -> dict[str, Any]:
        generation = self.generation
        made = self._made.get(form)
        if made is None or made[0] != generation:
            head = {"generation": generation, "block_size": self._ranks[0].block_size, "form": form}
            made = generation, {**head, **(self._bloom() if form == "bloom" else self._longest())}
            self._made[form] = made
        return made[1]

    def _longest(self) -> dict[str, Any]:
        found = {row[0]: row for rank in self._ranks for row in rank.longest(self._top_k)}
        rows = heapq.nlargest(self._top_k, found.values(), key=lambda row: row[1])
        size = self._ranks[0].block_size
        return {
            "prefixes": [
                {
                    "token_hash": name,
                    "tokens": tokens,
                    "blocks": tokens // size,
                    "block_hash": external_hash(key),
                }
                for name, tokens, key in rows
            ]
        }

    def _bloom(self) -> dict[str, Any]:
        hashes = {name for rank in self._ranks for name in rank.token_hashes()}
        data = bloom(hashes, max(BLOOM_BITS_MIN, -(-len(hashes) * BLOOM_BITS_PER_HASH // 8) * 8))
        return {"bits": base64.b64encode(data).decode(), "hashes": BLOOM_HASHES, "m": 8 * len(data)}


def bloom(hashes: Iterable[int], bits: int) -> bytes:
    """A filter of `bits` bits. Hash h sets the bits (low + i * high) mod bits for i < 7, low and high being its lower
    and upper 32 bits, high made odd. Bit p is bit p % 8 of byte p // 8."""
    import numpy as np  # only those who ask for a filter wait for it

    values = np.fromiter(hashes, dtype=np.uint64)
    low, high = values & np.uint64(0xFFFFFFFF), (values >> np.uint64(32)) | np.uint64(1)
    filled = np.zeros(bits, dtype=np.uint8)
    for i in range(BLOOM_HASHES):
        filled[(low + np.uint64(i) * high) % np.uint64(bits)] = 1
    return bytes(np.packbits(filled, bitorder="little").tobytes())


def _little_endian(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
