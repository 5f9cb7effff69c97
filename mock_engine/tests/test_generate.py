"""Answers are a documented function of seed and position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_engine import FIRST_TOKEN_ID, TOKEN_RANGE, generated_token_ids


def test_an_answer_is_splitmix64_folded_into_the_token_range() -> None:
    # First outputs of splitmix64 for state 0, as published with the generator.
    raw = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert generated_token_ids(0, 0, 3) == [FIRST_TOKEN_ID + x % TOKEN_RANGE for x in raw]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 20), st.integers(0, 20))
def test_an_answer_may_be_asked_for_in_pieces(seed: int, start: int, first: int, second: int) -> None:
    whole = generated_token_ids(seed, start, first + second)
    assert whole == generated_token_ids(seed, start, first) + generated_token_ids(seed, start + first, second)
    assert all(FIRST_TOKEN_ID <= token < FIRST_TOKEN_ID + TOKEN_RANGE for token in whole)


@pytest.mark.parametrize(("vocab", "first", "last"), [(512, 256, 511), (1500, 750, 1499), (20_000, 1000, 19_999)])
def test_a_small_vocabulary_is_never_left(vocab: int, first: int, last: int) -> None:
    ids = generated_token_ids(3, 0, 5000, vocab)
    assert first <= min(ids)
    assert max(ids) <= last
