import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import prompt_token_ids
from workloads.blocks import block_keys
from workloads.splitmix import mix, mix_one

spans = st.lists(st.tuples(st.sampled_from([1, 2, 2**63 - 1]), st.integers(0, 40)), min_size=1, max_size=5)
sizes = st.sampled_from([1, 4, 16])


@given(spans, spans, sizes)
@settings(deadline=None)
def test_keys_agree_exactly_as_far_as_token_ids_agree(a, b, size):
    keys = [block_keys(spans, size).tolist() for spans in (a, b)]
    ids = [prompt_token_ids(spans).tolist() for spans in (a, b)]
    assert [len(k) for k in keys] == [len(i) // size for i in ids]
    for n in range(min(map(len, keys))):
        assert (keys[0][n] == keys[1][n]) == (ids[0][: (n + 1) * size] == ids[1][: (n + 1) * size])


@given(spans, sizes)
@settings(deadline=None)
def test_keys_of_a_longer_prompt_begin_with_those_of_the_shorter(a, size):
    longer = block_keys([*a, (77, 30)], size).tolist()
    shorter = block_keys(a, size).tolist()
    assert longer[: len(shorter)] == shorter
    assert len(set(longer)) == len(longer)


@given(st.integers(0, 2**64 - 1))
def test_one_number_is_mixed_as_many_are(value):
    assert mix(np.array([value], dtype=np.uint64)).tolist() == [mix_one(value)]


def test_an_empty_prompt_has_no_blocks():
    assert block_keys([], 16).tolist() == block_keys([(1, 15)], 16).tolist() == block_keys([(1, 0)], 1).tolist() == []
