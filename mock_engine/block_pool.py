"""KV blocks of one replica: who holds them, which content is cached, which one is evicted next.

Pure bookkeeping: recency is the order of calls, so no clock appears. A block in use is never evicted, free plus used
blocks always equal the total, and block 0, the null block, is handed to nobody. The odd thing: equal contents are not
merged; a second copy is cached, announced and evicted like the first, and lookups return the oldest.
"""

from collections.abc import Iterable, Iterator, Sequence

from mock_engine.events import AllBlocksCleared, BlockHash, BlockRemoved, KvEvent
from mock_engine.prefix_cache import PrefixCache
from mock_engine.request import TokenSource


class Block:
    """One block; `key` is its cached content, `before` and `after` its neighbours while it is free."""

    __slots__ = ("after", "before", "decoders", "holders", "index", "key")

    def __init__(self, index: int) -> None:
        self.index = index
        self.key: BlockHash | None = None
        self.holders = 0
        self.decoders = 0  # holders that are past their prefill
        self.before: Block = self
        self.after: Block = self


class FreeQueue:
    """Free blocks from the next to be taken to the last; a ring through a sentinel, so any one leaves at once."""

    __slots__ = ("_ring", "length")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._ring = Block(-1)
        self.length = 0
        self._insert(blocks, self._ring)

    def append(self, blocks: Sequence[Block]) -> None:
        """To the back, in this order."""
        self._insert(blocks, self._ring)

    def prepend(self, blocks: Sequence[Block]) -> None:
        """To the front; the first of them is taken next."""
        self._insert(blocks, self._ring.after)

    def _insert(self, blocks: Sequence[Block], after: Block) -> None:
        before = after.before
        for block in blocks:
            block.before = before
            before.after = block
            before = block
        before.after = after
        after.before = before
        self.length += len(blocks)

    def remove(self, block: Block) -> None:
        block.before.after = block.after
        block.after.before = block.before
        self.length -= 1

    def pop(self) -> Block:
        block = self._ring.after
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._ring.after
        while block is not self._ring:
            yield block
            block = block.after


class BlockPool:
    """`events` collects what happened since `take_events`, in order."""

    def __init__(self, num_gpu_blocks: int, *, caching: bool) -> None:
        self.total = num_gpu_blocks - 1
        self.caching = caching
        self.blocks = [Block(i) for i in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.holders = 1
        self.free_queue = FreeQueue(self.blocks[1:])
        self.cache: PrefixCache[Block] = PrefixCache()
        self.events: list[KvEvent] = []
        self.evicted = 0
        self.active_decode_blocks = 0

    @property
    def free(self) -> int:
        return self.free_queue.length

    @property
    def used(self) -> int:
        return self.total - self.free_queue.length

    def hits(self, sequence: TokenSource, blocks_max: int) -> list[Block]:
        """The longest resident chain of the sequence's leading blocks, at most `blocks_max`."""
        if not self.caching:
            return []
        return self.cache.longest(sequence.block_keys(blocks_max), blocks_max)

    def allocate(self, count: int, held: list[Block], *, decoding: bool) -> None:
        """Append `count` blocks to `held`; whatever content they cached is evicted now. The caller checked `free`."""
        queue, decoders = self.free_queue, int(decoding)
        for _ in range(count):
            block = queue.pop()
            if block.key is not None:
                self._evict(block)
            block.holders = 1
            block.decoders = decoders
            held.append(block)
        self.active_decode_blocks += count * decoders

    def _evict(self, block: Block) -> None:
        key = block.key
        assert key is not None
        self.cache.remove(key, block)
        block.key = None
        self.evicted += 1
        self.events.append(BlockRemoved(block_hashes=(key,)))

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more holder for each; free ones leave the queue."""
        for block in blocks:
            if not block.holders:
                self.free_queue.remove(block)
            block.holders += 1

    def start_decoding(self, blocks: Iterable[Block]) -> None:
        """Their holder ended its prefill."""
        for block in blocks:
            if not block.decoders:
                self.active_decode_blocks += 1
            block.decoders += 1

    def store(self, sequence: TokenSource, held: Sequence[Block], first: int, stop: int, session: str | None) -> None:
        """Cache blocks first .. stop - 1 of a sequence, which are full now, and announce them as one event."""
        keys = sequence.block_keys(stop)
        for i in range(first, stop):
            block = held[i]
            block.key = keys[i]
            self.cache.insert(keys[i], block)
        self.events.append(sequence.stored(first, stop, session))

    def release(self, held: Sequence[Block], *, decoding: bool) -> None:
        """Give up a request's blocks, deepest first: content stays hittable at the back of the queue, blocks without
        content go to its front."""
        if decoding:
            for block in held:
                block.decoders -= 1
                if not block.decoders:
                    self.active_decode_blocks -= 1
        cached: list[Block] = []
        uncached: list[Block] = []
        for block in reversed(held):
            block.holders -= 1
            if not block.holders:
                (uncached if block.key is None else cached).append(block)
        self.free_queue.append(cached)
        self.free_queue.prepend(uncached)

    def reset(self) -> bool:
        """Forget all content; refused while any block is held. The order of the free queue stays."""
        if self.used:
            return False
        self.cache.clear()
        for block in self.blocks:
            block.key = None
        self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        events = tuple(self.events)
        self.events.clear()
        return events
