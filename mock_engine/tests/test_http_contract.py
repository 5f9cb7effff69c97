"""Routes, headers and bodies of section A of the contract, against a server in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from mock_engine import FIRST_TOKEN_ID, generated_token_ids
from mock_engine.tests.serving import SHORT, serving
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()


async def test_a_request_that_carries_a_seed_gets_the_documented_ids() -> None:
    async with serving() as client:
        answer = await client.post(
            "/v1/completions", {**SHORT, "max_tokens": 20, "seed": 2**62, "return_token_ids": True}
        )
        assert answer["choices"][0]["token_ids"] == generated_token_ids(2**62, 0, 20)
        assert answer["choices"][0]["text"] == WORDS.decode(generated_token_ids(2**62, 0, 20))


async def test_samples_of_one_prompt_differ_and_keep_their_index() -> None:
    async with serving() as client:
        answer = await client.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 1})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[0] != texts[1]
        assert texts[:2] == texts[2:]
        assert answer["usage"]["completion_tokens"] == 12


async def test_an_answer_sent_back_as_text_is_found_in_the_cache() -> None:
    async with serving("--enable-prompt-tokens-details") as client:
        ask = {"prompt": "once upon a time there was", "max_tokens": 60}
        first = await client.post("/v1/completions", ask)
        again = {"prompt": ask["prompt"] + first["choices"][0]["text"] + " and", "max_tokens": 1}
        usage = (await client.post("/v1/completions", again))["usage"]
        # All full blocks that the first request computed: its last token never was.
        assert usage["prompt_tokens_details"]["cached_tokens"] == (26 + 59) // 16 * 16


async def test_a_chat_history_is_found_in_the_cache() -> None:
    async with serving("--enable-prompt-tokens-details") as client:
        messages = [{"role": "user", "content": "hello " * 10}]
        first = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
        known = first["usage"]["prompt_tokens"] + 39
        messages += [
            {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
            {"role": "user", "content": "go on"},
        ]
        usage = (await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


async def test_tokenize_and_render_agree_with_what_is_computed() -> None:
    async with serving("--enable-scale-out") as client:
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        tokens = (await client.post("/tokenize", chat))["tokens"]
        rendered = await client.post("/v1/chat/completions/render", chat)
        answer = await client.post("/v1/chat/completions", {**chat, "return_token_ids": True})
        assert tokens == rendered["token_ids"] == answer["prompt_token_ids"]
        assert (await client.post("/detokenize", {"tokens": tokens}))["prompt"] == "<|user|>hello<|end|><|assistant|>"


async def test_render_shows_offsets_and_one_row_a_prompt() -> None:
    async with serving("--enable-scale-out") as client:
        rows = await client.post(
            "/v1/completions/render", {"prompt": ["ab", "c"], "return_token_offsets": True, "request_id": "r"}
        )
        assert [row["request_id"] for row in rows] == ["cmpl-r-0", "cmpl-r-1"]
        assert rows[0]["token_offsets"] == [[0, 1], [1, 2]]


async def test_render_is_closed_without_its_flag_whatever_the_body() -> None:
    async with serving() as client:
        for path in ("/v1/completions/render", "/v1/chat/completions/render", "/inference/v1/generate"):
            status, body, _ = await client.ask("POST", path, {})
            assert status == 403
            assert body["error"]["type"] == "PermissionDeniedError"


async def test_an_unknown_token_id_is_an_event_in_a_stream_and_a_400_otherwise() -> None:
    async with serving() as client:
        ask = {"prompt": [5, 10**6], "max_tokens": 1}
        status, body, _ = await client.ask("POST", "/v1/completions", ask)
        assert (status, body["error"]["code"]) == (400, 400)
        error, done = await client.events(ask)
        assert error["error"]["message"] == "Token id 1000000 is out of vocabulary"
        assert done == "[DONE]"


async def test_a_request_that_can_never_fit_the_cache_is_refused_before_its_stream() -> None:
    async with serving("--num-gpu-blocks-override", "4") as client:
        for stream in (False, True):
            status, body, _ = await client.ask(
                "POST", "/v1/completions", {"prompt": [5] * 300, "max_tokens": 1, "stream": stream}
            )
            assert status == 400
            assert (body["error"]["type"], body["error"]["param"]) == ("BadRequestError", "prompt")
            assert "needs 19 KV cache blocks" in body["error"]["message"]
            assert "only 3" in body["error"]["message"]
        assert await client.post("/v1/completions", SHORT)


async def test_every_answer_has_the_servers_headers() -> None:
    async with serving() as client:
        for method, path in (("GET", "/health"), ("GET", "/nope"), ("POST", "/v1/completions")):
            _, _, answer = await client.ask(method, path, None if method == "GET" else {})
            assert answer.headers["server"] == "uvicorn"
            assert answer.headers["vary"] == "Origin"
            assert "date" in answer.headers
            assert "x-request-id" not in answer.headers


async def test_request_ids_are_echoed_or_made_when_asked_for() -> None:
    async with serving("--enable-request-id-headers") as client:
        _, body, answer = await client.ask("POST", "/v1/completions", SHORT, **{"X-Request-Id": "abc"})
        assert (answer.headers["x-request-id"], body["id"]) == ("abc", "cmpl-abc")
        _, _, answer = await client.ask("GET", "/health")
        assert len(answer.headers["x-request-id"]) == 32
        _, body, _ = await client.ask("POST", "/v1/completions", {**SHORT, "request_id": "mine"})
        assert body["id"] == "cmpl-mine"


async def test_the_api_key_guards_v1_and_nothing_else() -> None:
    async with serving("--api-key", "k1", "k2") as client:
        status, body, answer = await client.ask("GET", "/v1/models")
        assert (status, body) == (401, {"error": "Unauthorized"})
        assert "vary" not in answer.headers
        assert (await client.ask("GET", "/v1/models", Authorization="Bearer k2"))[0] == 200
        assert (await client.ask("GET", "/v1/models", Authorization="bearer k1"))[0] == 200
        assert (await client.ask("GET", "/v1/models", Authorization="Basic k1"))[0] == 401
        assert (await client.ask("GET", "/metrics"))[0] == 200


async def test_a_rank_is_chosen_by_header_and_must_exist() -> None:
    async with serving("--data-parallel-size", "2") as client:
        for rank in ("0", "1", "1"):
            await client.ask("POST", "/v1/completions", SHORT, **{"X-data-parallel-rank": rank})
        assert [driver.snapshot().finished for driver in client.replica.drivers] == [1, 2]
        status, body, _ = await client.ask("POST", "/v1/completions", SHORT, **{"X-data-parallel-rank": "2"})
        assert (status, body["error"]["message"]) == (400, "data_parallel_rank 2 is out of range [0, 2).")
        assert (await client.ask("POST", "/v1/completions", SHORT, **{"X-data-parallel-rank": "x"}))[0] == 200
        streamed = await client.post("/v1/completions", {**SHORT, "stream": True}, **{"X-data-parallel-rank": "2"})
        assert streamed.startswith('data: {"error": {"message": "data_parallel_rank 2 is out of range')


async def test_load_is_counted_only_with_its_flag() -> None:
    for flags, load in (((), 0), (("--enable-server-load-tracking",), 1)):
        async with serving(*flags) as client:
            task = await client.started({})
            assert await client.get("/load") == {"server_load": load}
            task.cancel()


async def test_load_metrics_ride_on_answers_that_ask_for_them() -> None:
    async with serving() as client:
        _, _, answer = await client.ask("POST", "/v1/completions", SHORT, **{"endpoint-load-metrics-format": "TEXT"})
        told = answer.headers["endpoint-load-metrics"]
        assert told.startswith("TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=")
        _, _, answer = await client.ask("POST", "/v1/completions", SHORT, **{"endpoint-load-metrics-format": "json"})
        told = answer.headers["endpoint-load-metrics"]
        assert set(json.loads(told.removeprefix("JSON "))["named_metrics"]) == {
            "num_requests_waiting",
            "kv_cache_usage_perc",
        }


async def test_usage_is_forced_into_every_stream_by_its_flag() -> None:
    async with serving("--enable-force-include-usage") as client:
        *chunks, used, _ = await client.events(SHORT)
        assert used["usage"]["completion_tokens"] == 2
        assert all("usage" in chunk for chunk in chunks)


async def test_a_served_interval_bounds_the_asked_one_from_below() -> None:
    async with serving("--stream-interval", "4") as client:
        chunks = await client.events({"prompt": "x", "max_tokens": 9, "stream_interval": 2, "return_token_ids": True})
        assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-1]] == [1, 4, 4]


async def test_stop_strings_and_stop_tokens_end_an_answer_early() -> None:
    async with serving() as client:
        ids = generated_token_ids(3, 0, 10)
        ask = {"prompt": "x", "max_tokens": 10, "seed": 3}
        by_token = (await client.post("/v1/completions", {**ask, "stop_token_ids": [ids[4]]}))["choices"][0]
        assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", ids[4])
        assert by_token["text"] == WORDS.decode(ids[:4])
        word = WORDS.decode([ids[6]]).strip()
        answer = await client.post("/v1/completions", {**ask, "stop": word})
        assert answer["choices"][0]["text"] == WORDS.decode(ids[:6]) + " "
        assert answer["choices"][0]["stop_reason"] == word
        assert answer["usage"]["completion_tokens"] == 7
        assert await client.metric('vllm:request_success_total{engine="0",finished_reason="stop"') == 2
        assert client.replica.drivers[0].snapshot().used_blocks == 0


async def test_echo_shows_the_prompt_as_text() -> None:
    async with serving() as client:
        ids = [FIRST_TOKEN_ID, FIRST_TOKEN_ID + 1]
        answer = await client.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "echo": True, "seed": 1})
        assert answer["choices"][0]["text"] == WORDS.decode(ids + generated_token_ids(1, 0, 1))
        only = await client.post("/v1/completions", {"prompt": "abc", "max_tokens": 0, "echo": True})
        assert only["choices"][0]["text"] == "abc"


async def test_adapters_have_cards_answer_under_their_name_and_change_only_when_allowed() -> None:
    async with serving("--lora-modules", "ad1=/adapters/ad1") as client:
        card = (await client.get("/v1/models"))["data"][1]
        assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == ("ad1", "/adapters/ad1", "m", None)
        assert (await client.post("/v1/completions", {**SHORT, "model": "ad1"}))["model"] == "ad1"
        assert "vllm:lora_requests_info" in await client.get("/metrics")
        assert (await client.ask("POST", "/v1/load_lora_adapter", {}))[0] == 404
    async with serving(env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as client:
        new = {"lora_name": "ad2", "lora_path": "/x"}
        assert "added" in await client.post("/v1/load_lora_adapter", new)
        status, body, _ = await client.ask("POST", "/v1/load_lora_adapter", new)
        assert (status, body["error"]["type"]) == (400, "InvalidUserInput")
        assert "removed" in await client.post("/v1/unload_lora_adapter", {"lora_name": "ad2"})
        assert (await client.ask("POST", "/v1/completions", {**SHORT, "model": "ad2"}))[0] == 404


async def test_development_routes_are_absent_in_production() -> None:
    async with serving() as client:
        for method, path in (
            ("GET", "/is_paused"),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/sleep"),
            ("GET", "/server_info"),
        ):
            assert (await client.ask(method, path))[0] == 404


async def test_a_trusted_request_may_bring_its_own_template() -> None:
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "chat_template": "<<{{ messages[0].content }}>>",
    }
    async with serving() as client:
        status, body, _ = await client.ask("POST", "/v1/chat/completions", chat)
        assert (status, body["error"]["type"]) == (400, "BadRequestError")
    async with serving("--trust-request-chat-template") as client:
        answer = await client.post("/v1/chat/completions", {**chat, "return_prompt_text": True})
        assert answer["prompt_text"] == "<<hi>>"
        status, body, _ = await client.ask("POST", "/v1/chat/completions", {**chat, "chat_template": "{% for %}"})
        assert status == 400


async def test_what_a_text_model_cannot_do_is_refused() -> None:
    async with serving() as client:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
        for path, body in (
            ("/v1/chat/completions", {"messages": [image]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}),
            ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ):
            status, found, _ = await client.ask("POST", path, body)
            assert (status, found["error"]["type"], found["error"]["param"]) == (400, "BadRequestError", None), body


async def test_a_conversation_may_come_already_tokenised() -> None:
    async with serving() as client:
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1,
            "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]},
        }
        assert (await client.post("/v1/chat/completions", chat))["usage"]["prompt_tokens"] == 3


async def test_a_prompt_can_be_truncated_on_either_side() -> None:
    async with serving() as client:
        ask = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
        kept = (await client.post("/v1/completions", ask))["choices"][0]["prompt_token_ids"]
        assert kept == [7, 8]
        kept = (await client.post("/v1/completions", {**ask, "truncation_side": "right"}))["choices"][0][
            "prompt_token_ids"
        ]
        assert kept == [5, 6]


async def test_names_that_utf8_cannot_carry_harm_neither_the_engine_nor_its_logs(tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}
    flags = ("--kv-events-config", json.dumps(events), "--mock-log-dir", str(tmp_path), "--enable-request-id-headers")
    async with serving(*flags) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base.rpartition(":")[2]))
        body = json.dumps(
            {"prompt": [5] * 20, "max_tokens": 2, "session_id": "\ud800", "request_id": "\ud800"}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        for field in ("cache_salt", "model"):
            assert (await client.ask("POST", "/v1/completions", {**SHORT, field: "\ud800"}))[0] in (400, 404)
        assert (await client.post("/v1/completions", {**SHORT, "stop": "\ud800"}))["choices"]
        assert (await client.ask("GET", "/health"))[0] == 200
