"""Token sequences and run sequences: equal keys mean equal prefixes, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import BlockHasher, EngineError, Lora, RunSequence, TokenSequence, generated_token_ids

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=6).map(tuple)


def expand(runs) -> list[tuple[int, int]]:
    return [(run, k) for run, tokens in runs for k in range(tokens)]


@settings(max_examples=300, deadline=None)
@given(RUNS, RUNS, st.sampled_from([1, 3, 4, 8]))
def test_two_prompts_share_a_block_key_exactly_when_all_tokens_up_to_it_agree(first, second, size: int) -> None:
    one, other = RunSequence(first, 7, block_size=size), RunSequence(second, 8, block_size=size)
    one_tokens, other_tokens = expand(first), expand(second)
    assert one.prompt_tokens == len(one_tokens)
    for i in range(min(len(one_tokens), len(other_tokens)) // size):
        start, stop = i * size, (i + 1) * size
        same_prefix = one_tokens[:stop] == other_tokens[:stop]
        assert (one.block_keys(i + 1)[i] == other.block_keys(i + 1)[i]) == same_prefix
        same_content = one_tokens[start:stop] == other_tokens[start:stop]
        assert (one.block_content(i) == other.block_content(i)) == same_content


@settings(max_examples=300, deadline=None)
@given(RUNS, RUNS, st.integers(0, 30), st.integers(0, 30), st.sampled_from([1, 3, 4]), st.booleans())
def test_a_memo_never_changes_a_key(first, second, ahead: int, blocks: int, size: int, is_next_turn: bool) -> None:
    """Whatever prompt the memo is of, and however far it was hashed into its answer."""
    memo = RunSequence(first, 9, block_size=size)
    memo.block_keys(blocks)
    runs = (*first, (9, ahead), *second) if is_next_turn else second
    with_memo, plain = RunSequence(runs, 9, memo, block_size=size), RunSequence(runs, 9, block_size=size)
    count = plain.prompt_tokens // size + 3
    assert with_memo.block_keys(count)[:count] == plain.block_keys(count)[:count]
    assert [with_memo.block_content(i) for i in range(count)] == [plain.block_content(i) for i in range(count)]


def test_the_next_turn_hashes_only_what_is_new() -> None:
    first = RunSequence(((1, 160),), 2)
    first.block_keys(12)  # the answer has come to 32 tokens and more
    second = RunSequence(((1, 160), (2, 40), (3, 100)), 4, first)
    assert len(second._keys) == 12
    assert second.block_keys(12)[:12] == first.block_keys(12)[:12]


def test_a_memo_of_another_block_size_is_no_use() -> None:
    memo = RunSequence(((1, 64),), 2, block_size=8)
    memo.block_keys(8)
    assert RunSequence(((1, 64),), 2, memo, block_size=16).block_keys(4) == RunSequence(((1, 64),), 2).block_keys(4)


def test_contents_of_a_prompt_are_those_of_its_full_blocks() -> None:
    sequence = RunSequence(((1, 40), (2, 30)), 3)
    assert sequence.block_contents() == [sequence.block_content(i) for i in range(4)]


def test_a_run_starts_at_its_own_token_zero() -> None:
    twice, once = RunSequence(((5, 8), (5, 8)), 1), RunSequence(((5, 16),), 1)
    assert twice.block_keys(1)[0] != once.block_keys(1)[0]


def test_an_answer_is_hashed_as_the_prompt_that_carries_it_back() -> None:
    hasher = BlockHasher()
    turn = TokenSequence(list(range(20)), hasher=hasher, output=77)
    again = TokenSequence([*range(20), *generated_token_ids(77, 0, 30)], hasher=hasher, output=78)
    assert turn.block_keys(3)[:3] == again.block_keys(3)[:3]
    assert turn.output_token_ids(5, 9) == generated_token_ids(77, 5, 4)


def test_numbers_of_numpy_are_hashed_as_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    plain = TokenSequence(list(range(32)), hasher=BlockHasher(), output=0)
    assert TokenSequence(numpy.arange(32), hasher=BlockHasher(), output=0).block_keys(2) == plain.block_keys(2)


def test_salt_and_adapter_separate_tenants() -> None:
    hasher = BlockHasher()
    keys = {
        TokenSequence(list(range(16)), hasher=hasher, output=0, cache_salt=salt, lora=lora).block_keys(1)[0]
        for salt in (None, "a", "b")
        for lora in (None, Lora("x", "/x"), Lora("x", "/y"))
    }
    assert len(keys) == 9


def test_a_symbolic_salt_separates_tenants_and_is_told_with_the_first_block() -> None:
    def keys(salt: str | None, memo: RunSequence | None = None) -> list[int]:
        return RunSequence(((1, 64), (2, 40)), 3, memo, block_size=16, cache_salt=salt).block_keys(6)[:6]

    plain = RunSequence(((1, 64), (2, 40)), 3, block_size=16)
    salted = RunSequence(((1, 64), (2, 40)), 3, block_size=16, cache_salt="a")
    assert not set(plain.block_keys(6)) & set(keys("a"))
    assert not set(keys("a")) & set(keys("b"))
    assert keys("a") == keys("a", plain) == keys("a", salted), "a memo with another salt is no use"
    assert salted.block_contents() == plain.block_contents()
    assert salted.stored(0, 3, None).extra_keys == (("a",), None, None)
    assert salted.stored(1, 3, None).extra_keys is plain.stored(0, 3, None).extra_keys is None


def test_a_stored_event_tells_adapter_salt_session_and_parent() -> None:
    lora = Lora("ad1", "/adapters/ad1", 4)
    sequence = TokenSequence(list(range(48)), hasher=BlockHasher(), output=0, cache_salt="s9", lora=lora)
    event = sequence.stored(0, 3, "session")
    assert event.extra_keys == (("ad1", "s9"), ("ad1",), ("ad1",))
    assert (event.lora_id, event.lora_name, event.session_id, event.parent_block_hash) == (4, "ad1", "session", None)
    later = sequence.stored(1, 3, None)
    assert later.parent_block_hash == event.block_hashes[0]
    assert later.token_ids == list(range(16, 48))
    assert later.extra_keys == (("ad1",), ("ad1",))


def test_a_stop_is_found_wherever_it_lies() -> None:
    sequence = TokenSequence([1], hasher=BlockHasher(), output=5)
    answer = generated_token_ids(5, 0, 400)
    for wanted in (0, 127, 128, 300):
        stops = frozenset({answer[wanted]})
        expected = answer.index(answer[wanted])
        position, found = 0, False
        while not found:
            position, found = sequence.first_stop(position, stops)
        assert position == expected


def test_a_symbolic_request_cannot_stop_at_a_token() -> None:
    with pytest.raises(EngineError, match="stop_token_ids"):
        RunSequence(((1, 4),), 2).first_stop(0, frozenset({1}))
