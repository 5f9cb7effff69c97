"""Names of blocks: the observed Dynamo values, and the laws of prefix keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import EventError, PrefixKeys, local_block_hashes, lora_seed, sequence_hashes
from routers.hashing import LOCAL_SEED, extend_keys

CONTENTS = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=40)


def test_local_hashes_are_those_observed_of_dynamo():
    assert local_block_hashes(range(32), 16).tolist() == [15310707395893867146, 15292316782987903195]


def test_a_lora_name_changes_the_seed_as_observed():
    assert local_block_hashes(range(16), 16, "abc").tolist() == [10324149929454484991]


def test_an_empty_lora_name_is_no_adapter():
    assert lora_seed("") == lora_seed(None) == LOCAL_SEED


def test_a_partial_block_has_no_name():
    assert len(local_block_hashes(range(47), 16)) == 2
    assert len(local_block_hashes(range(15), 16)) == 0


@pytest.mark.parametrize("bad", [[-1] * 16, [2**32] * 16, ["a"] * 16, [2**70] * 16])
def test_what_cannot_be_a_token_id_is_an_error_that_says_the_range(bad):
    with pytest.raises(EventError, match="token ids"):
        local_block_hashes(bad, 16)


def test_the_first_sequence_hash_is_the_local_hash_and_later_ones_depend_on_all_before():
    one, other = sequence_hashes([5, 6, 7]), sequence_hashes([5, 9, 7])
    assert one[0] == other[0] == 5
    assert one[1] != other[1]
    assert one[2] != other[2]
    assert sequence_hashes([5, 6]) == one[:2]


@settings(deadline=None, max_examples=150)
@given(CONTENTS, CONTENTS)
def test_two_prompts_share_a_prefix_key_exactly_where_their_leading_blocks_agree(left, right):
    mine, theirs = PrefixKeys(left), PrefixKeys(right)
    agreed = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        agreed += 1
    shorter = min(len(left), len(right))
    assert [mine.at(d) == theirs.at(d) for d in range(1, shorter + 1)] == [d <= agreed for d in range(1, shorter + 1)]
    if shorter:
        assert mine.common(theirs, 0, shorter) == agreed


@settings(deadline=None, max_examples=100)
@given(CONTENTS, st.integers(0, 40))
def test_extending_a_prefix_gives_the_keys_of_the_whole(contents, cut):
    whole = PrefixKeys(contents)
    cut = min(cut, len(contents))
    start = whole.at(cut) if cut else 0
    expected = [whole.at(depth) for depth in range(cut + 1, len(contents) + 1)]
    assert extend_keys(start, cut, contents[cut:]) == expected


def test_a_block_moved_to_another_depth_gives_another_key():
    assert PrefixKeys([1, 2]).at(2) != PrefixKeys([2, 1]).at(2)


def test_hashes_may_come_as_an_array_or_as_numbers():
    numbers = [3, 2**64 - 1, 7]
    assert PrefixKeys(np.array(numbers, dtype=np.uint64)).at(3) == PrefixKeys(tuple(numbers)).at(3)
