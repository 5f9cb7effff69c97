"""The bundled vocabulary: a real byte-level BPE, small, made by our own script, and served like any model's."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine.tests.serving import serving
from mock_engine.tokenizer import BUNDLED, BUNDLED_FOLDER, SPECIALS, load_tokenizer
from mock_engine.vocabulary.train import VOCAB_SIZE, compact, sentences, train

BPE = load_tokenizer(BUNDLED)
BYTES_MAX = 400_000
FLAGS = ("--tokenizer", "bundled", "--enable-prompt-tokens-details", "--enable-scale-out")


def test_it_is_small_and_holds_the_marks_of_the_default_chat_template() -> None:
    assert (BUNDLED_FOLDER / "tokenizer.json").stat().st_size < BYTES_MAX
    assert (BPE.vocab_size, BPE.eos_token_id) == (VOCAB_SIZE, SPECIALS["<|eos|>"])
    for text, token_id in SPECIALS.items():
        assert BPE.encode(text, add_special_tokens=False) == [token_id]


def test_it_really_merges() -> None:
    text = " Please choose the replica with the longest cached prefix."
    ids = BPE.encode(text, add_special_tokens=False)
    assert len(ids) < len(text) / 3
    assert BPE.encode(text) == [SPECIALS["<|bos|>"], *ids]


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80))
def test_any_text_comes_back_exactly(text: str) -> None:
    assert BPE.decode(BPE.encode(text, add_special_tokens=False)) == text


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**63 - 1), st.integers(1, 60), st.text(max_size=20))
def test_an_answer_that_is_sent_back_keeps_its_ids_behind_any_prompt(seed: int, length: int, before: str) -> None:
    answer = BPE.answer(seed)
    assert callable(answer)
    ids = [answer(position) for position in range(length)]
    mark = "<|assistant|>"
    prompt = BPE.encode(before + mark, add_special_tokens=False)
    assert BPE.encode(before + mark + BPE.decode(ids), add_special_tokens=False) == prompt + ids


def test_training_is_repeatable() -> None:
    texts = list(islice(sentences(400), 400))
    assert texts == list(sentences(400))
    first = compact(train(texts, 600))
    assert compact(train(texts, 600)) == first
    assert len(json.loads(first)["model"]["vocab"]) == 600


async def test_what_is_tokenised_rendered_and_computed_agree() -> None:
    async with serving(*FLAGS) as client:
        chat = {"messages": [{"role": "user", "content": "how are you, replica?"}], "max_tokens": 1}
        tokens = (await client.post("/tokenize", chat))["tokens"]
        rendered = await client.post("/v1/chat/completions/render", chat)
        answer = await client.post("/v1/chat/completions", {**chat, "return_token_ids": True})
        assert tokens == rendered["token_ids"] == answer["prompt_token_ids"]
        assert tokens[0] == SPECIALS["<|user|>"]
        shown = (await client.post("/detokenize", {"tokens": tokens}))["prompt"]
        assert shown == "<|user|>how are you, replica?<|end|><|assistant|>"
        (row,) = await client.post("/v1/completions/render", {"prompt": "hello there", "return_token_offsets": True})
        assert row["token_ids"] == (await client.post("/tokenize", {"prompt": "hello there"}))["tokens"]
        assert row["token_offsets"][-1][1] == len("hello there")


async def test_a_chat_history_sent_back_as_text_is_found_in_the_cache() -> None:
    async with serving(*FLAGS) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "tell me about caches"}]
        known = 0
        for turn in range(3):
            answer = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 50, "seed": turn})
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16
            known = usage["prompt_tokens"] + 49  # the last token is never computed
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "and then?"},
            ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_tells_the_text_of_its_ids(stream: bool) -> None:
    async with serving(*FLAGS) as client:
        ask = {"prompt": "hello", "max_tokens": 30, "seed": 9, "return_token_ids": True}
        if stream:
            choices = [event["choices"][0] for event in (await client.events(ask))[:-1]]
        else:
            choices = (await client.post("/v1/completions", ask))["choices"]
        text = "".join(choice["text"] for choice in choices)
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert len(ids) == 30
        assert BPE.decode(ids) == text


def test_the_script_writes_a_folder_that_a_replica_can_serve(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(compact(train(list(sentences(300)), 500)), encoding="utf-8")
    made = load_tokenizer(str(tmp_path))
    assert made.decode(made.encode("one two", add_special_tokens=False)) == "one two"
