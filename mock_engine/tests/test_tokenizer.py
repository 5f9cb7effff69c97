"""Text and token ids of the offline vocabulary and of a real tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import FIRST_TOKEN_ID, TOKEN_RANGE, ConfigError, RequestError, generated_token_ids
from mock_engine.chat import DEFAULT_TEMPLATE, ChatTemplate
from mock_engine.tokenizer import SPECIALS, FileTokenizer, WordTokenizer, load_tokenizer, word

MODEL = Path(__file__).parent / "http" / "model"
WORDS = WordTokenizer()
GENERATED = st.integers(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_RANGE - 1)
TEXT = st.text(st.characters(exclude_categories=[]), max_size=60) | st.lists(
    st.sampled_from([*SPECIALS, word(1000), word(30999), " ", "ba", " bababa", "é", "\n", "<|", "|>"]), max_size=12
).map("".join)


@settings(deadline=None)
@given(TEXT)
def test_any_text_comes_back_exactly(text: str) -> None:
    assert WORDS.decode(WORDS.encode(text)) == text


@settings(deadline=None)
@given(st.lists(GENERATED, max_size=30))
def test_generated_ids_come_back_from_their_text(ids: list[int]) -> None:
    assert WORDS.encode(WORDS.decode(ids)) == ids


@settings(deadline=None)
@given(TEXT, st.lists(GENERATED, min_size=1, max_size=10), TEXT)
def test_an_answer_that_is_sent_back_keeps_its_ids_whatever_surrounds_it(
    before: str, ids: list[int], after: str
) -> None:
    prompt = WORDS.encode(before)
    again = WORDS.encode(before + WORDS.decode(ids) + after)
    assert again[: len(prompt) + len(ids)] == prompt + ids


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_more_text_never_changes_the_ids_before_it_unless_the_cut_goes_through_a_word(text: str, more: str) -> None:
    whole, first = WORDS.encode(text + more), WORDS.encode(text)
    if (
        any(token_id >= FIRST_TOKEN_ID or token_id < 100 for token_id in whole[: len(first)])
        and whole[: len(first)] != first
    ):
        return  # the cut went through a word or a mark
    assert whole[: len(first)] == first


@settings(deadline=None)
@given(TEXT, st.booleans())
def test_pieces_of_a_decoder_join_to_the_decoded_text(text: str, skip: bool) -> None:
    ids = WORDS.encode(text)
    decoder = WORDS.decoder(skip)
    assert "".join([*map(decoder.push, ids), decoder.flush()]) == WORDS.decode(ids, skip)


def test_every_generated_id_has_a_word_of_its_own() -> None:
    words = {word(token_id) for token_id in range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_RANGE)}
    assert len(words) == TOKEN_RANGE
    assert {len(text) for text in words} == {7}


def test_a_growing_conversation_keeps_the_ids_of_its_earlier_turns() -> None:
    template = ChatTemplate(DEFAULT_TEMPLATE)
    answer = generated_token_ids(7, 0, 12)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]
    first = WORDS.encode(template.render(messages, add_generation_prompt=True))
    messages += [{"role": "assistant", "content": WORDS.decode(answer)}, {"role": "user", "content": "go on"}]
    second = WORDS.encode(template.render(messages, add_generation_prompt=True))
    assert second[: len(first) + len(answer)] == first + answer


def test_special_tokens_vanish_only_when_asked() -> None:
    ids = [SPECIALS["<|user|>"], *WORDS.encode("hi"), 999]
    assert WORDS.decode(ids) == "<|user|>hi"
    assert WORDS.decode(ids, skip_special_tokens=True) == "hi"


def test_offsets_cover_the_text_token_by_token() -> None:
    text = "aé" + word(2000) + "<|end|>"
    spans = WORDS.offsets(text)
    assert len(spans) == len(WORDS.encode(text))
    assert spans == [(0, 1), (1, 2), (1, 2), (2, 9), (9, 16)]


def test_a_real_vocabulary_answers_in_ids_that_its_text_maps_back_to() -> None:
    tokenizer = FileTokenizer(MODEL / "tokenizer.json")
    answer = tokenizer.answer(seed=5)
    assert callable(answer)
    ids = [answer(position) for position in range(200)]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert ids == [tokenizer.answer(seed=5)(position) for position in range(200)]  # type: ignore[operator]


def test_a_real_decoder_gives_the_same_text_piece_by_piece() -> None:
    tokenizer = FileTokenizer(MODEL)
    ids = tokenizer.encode("hello wörld, twice € over", add_special_tokens=False)
    decoder = tokenizer.decoder()
    assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids)
    assert tokenizer.chat_template is not None
    assert tokenizer.eos_token_id == 2


def test_a_tokenizer_that_is_not_there_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "nothing.json"))


def test_half_a_surrogate_pair_is_no_text_for_a_real_tokenizer() -> None:
    real = FileTokenizer(MODEL)
    for read in (real.encode, real.offsets):
        with pytest.raises(RequestError, match="cannot be tokenised") as refused:
            read("a\ud800")
        assert refused.value.status == 400
