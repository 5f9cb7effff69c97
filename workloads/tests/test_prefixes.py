import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import (
    InfiniteCache,
    Streams,
    ceiling_cached_tokens,
    common_prefix_tokens,
    make_workload,
    prompt_token_ids,
    prompt_tokens,
    turn_by_turn,
)

spans = st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 40))
texts = st.lists(spans, min_size=1, max_size=5)


@given(st.lists(texts, max_size=6), texts, st.sampled_from([1, 4, 16]))
@settings(deadline=None)
def test_hits_are_those_of_a_cache_of_hashed_blocks(stored, prompt, block_size):
    """The tree of spans against the plain way: chained blocks of real token ids in a set."""
    blocks = set()
    cache = InfiniteCache(block_size)
    for text in stored:
        cache.store(text)
        ids = tuple(prompt_token_ids(text).tolist())
        blocks.update(ids[:end] for end in range(block_size, len(ids) + 1, block_size))
    ids = tuple(prompt_token_ids(prompt).tolist())
    hit = 0
    while hit + block_size <= len(ids) - 1 and ids[: hit + block_size] in blocks:
        hit += block_size
    assert cache.lookup(prompt) == hit


@given(st.lists(texts, min_size=1, max_size=6), texts)
@settings(deadline=None)
def test_shared_tokens_are_the_longest_prefix_in_common_with_any_stored_text(stored, prompt):
    cache = InfiniteCache(16)
    for text in stored:
        cache.store(text)
    assert cache.shared_tokens(prompt) == max(common_prefix_tokens(text, prompt) for text in stored)


def test_the_last_token_of_a_prompt_is_always_computed():
    cache = InfiniteCache(16)
    cache.store([(1, 64)])
    assert cache.lookup([(1, 64)]) == 48
    assert cache.lookup([(1, 65)]) == 64
    assert cache.lookup([(1, 1)]) == 0


def test_the_last_token_of_an_answer_was_never_computed():
    cache = InfiniteCache(16)
    cache.store_answer([(1, 16)], (2, 16))
    assert cache.lookup([(1, 16), (2, 16), (3, 16)]) == 16
    cache.store_answer([(1, 16)], (4, 17))
    assert cache.lookup([(1, 16), (4, 17), (3, 16)]) == 32


def test_an_empty_cache_hits_nothing():
    assert InfiniteCache(16).lookup([(1, 1000)]) == 0


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="block_size = 0"):
        InfiniteCache(0)


def test_the_ceiling_of_known_sessions():
    table = {
        "kind": "multi-turn",
        "sessions": 2,
        "turns": 2,
        "first_input_tokens": 33,
        "input_tokens": 16,
        "output_tokens": 16,
        "shared_system_prompts": 1,
        "system_prompt_tokens": 20,
    }
    turns = turn_by_turn(make_workload(table).sessions(Streams(0)))
    # Second turns reuse 20 + 33 + 15 = 68 tokens, 4 blocks; the second session's first turn reuses 20, 1 block.
    assert ceiling_cached_tokens(turns, 16) == 64 + 64 + 16


@given(st.integers(0, 1000), st.sampled_from([1, 16, 64]))
@settings(deadline=None, max_examples=20)
def test_the_ceiling_is_below_all_prompt_tokens(seed, block_size):
    turns = list(turn_by_turn(make_workload({"kind": "rl-rollout", "steps": 2, "turns": 3}).sessions(Streams(seed))))
    assert 0 < ceiling_cached_tokens(turns, block_size) < sum(prompt_tokens(turn.prompt) for turn in turns)
