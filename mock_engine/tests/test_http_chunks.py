"""Streams as real ones can be and clients get wrong: several tokens in a chunk, a large first one, reasoning first."""

from __future__ import annotations

from typing import Any

import pytest

from mock_engine.tests.serving import serving
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "seed": 4}
USAGE = {"stream_options": {"include_usage": True}}


def sizes(events: list[Any]) -> list[int]:
    """Tokens of each chunk, counted from its text."""
    return [len(WORDS.encode(event["choices"][0]["text"])) for event in events[:-1] if event["choices"]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), [1] * 12),
        (("--stream-interval", "4"), [1, 4, 4, 3]),
        (("--mock-first-chunk-tokens", "8"), [8, 1, 1, 1, 1]),
        (("--mock-first-chunk-tokens", "4", "--stream-interval", "4"), [4, 4, 4]),
        (("--mock-first-chunk-tokens", "50"), [12]),
    ],
)
async def test_chunks_hold_as_many_tokens_as_asked_and_usage_counts_tokens(
    flags: tuple[str, ...], expected: list[int]
) -> None:
    async with serving(*flags) as client:
        events = await client.events({"prompt": "x", "max_tokens": 12, "seed": 4, **USAGE})
        assert sizes(events) == expected
        assert events[-2]["usage"]["completion_tokens"] == 12


async def test_reasoning_comes_before_content_in_deltas_of_its_own() -> None:
    async with serving("--mock-reasoning-tokens", "3") as client:
        plain = WORDS.decode((await client.post("/v1/completions", TOLD))["choices"][0]["token_ids"])
        *events, done = await client.events({**CHAT, "max_tokens": 5}, "/v1/chat/completions")
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [list(delta) for delta in deltas[1:]] == [["reasoning"]] * 3 + [["content"]] * 2
        assert "".join(text for delta in deltas[1:] for text in delta.values()) == plain
        message = (await client.post("/v1/chat/completions", {**CHAT, "max_tokens": 5}))["choices"][0]["message"]
        assert message["reasoning"] + message["content"] == plain
        assert len(WORDS.encode(message["reasoning"])) == 3
        assert done == "[DONE]"


TOLD = {"prompt": "x", "seed": 4, "max_tokens": 5, "return_token_ids": True}


async def test_an_answer_may_end_while_it_reasons() -> None:
    async with serving("--mock-reasoning-tokens", "50") as client:
        *events, _ = await client.events({**CHAT, "max_tokens": 4}, "/v1/chat/completions")
        assert all(list(event["choices"][0]["delta"]) == ["reasoning"] for event in events[1:])
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        message = (await client.post("/v1/chat/completions", {**CHAT, "max_tokens": 4}))["choices"][0]["message"]
        assert message["content"] is None
        assert len(WORDS.encode(message["reasoning"])) == 4


async def test_no_chunk_holds_reasoning_and_content() -> None:
    async with serving("--mock-reasoning-tokens", "6", "--stream-interval", "4") as client:
        *events, _ = await client.events({**CHAT, "max_tokens": 12}, "/v1/chat/completions")
        found = [
            (key, len(WORDS.encode(text))) for event in events[1:] for key, text in event["choices"][0]["delta"].items()
        ]
        assert found == [("reasoning", 1), ("reasoning", 4), ("reasoning", 1), ("content", 4), ("content", 2)]
