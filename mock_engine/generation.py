"""The generation routes: a checked request becomes engine requests, and their answer one body or one stream.

The preset's fixed cost of a request passes once, counted from the receipt of the request, so the time that this
process needs to parse it is inside. A stream's status and headers leave when the engine has accepted the request,
before any token; what is found wrong after that comes as an event in the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from aiohttp import HttpVersion11, web

from mock_engine.bodies import Bodies, ChatBodies, CompletionBodies, error_body
from mock_engine.chat import ChatTemplate, text_of
from mock_engine.driver import Driver
from mock_engine.errors import ConfigError, RequestError
from mock_engine.hashing import Lora
from mock_engine.logprobs import Logprobs
from mock_engine.prompts import answer_tokens, chat_prompt, check_ids, completion_prompts, token_prompt
from mock_engine.protocol import bad_request, clean, parse_chat, parse_completion, parse_generate, read_json
from mock_engine.replica import Replica
from mock_engine.reply import Prompt, Reply
from mock_engine.request import Request, TokenSequence
from mock_engine.request_keys import RECEIVED_US
from mock_engine.sampling import Sampling, check_logprobs, sampling
from mock_engine.streams import Choice
from mock_engine.token_bodies import TokenBodies

SEED_BITS = 63

Kind = type[CompletionBodies] | type[ChatBodies] | type[TokenBodies]


class Generation:
    """Handlers of the routes that generate, for one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def completions(self, request: web.Request) -> web.StreamResponse:
        fields = parse_completion(await self.read(request))
        return await self._answer(request, fields, CompletionBodies)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        fields = parse_chat(await self.read(request))
        return await self._answer(request, fields, ChatBodies)

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        fields = parse_generate(await self.read(request))
        n, seqs = fields["n"], self._replica.config.max_num_seqs
        if n > seqs:
            raise bad_request(f"sampling_params.n must be at most the server's max_num_seqs ({seqs}), got {n}.")
        return await self._answer(request, fields, TokenBodies)

    @staticmethod
    async def read(request: web.Request) -> Any:
        return read_json(await request.read(), request.headers.get("Content-Type", ""))

    def prepare(self, fields: Mapping[str, Any], kind: Kind) -> tuple[str, Lora | None, list[Prompt], list[Sampling]]:
        """(model name for the answer, adapter, prompts, their sampling), or the error; the same for /render."""
        replica, length = self._replica, self._replica.config.max_model_len
        model, lora = replica.models.resolve(fields["model"])
        if kind is ChatBodies:
            prompts = [chat_prompt(fields, replica.tokenizer, self.template_for(fields), length)]
        elif kind is TokenBodies:
            prompts = [token_prompt(fields)]
        else:
            if fields["suffix"] is not None:
                raise bad_request("suffix is not currently supported")
            prompts = completion_prompts(fields, replica.tokenizer, length)
        chosen = [sampling(fields, answer_tokens(fields, prompt, length)) for prompt in prompts]
        return model, lora, prompts, chosen

    def template_for(self, fields: Mapping[str, Any]) -> ChatTemplate:
        """The replica's template, or the one that the request brought if such are trusted."""
        brought = fields["chat_template"] or (fields["chat_template_kwargs"] or {}).get("chat_template")
        if not brought:
            return self._replica.template
        if not self._replica.options.trust_request_chat_template:
            raise bad_request(
                "Chat template is passed with request, but --trust-request-chat-template is not set. "
                "Refused request with untrusted chat template."
            )
        try:
            return ChatTemplate(str(brought))
        except ConfigError as error:
            raise bad_request(str(error)) from error

    async def _answer(self, request: web.Request, fields: dict[str, Any], kind: Kind) -> web.StreamResponse:
        replica = self._replica
        client_id = clean(request.headers.get("X-Request-Id", ""))
        response_id = f"{kind.prefix}{client_id or clean(fields['request_id'] or '') or uuid4().hex[:16]}"
        received_us = request[RECEIVED_US]
        prompt_tokens: int | None = None
        try:
            model, lora, prompts, chosen = self.prepare(fields, kind)
            prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
            if replica.death is not None:
                raise RequestError(500, replica.death, "InternalServerError")
            replica.check_queue(prompt_tokens)
            stream = bool(fields["stream"])
            rank = _rank(request)
            late = self._late_error(prompts, chosen, rank)
            if late is not None and not stream:
                raise late
        except RequestError:
            replica.log.rejected(client_id or response_id, response_id, received_us, prompt_tokens)
            raise
        bodies = _bodies(kind, fields, (response_id, int(time.time()), model, replica.fingerprint))
        reply = self._reply(bodies, prompts, fields, stream, client_id)
        replica.in_flight += 1
        try:
            if late is not None:
                return await self._failed_stream(request, reply, late, kind)
            choices = self._choices(reply, prompts, chosen, fields, request, lora)
            return await self._generate(request, reply, choices, replica.rank_for(rank), received_us, stream)
        finally:
            replica.in_flight -= 1

    def _late_error(self, prompts: list[Prompt], chosen: list[Sampling], rank: int | None) -> RequestError | None:
        """What only the engine finds wrong, in its order."""
        replica = self._replica
        vocab_size = replica.tokenizer.vocab_size
        try:
            for prompt, how in zip(prompts, chosen, strict=True):
                check_logprobs(how, vocab_size)
                replica.rank_for(rank)
                check_ids(prompt, vocab_size, replica.config.max_model_len)
        except RequestError as error:
            return error
        if replica.paused in ("abort", "wait"):
            return RequestError(503, "The server is paused. Resume it to serve requests.", "ServiceUnavailableError")
        return None

    def _reply(
        self, bodies: Bodies, prompts: list[Prompt], fields: Mapping[str, Any], stream: bool, client_id: str
    ) -> Reply:
        options = self._replica.options
        wanted = fields["stream_options"] or {}
        is_chat, is_tokens = isinstance(bodies, ChatBodies), isinstance(bodies, TokenBodies)
        forced = options.enable_force_include_usage and not is_tokens
        caching = self._replica.config.enable_prefix_caching
        return Reply(
            bodies,
            prompts,
            stream=stream,
            echo=bool(fields["echo"]) and not is_chat,
            echo_only=fields["max_tokens"] == 0,
            return_token_ids=is_tokens or bool(fields["return_token_ids"]),
            include_usage=stream and (forced or bool(wanted.get("include_usage"))),
            continuous_usage=forced or bool(wanted.get("continuous_usage_stats")),
            show_details=options.enable_prompt_tokens_details,
            created_blocks_of=self._replica.config.block_size if is_chat and caching else None,
            stream_interval=max(options.stream_interval, fields["stream_interval"] or 1),
            prompt_text=prompts[0].text if fields["return_prompt_text"] else None,
            logprobs=_logprobs(fields, bodies),
            client_id=client_id,
            first_chunk_tokens=options.first_chunk_tokens,
            reasoning_tokens=options.reasoning_tokens if is_chat else 0,
            hide_reasoning=is_chat and not fields["include_reasoning"],
            tell_metrics=options.enable_per_request_metrics,
        )

    def _choices(
        self,
        reply: Reply,
        prompts: list[Prompt],
        chosen: list[Sampling],
        fields: Mapping[str, Any],
        request: web.Request,
        lora: Lora | None,
    ) -> list[Choice]:
        """One engine request a sample. Sample k of a prompt is generated from seed + k."""
        replica, made = self._replica, []
        tokenizer = replica.tokenizer
        xargs = fields["vllm_xargs"] or {}
        session_id = fields["session_id"] or request.headers.get("X-Session-ID") or xargs.get("session_id")
        priority = _integer(request.headers.get("X-Vllm-Priority"))
        for prompt, how in zip(prompts, chosen, strict=True):
            seed = replica.rng.getrandbits(SEED_BITS) if how.seed is None else how.seed
            stop_ids = set(how.stop_token_ids)
            if tokenizer.eos_token_id is not None and not how.ignore_eos:
                stop_ids.add(tokenizer.eos_token_id)
            for sample in range(how.n):
                sequence = TokenSequence(
                    prompt.ids,
                    hasher=replica.hasher,
                    output=tokenizer.answer(seed + sample),
                    cache_salt=fields["cache_salt"],
                    lora=lora,
                    block_size=replica.config.block_size,
                    vocab_size=tokenizer.vocab_size,
                )
                engine_request = Request(
                    request_id=f"{reply.bodies.response_id}-{uuid4().hex[:8]}",
                    sequence=sequence,
                    max_tokens=how.max_tokens,
                    priority=fields["priority"] if priority is None else priority,
                    stop_token_ids=frozenset(stop_ids),
                    min_tokens=how.min_tokens,
                    session_id=None if session_id is None else clean(str(session_id)),
                    skip_cache_read=how.prompt_logprobs is not None,
                    report_full=xargs.get("kv_cache_report_mode") == "full",
                )
                made.append(Choice(reply, prompt, engine_request, sequence, how, tokenizer, request[RECEIVED_US]))
        return made

    async def _generate(
        self,
        request: web.Request,
        reply: Reply,
        choices: list[Choice],
        driver: Driver,
        received_us: int,
        stream: bool,
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        reply.on_end = lambda: None if ended.done() else ended.set_result(None)
        if not stream:
            self._replica.faults.spoil_whole(request, reply)
        replica = self._replica
        try:
            await self._fixed_cost(received_us)
            try:
                self._submit(driver, choices, received_us)
            except RequestError:
                prompt_tokens = sum(len(prompt.ids) for prompt in reply.prompts)
                replica.log.rejected(reply.client_id, reply.bodies.response_id, received_us, prompt_tokens)
                raise
            replica.note_loras()
            response = await self._open_stream(request, reply) if stream else None
            await ended
            replica.note_loras()
            if response is not None:
                await response.write_eof()
                return response
            if reply.error is not None:
                raise RequestError(500, reply.error["error"]["message"], "InternalServerError")
            return self._whole(request, reply)
        except (asyncio.CancelledError, ConnectionError):
            reply.detach()
            for choice in choices:
                replica.dropped(choice)
            raise

    async def _fixed_cost(self, received_us: int) -> None:
        """Waits until the request's fixed cost has passed since its receipt."""
        clock = self._replica.clock
        at_us = received_us + self._replica.preset.request_fixed_us
        if clock.now_us() < at_us:
            loop = asyncio.get_running_loop()
            passed: asyncio.Future[None] = loop.create_future()
            timer = loop.call_at(clock.loop_time(at_us), _set, passed)
            try:
                await passed
            finally:
                timer.cancel()

    def _submit(self, driver: Driver, choices: list[Choice], received_us: int) -> None:
        at_us = received_us + self._replica.preset.request_fixed_us
        done: list[Choice] = []
        try:
            for choice in choices:
                driver.submit(choice, at_us)
                done.append(choice)
        except RequestError:
            for choice in done:
                driver.drop(choice)
            raise

    async def _open_stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chunked = request.version >= HttpVersion11
        if chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before its stream began")
        write = self._replica.faults.spoiled(request, reply, _writer(transport, chunked))
        reply.open_stream(write, transport.get_write_buffer_size)
        return response

    async def _failed_stream(
        self, request: web.Request, reply: Reply, error: RequestError, kind: Kind
    ) -> web.StreamResponse:
        prompt_tokens = sum(len(prompt.ids) for prompt in reply.prompts)
        self._replica.log.rejected(reply.client_id, reply.bodies.response_id, request[RECEIVED_US], prompt_tokens)
        response = await self._open_stream(request, reply)
        body = _error_of(error)
        if error.status == 503 and kind is ChatBodies:
            body["error"]["type"] = "InternalServerError"
        reply.fail(body)
        await response.write_eof()
        return response

    def _whole(self, request: web.Request, reply: Reply) -> web.Response:
        headers = {}
        wanted = request.headers.get("endpoint-load-metrics-format", "").upper()
        if wanted in ("JSON", "TEXT"):
            headers["endpoint-load-metrics"] = self._replica.metrics.load(wanted)
        return web.Response(body=reply.body(), content_type="application/json", headers=headers)


def _error_of(error: RequestError) -> dict[str, Any]:
    return error_body(error.message, error.type, error.param, error.status)


def _bodies(kind: Kind, fields: Mapping[str, Any], head: tuple[str, int, str, str]) -> Bodies:
    """`head` is response id, creation, model and fingerprint."""
    if kind is TokenBodies:
        return TokenBodies(*head, text=fields["output_mode"] == "text", show_prompt=bool(fields["return_token_ids"]))
    if kind is not ChatBodies:
        return kind(*head)
    last = fields["messages"][-1]
    role = "assistant" if fields["add_generation_prompt"] else last["role"]
    continued = text_of(last.get("content")) if fields["echo"] and last["role"] == role else ""
    return ChatBodies(*head, role, continued)


def _logprobs(fields: Mapping[str, Any], bodies: Bodies) -> Logprobs | None:
    as_ids = bool(fields["return_tokens_as_token_ids"])
    if isinstance(bodies, ChatBodies):
        return Logprobs("chat", fields["top_logprobs"] or 0, as_ids) if fields["logprobs"] else None
    asked = fields["logprobs"]
    if asked is None:
        return None
    if isinstance(bodies, TokenBodies):
        return Logprobs("chat" if fields["output_mode"] == "text" else "ids", max(1, asked), as_ids)
    return Logprobs("completion", asked, as_ids)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _rank(request: web.Request) -> int | None:
    return _integer(request.headers.get("X-data-parallel-rank"))


def _writer(transport: asyncio.WriteTransport, chunked: bool) -> Callable[[bytes], None]:
    """Sends each event in one write, framed as one chunk of HTTP/1.1's chunked coding if `chunked`. What comes after
    the client has gone, before its handler learns of it, is dropped."""
    write, closing = transport.write, transport.is_closing

    def write_chunk(data: bytes) -> None:
        if not closing():
            write(b"%x\r\n%b\r\n" % (len(data), data))

    def write_plain(data: bytes) -> None:
        if not closing():
            write(data)

    return write_chunk if chunked else write_plain
