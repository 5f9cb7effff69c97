"""Token ids in, token ids out, and what renders to it."""

from __future__ import annotations

from typing import Any

import pytest

from mock_engine import generated_token_ids
from mock_engine.tests.serving import serving
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()
OPEN = "--enable-scale-out"
PATH = "/inference/v1/generate"
CHOICE_KEYS = ["index", "finish_reason", "token_ids", "routed_experts", "sampling_mask", "weight_versions"]


async def test_ids_go_in_and_come_out_in_the_servers_form() -> None:
    async with serving(OPEN, "--enable-prompt-tokens-details") as client:
        ask = {"token_ids": [5] * 40, "sampling_params": {"max_tokens": 3, "seed": 9}}
        await client.post(PATH, ask)
        answer = await client.post(PATH, ask, **{"X-Request-Id": "abc"})
        assert list(answer) == [
            "request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_ids", "mm_placeholders",
            "metrics", "kv_transfer_params", "ec_transfer_params", "output_mode", "choices",
        ]  # fmt: skip
        assert (answer["request_id"], answer["model"]) == ("generate-tokens-abc", "m")
        assert answer["output_mode"] == "tokens"
        (choice,) = answer["choices"]
        assert list(choice) == [*CHOICE_KEYS, "logprobs"]
        assert (choice["token_ids"], choice["finish_reason"]) == (generated_token_ids(9, 0, 3), "length")
        assert answer["prompt_token_ids"] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_a_stream_of_ids_tells_the_prompt_once_and_usage_last() -> None:
    async with serving(OPEN) as client:
        ask: dict[str, Any] = {
            "token_ids": [5, 6, 7],
            "sampling_params": {"max_tokens": 2, "n": 2, "seed": 1},
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        *chunks, last, done = await client.events(ask, PATH)
        first, *others = chunks
        assert list(first) == ["request_id", "usage", "prompt_token_ids", "output_mode", "choices"]
        assert first["prompt_token_ids"] == [5, 6, 7]
        assert all(list(chunk) == ["request_id", "usage", "output_mode", "choices"] for chunk in others)
        for index in (0, 1):
            told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [one["token_ids"] for one in told] == [[one] for one in generated_token_ids(1 + index, 0, 2)]
            assert [one["finish_reason"] for one in told] == [None, "length"]
        assert list(last) == ["request_id", "usage", "output_mode", "choices"]
        assert last["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
        assert done == "[DONE]"


async def test_text_mode_adds_what_the_ids_say_and_stops_at_strings() -> None:
    async with serving(OPEN) as client:
        ids = generated_token_ids(9, 0, 4)
        stop = WORDS.decode(ids[2:3])
        ask: dict[str, Any] = {
            "token_ids": [5, 6, 7],
            "sampling_params": {"max_tokens": 9, "seed": 9, "stop": [stop], "logprobs": 1},
            "output_mode": "text",
        }
        (choice,) = (await client.post(PATH, ask))["choices"]
        assert list(choice) == [*CHOICE_KEYS, "text", "logprobs"]
        assert (choice["text"], choice["token_ids"]) == (WORDS.decode(ids[:2]), ids[:3])
        assert choice["logprobs"]["content"][0]["token"] == WORDS.decode(ids[:1])
        *chunks, _ = await client.events(ask, PATH)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


async def test_log_probabilities_name_ids_because_no_tokenizer_is_asked() -> None:
    async with serving(OPEN) as client:
        params = {"max_tokens": 1, "seed": 9, "logprobs": 2, "prompt_logprobs": 0}
        answer = await client.post(PATH, {"token_ids": [5, 6], "sampling_params": params})
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        assert list(entry) == ["token_id", "logprob", "rank", "top_logprobs"]
        assert [one["rank"] for one in entry["top_logprobs"]] == [1, 2]
        assert entry["token_id"] == entry["top_logprobs"][0]["token_id"] == generated_token_ids(9, 0, 1)[0]
        assert answer["prompt_logprobs"][0] is None
        assert list(answer["prompt_logprobs"][1]) == ["6"]


async def test_the_answer_may_fill_the_context_if_nobody_says_how_long() -> None:
    async with serving(OPEN, "--max-model-len", "64") as client:
        answer = await client.post(PATH, {"token_ids": [5] * 50, "sampling_params": {}})
        assert answer["usage"]["completion_tokens"] == 14
        answer = await client.post(PATH, {"token_ids": [5] * 50, "sampling_params": {"max_tokens": 900}})
        assert answer["usage"]["completion_tokens"] == 14


@pytest.mark.parametrize(
    ("body", "said", "kind"),
    [
        ({"sampling_params": {}}, "'loc': 'body.token_ids', 'msg': 'Field required'", "Bad Request"),
        ({"token_ids": [5]}, "'loc': 'body.sampling_params', 'msg': 'Field required'", "Bad Request"),
        ({"token_ids": [], "sampling_params": {}}, "at least 1 item after validation, not 0", "Bad Request"),
        ({"token_ids": [-1], "sampling_params": {}}, "greater than or equal to 0", "Bad Request"),
        ({"token_ids": [5], "sampling_params": {"n": 2000}}, "at most the server's max_num_seqs (1024)", None),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "max_tokens must be at least 1, got 0.", None),
        ({"token_ids": [5], "sampling_params": {}, "features": {}}, "reads text only", None),
        ({"token_ids": [5], "sampling_params": {}, "cache_salt": "a/b"}, "must not contain '@'", None),
        ({"token_ids": [40_000], "sampling_params": {}}, "Token id 40000 is out of vocabulary", None),
        ({"token_ids": [5] * 64, "sampling_params": {}}, "(length 64) plus the number of requested", None),
        ({"token_ids": [5] * 65, "sampling_params": {}}, "(length 65) is longer than the maximum", None),
        (
            {"token_ids": [5], "sampling_params": {"detokenize": False}, "output_mode": "text"},
            "output_mode='text' requires sampling_params.detokenize to be true",
            None,
        ),
    ],
)
async def test_what_cannot_be_generated_is_a_bad_request(body: dict[str, Any], said: str, kind: str | None) -> None:
    async with serving(OPEN, "--max-model-len", "64") as client:
        status, answer, _ = await client.ask("POST", PATH, body)
        assert (status, answer["error"]["type"]) == (400, kind or "BadRequestError")
        assert said in answer["error"]["message"]


async def test_a_stream_learns_of_a_prompt_that_is_too_long_as_an_event() -> None:
    async with serving(OPEN, "--max-model-len", "64") as client:
        error, done = await client.events({"token_ids": [5] * 65, "sampling_params": {}}, PATH)
        assert (error["error"]["code"], done) == (400, "[DONE]")


async def test_what_render_shows_can_be_generated_as_it_stands() -> None:
    async with serving(OPEN) as client:
        ask = {"prompt": "hello", "max_tokens": 3, "seed": 9, "stop": ["zzz"]}
        (rendered,) = await client.post("/v1/completions/render", ask)
        answer = await client.post(PATH, rendered)
        plain = await client.post("/v1/completions", {**ask, "return_token_ids": True})
        assert answer["request_id"] == f"generate-tokens-{rendered['request_id']}"
        assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "more"},
]


async def test_anthropics_messages_render_as_the_chat_that_they_are() -> None:
    async with serving(OPEN) as client:
        chat = await client.post("/v1/chat/completions/render", {"messages": CHAT, "max_tokens": 9, "stop": ["x"]})
        body = {
            "model": "m",
            "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
            "messages": [CHAT[1], {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}, CHAT[3]],
            "max_tokens": 9,
            "stop_sequences": ["x"],
        }
        rendered = await client.post("/v1/messages/render", body)
        assert list(rendered) == list(chat)
        assert rendered["request_id"].startswith("chatcmpl-")
        assert (rendered["token_ids"], rendered["sampling_params"]) == (chat["token_ids"], chat["sampling_params"])
        status, refused, _ = await client.ask("POST", "/v1/messages/render", {"model": "m", "messages": []})
        assert (status, refused["error"]["param"]) == (400, "body.max_tokens")


async def test_a_tools_result_becomes_a_message_of_the_tool() -> None:
    async with serving(OPEN) as client:
        called = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "text", "text": "so"}]
        body = {
            "model": "m",
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": called},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}]},
            ],
        }
        rendered = await client.post("/v1/messages/render", body)
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "so"},
            {"role": "tool", "content": "42", "tool_call_id": "t"},
        ]
        chat = await client.post("/v1/chat/completions/render", {"messages": messages, "max_tokens": 1})
        assert rendered["token_ids"] == chat["token_ids"]
        assert rendered["parse_context"]["history_tool_call_cnt"] == 1


async def test_responses_render_from_text_and_from_items() -> None:
    async with serving(OPEN) as client:
        path = "/v1/responses/render"
        chat = await client.post("/v1/chat/completions/render", {"messages": CHAT[:2], "max_tokens": 9})
        for given in (
            "hi",
            [{"role": "user", "content": "hi"}],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        ):
            rendered = await client.post(path, {"input": given, "instructions": "be kind", "max_output_tokens": 9})
            assert rendered["token_ids"] == chat["token_ids"]
            assert rendered["sampling_params"]["max_tokens"] == 9
            assert rendered["request_id"].startswith("resp_")
            assert list(rendered) == list(chat)
        status, refused, _ = await client.ask("POST", path, {"input": "hi", "previous_response_id": "resp_1"})
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        status, refused, _ = await client.ask("POST", path, {"input": [{"type": "image_generation_call"}]})
        assert (status, "items of type" in refused["error"]["message"]) == (400, True)
