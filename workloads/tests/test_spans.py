import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import (
    FIRST_TOKEN_ID,
    TOKEN_RANGE,
    SpanError,
    common_prefix_tokens,
    prompt_token_ids,
    prompt_tokens,
    span_text,
    token_ids,
)

span_ids = st.integers(0, 2**63 - 1)
# Few ids and lengths, so that prompts often share spans, whole and in part.
prompts = st.lists(st.tuples(st.sampled_from([3, 5, 7]), st.integers(1, 40)), max_size=5)


def by_hand(span_id: int, position: int) -> int:
    """The documented formula in plain integers."""
    x = (span_id + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return 1000 + (x ^ (x >> 31)) % 30000


@given(span_ids, st.integers(0, 10**9), st.integers(0, 40))
@settings(deadline=None)
def test_tokens_are_the_documented_function_of_span_and_position(span_id, start, count):
    assert token_ids(span_id, start, count).tolist() == [by_hand(span_id, start + k) for k in range(count)]


@given(span_ids, st.integers(0, 50), st.integers(0, 50))
@settings(deadline=None)
def test_a_span_can_be_laid_out_in_parts(span_id, first, second):
    whole = token_ids(span_id, 0, first + second).tolist()
    assert token_ids(span_id, 0, first).tolist() + token_ids(span_id, first, second).tolist() == whole


@given(prompts, prompts)
@settings(deadline=None)
def test_ids_agree_exactly_as_far_as_spans_agree(a, b):
    shared = 0
    for x, y in zip(prompt_token_ids(a).tolist(), prompt_token_ids(b).tolist(), strict=False):
        if x != y:
            break
        shared += 1
    # A span cut short and followed by another may agree by chance (1 in 30,000 a token); never the other way round.
    assert shared == common_prefix_tokens(a, b)
    assert len(prompt_token_ids(a)) == prompt_tokens(a)


def test_no_token_is_special():
    ids = token_ids(2**63 - 1, 0, 100_000)
    assert ids.min() >= FIRST_TOKEN_ID
    assert ids.max() < FIRST_TOKEN_ID + TOKEN_RANGE
    assert len(set(ids.tolist())) > 0.9 * TOKEN_RANGE


def test_the_mixer_is_splitmix64():
    """The generator's widely published first outputs for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert token_ids(1234567, 0, 4).tolist() == [1000 + x % 30000 for x in published]


@pytest.mark.parametrize(("span_id", "start", "count"), [(-1, 0, 1), (2**63, 0, 1), (1, -1, 1), (1, 0, -1)])
def test_a_span_that_cannot_exist_is_refused(span_id, start, count):
    with pytest.raises(SpanError):
        token_ids(span_id, start, count)


@given(span_ids, st.integers(0, 20), st.integers(0, 20))
@settings(deadline=None, max_examples=30)
def test_text_grows_as_its_span_grows(span_id, tokens, more):
    text = span_text(span_id, 0, tokens + more)
    assert text.startswith(span_text(span_id, 0, tokens))
    assert span_text(span_id, 0, tokens) + span_text(span_id, tokens, more) == text
    assert len(text.split()) == tokens + more


def test_every_token_id_has_a_word_of_its_own():
    from workloads.spans import _words

    assert len(set(_words())) == TOKEN_RANGE
