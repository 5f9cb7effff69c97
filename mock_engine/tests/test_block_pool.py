"""Laws of the block pool and the prefix cache."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import AllBlocksCleared, BlockRemoved, RunSequence
from mock_engine.block_pool import Block, BlockPool
from mock_engine.prefix_cache import PrefixCache


def held(pool: BlockPool, run: int, blocks: int, *, stored: int | None = None) -> tuple[RunSequence, list[Block]]:
    """A request of `blocks` blocks, the first `stored` of them cached."""
    sequence = RunSequence(((run, blocks),), run + 1000, block_size=1)
    mine: list[Block] = []
    pool.allocate(blocks, mine, decoding=False)
    stored = blocks if stored is None else stored
    if stored:
        pool.store(sequence, mine, 0, stored, None)
    return sequence, mine


def removed(pool: BlockPool) -> list[int]:
    return [event.block_hashes[0] for event in pool.take_events() if isinstance(event, BlockRemoved)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_eviction_takes_the_deepest_block_of_the_least_recently_freed_chain_first(sizes: list[int], data) -> None:
    pool = BlockPool(sum(sizes) + 1, caching=True)
    chains = [held(pool, run, size) for run, size in enumerate(sizes)]
    expected = []
    for i in data.draw(st.permutations(range(len(sizes)))):
        sequence, mine = chains[i]
        pool.release(mine, decoding=False)
        expected += reversed(sequence.block_keys(sizes[i])[: sizes[i]])
    pool.take_events()
    count = data.draw(st.integers(1, sum(sizes)))
    pool.allocate(count, [], decoding=False)
    assert removed(pool) == expected[:count]
    assert pool.evicted == count


def test_a_block_without_content_is_taken_before_any_cached_one() -> None:
    pool = BlockPool(6, caching=True)
    _, old = held(pool, 1, 2)
    pool.release(old, decoding=False)
    _, mine = held(pool, 2, 3, stored=2)
    pool.release(mine, decoding=False)
    pool.take_events()
    pool.allocate(1, [], decoding=False)
    assert removed(pool) == []


def test_a_touched_block_leaves_the_queue_and_comes_back_as_the_newest() -> None:
    pool = BlockPool(5, caching=True)
    (first, one), (second, other) = held(pool, 1, 2), held(pool, 2, 2)
    pool.release(one, decoding=False)
    pool.release(other, decoding=False)
    hits = pool.hits(first, 1)
    pool.touch(hits)
    assert pool.free == 3
    pool.release(hits, decoding=False)
    pool.take_events()
    pool.allocate(4, [], decoding=False)
    a, b = first.block_keys(2), second.block_keys(2)
    assert removed(pool) == [a[1], b[1], b[0], a[0]]


def test_a_lookup_returns_the_oldest_copy_and_the_last_copy_keeps_the_key() -> None:
    pool = BlockPool(4, caching=True)
    sequence, one = held(pool, 1, 1)
    _, two = held(pool, 1, 1)
    _, three = held(pool, 1, 1)
    assert pool.cache.blocks == 3
    assert pool.hits(sequence, 1) == one
    pool.release(one, decoding=False)
    again: list[Block] = []
    pool.allocate(1, again, decoding=False)  # evicts the oldest
    assert pool.hits(sequence, 1) == two
    pool.store(sequence, again, 0, 1, None)  # cached anew: the youngest now
    assert pool.hits(sequence, 1) == two
    assert pool.cache.blocks == 3
    assert three[0].key == two[0].key


def test_a_reset_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(4, caching=True)
    sequence, mine = held(pool, 1, 2)
    pool.take_events()
    assert not pool.reset()
    assert pool.take_events() == ()
    pool.release(mine, decoding=False)
    assert pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert pool.hits(sequence, 2) == []
    pool.allocate(3, [], decoding=False)
    assert pool.take_events() == ()


def test_without_caching_nothing_hits() -> None:
    pool = BlockPool(4, caching=False)
    sequence, mine = held(pool, 1, 2, stored=0)
    pool.release(mine, decoding=False)
    assert pool.hits(sequence, 2) == []


def test_active_decode_blocks_counts_a_shared_block_once() -> None:
    pool = BlockPool(8, caching=True)
    sequence, mine = held(pool, 1, 3)
    pool.start_decoding(mine)
    shared = pool.hits(sequence, 2)
    pool.touch(shared)
    assert pool.active_decode_blocks == 3
    pool.start_decoding(shared)
    pool.allocate(1, shared, decoding=True)
    assert pool.active_decode_blocks == 4
    pool.release(mine, decoding=True)
    assert pool.active_decode_blocks == 3
    pool.release(shared, decoding=True)
    assert pool.active_decode_blocks == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 30))
def test_free_and_used_blocks_add_up_and_a_block_in_use_is_never_evicted(seed: int, total: int) -> None:
    rng = Random(seed)
    pool = BlockPool(total + 1, caching=True)
    holders: list[tuple[RunSequence, list[Block]]] = []
    for _ in range(60):
        if holders and rng.random() < 0.4:
            _, mine = holders.pop(rng.randrange(len(holders)))
            pool.release(mine, decoding=False)
        else:
            blocks = rng.randint(1, 5)
            sequence = RunSequence(((rng.randint(1, 4), blocks),), 99, block_size=1)
            hits = pool.hits(sequence, blocks)
            if blocks - sum(block.holders > 0 for block in hits) > pool.free:
                continue
            in_use = {block.index for _, mine in holders for block in mine}
            keys = {block.index: block.key for _, mine in holders for block in mine}
            pool.touch(hits)
            mine = list(hits)
            pool.allocate(blocks - len(hits), mine, decoding=False)
            assert not {block.index for block in mine[len(hits) :]} & in_use
            assert {index: pool.blocks[index].key for index in in_use} == keys
            if len(hits) < blocks:
                pool.store(sequence, mine, len(hits), blocks, None)
            holders.append((sequence, mine))
        waiting = list(pool.free_queue)
        assert len(waiting) == len({block.index for block in waiting}) == pool.free
        assert not any(block.holders for block in waiting)
        assert pool.free + pool.used == pool.total == total
        assert pool.used == len({block.index for _, mine in holders for block in mine})
        assert pool.null_block not in waiting


def test_a_long_chain_is_walked_to_its_first_gap() -> None:
    cache: PrefixCache[Block] = PrefixCache()
    blocks = [Block(i) for i in range(1000)]
    for block in blocks:
        if block.index != 700:
            cache.insert(block.index, block)
    assert cache.longest(range(1000), 1000) == blocks[:700]
    assert cache.longest(range(1000), 300) == blocks[:300]
    cache.insert(5, Block(2000))
    assert cache.longest(range(1000), 1000) == blocks[:700]
    with pytest.raises(KeyError):
        cache.remove(700, blocks[700])
