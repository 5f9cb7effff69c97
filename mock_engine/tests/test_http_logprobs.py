"""Log-probabilities of prompts and answers, echoes of both, and reasoning that a client does not want to see."""

from __future__ import annotations

from typing import Any

import pytest

from mock_engine import generated_token_ids
from mock_engine.tests.serving import serving
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()
CHAT_PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def test_an_echo_tells_the_log_probabilities_of_prompt_and_answer_in_one_row() -> None:
    async with serving() as client:
        ask = {"prompt": "abc", "max_tokens": 2, "seed": 4, "echo": True, "logprobs": 2}
        (choice,) = (await client.post("/v1/completions", ask))["choices"]
        told = choice["logprobs"]
        answer = [WORDS.decode([one]) for one in generated_token_ids(4, 0, 2)]
        assert told["tokens"] == ["a", "b", "c", *answer]
        assert told["text_offset"] == [0, 1, 2, 3, 3 + len(answer[0])]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert all(value < 0 for value in told["token_logprobs"][1:])
        assert [len(row) for row in told["top_logprobs"][1:]] == [2, 2, 2, 2]
        assert [row and len(row) for row in choice["prompt_logprobs"]] == [None, 2, 2]
        *events, _ = await client.events(ask)
        streamed = [event["choices"][0]["logprobs"] for event in events]
        for key, whole in told.items():
            assert [entry for part in streamed for entry in part[key]] == whole


async def test_scoring_a_text_needs_no_answer() -> None:
    """As evaluation harnesses ask: echo the prompt, generate nothing."""
    async with serving() as client:
        ask = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
        (choice,) = (await client.post("/v1/completions", ask))["choices"]
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("abc", ["a", "b", "c"])


async def test_prompt_logprobs_have_one_object_a_token_and_skip_the_cache() -> None:
    async with serving("--enable-prompt-tokens-details") as client:
        ask = {"prompt": [5] * 40, "max_tokens": 1, "prompt_logprobs": 1}
        await client.post("/v1/completions", ask)
        answer = await client.post("/v1/completions", ask)
        rows = answer["choices"][0]["prompt_logprobs"]
        assert len(rows) == 40
        assert rows[0] is None
        assert rows[1] == {"5": {"logprob": rows[1]["5"]["logprob"], "rank": 1, "decoded_token": "<|sep|>"}}
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert await client.metric("vllm:prefix_cache_queries_total") == 0
        chat = await client.post(CHAT_PATH, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0})
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert (await client.post("/v1/completions", {"prompt": "x"}))["choices"][0]["prompt_logprobs"] is None


async def test_more_logprobs_than_served_are_an_event_in_a_stream() -> None:
    async with serving() as client:
        error, _ = await client.events({"prompt": "x", "logprobs": 21})
        assert (error["error"]["code"], error["error"]["param"]) == (400, "logprobs")


async def test_a_chat_that_is_continued_may_be_told_again_from_its_beginning() -> None:
    async with serving() as client:
        messages = [*USER, {"role": "assistant", "content": "so "}]
        ask: dict[str, Any] = {"messages": messages, "max_tokens": 2, "seed": 4, "echo": True}
        answer = WORDS.decode(generated_token_ids(4, 0, 2))
        whole = await client.post(CHAT_PATH, ask)
        assert whole["choices"][0]["message"]["content"] == f"so {answer}"
        *events, _ = await client.events(ask, CHAT_PATH)
        assert [event["choices"][0]["delta"].get("content") for event in events][:2] == ["", "so "]
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == f"so {answer}"
        assert (await client.post(CHAT_PATH, {**ask, "messages": USER}))["choices"][0]["message"]["content"] == answer


async def test_all_samples_of_a_chat_tell_their_role_before_any_token() -> None:
    async with serving() as client:
        *events, _ = await client.events({"messages": USER, "max_tokens": 2, "n": 3}, CHAT_PATH)
        told = [(event["choices"][0]["index"], list(event["choices"][0]["delta"])) for event in events]
        assert told[:3] == [(index, ["role", "content"]) for index in range(3)]
        assert all(keys == ["content"] for _, keys in told[3:])


async def test_reasoning_that_is_not_wanted_leaves_no_trace() -> None:
    async with serving("--mock-reasoning-tokens", "3") as client:
        ask: dict[str, Any] = {
            "messages": USER, "max_tokens": 5, "seed": 4, "include_reasoning": False, "return_token_ids": True,
            "logprobs": True,
        }  # fmt: skip
        shown = WORDS.decode(generated_token_ids(4, 3, 2))
        (choice,) = (await client.post(CHAT_PATH, ask))["choices"]
        assert choice["message"]["reasoning"] is None
        assert choice["message"]["content"] == shown
        assert (choice["token_ids"], choice["logprobs"]) == (None, None)
        role, *events, _ = await client.events(ask, CHAT_PATH)
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == shown
        assert all(event["choices"][0]["token_ids"] is None for event in events)
        assert all(event["choices"][0]["logprobs"] is None for event in events)


async def test_an_answer_that_ends_in_hidden_reasoning_ends_all_the_same() -> None:
    async with serving("--mock-reasoning-tokens", "9") as client:
        ask = {"messages": USER, "max_tokens": 2, "include_reasoning": False}
        _, last, done = await client.events(ask, CHAT_PATH)
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"], done) == ({}, "length", "[DONE]")
        message = (await client.post(CHAT_PATH, ask))["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (None, None)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT_PATH])
async def test_timings_are_told_of_one_sample_and_of_no_more(path: str) -> None:
    async with serving("--enable-per-request-metrics") as client:
        ask = {"prompt": "x", "messages": USER, "max_tokens": 2}
        keys = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]
        assert list((await client.post(path, ask))["metrics"]) == keys
        assert (await client.post(path, {**ask, "n": 2}))["metrics"] is None
        usage = {"stream_options": {"include_usage": True}}
        *_, last, _ = await client.events({**ask, **usage}, path)
        assert list(last["metrics"]) == keys
        *_, last, _ = await client.events({**ask, **usage, "n": 2}, path)
        assert "metrics" not in last
