"""The reverse proxy: takes a request, asks the policy, and passes bytes on as they come.

Law: what a replica sends reaches the client at once, unchanged and in the same pieces; a request occupies its replica
in the ledger exactly from the decision until its last byte, its failure or the client's leaving. The odd thing: only
requests that generate go through the policy (any POST that is not a known tool route, so that token-in endpoints
count as load too), everything else goes to the next replica in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from routers.body import GenerationBody, cut_body, read_body
from routers.breaker import Breaker
from routers.errors import BrokenError, NoReplica, RefusedError, UpstreamError
from routers.faults import NO_FAULTS, RouterFaults
from routers.prompts import Prompt
from routers.requestlog import RequestLog
from routers.router import Router
from routers.tokens import TokenSource, text_prompt
from routers.upstream import as_upstream_error, request_headers, response_headers, send
from routers.view import Decision, Signal, TurnView

CLIENT_LEFT = 499  # logged, never sent: nobody is there to read it

# POST routes of vLLM that generate nothing, by their last part.
_TOOL_ROUTES = frozenset(
    {
        "abort_requests",
        "detokenize",
        "load_lora_adapter",
        "pause",
        "ping",
        "render",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume",
        "sleep",
        "tokenize",
        "unload_lora_adapter",
        "wake_up",
    }
)


def generates(method: str, path: str) -> bool:
    """Whether a request is load that the policy places."""
    return (
        method == "POST" and path.rstrip("/").rpartition("/")[2] not in _TOOL_ROUTES and not path.startswith("/mock/")
    )


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True):
    session_header: str = "X-Session-ID"  # as vLLM reads it
    retry_refused: bool = True  # one more replica, if no connection came about and nothing reached the client
    faults: RouterFaults = NO_FAULTS


class _Life(msgspec.Struct):
    """The log's row of one request, filled as it goes."""

    request_id: str
    received_us: int
    session_id: str | None = None
    prompt_tokens: int | None = None
    decision: Decision | None = None
    routed_us: int | None = None
    sent_us: int | None = None
    first_byte_us: int | None = None
    status: int | None = None
    error: str | None = None
    attempts: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None


class Proxy:
    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        tokens: TokenSource,
        log: RequestLog,
        now_us: Callable[[], int],
        config: ProxyConfig | None = None,
    ) -> None:
        self.router = router
        self.lora_names: set[str] = set()
        self.config = config or ProxyConfig()
        self.client_left = 0
        self.refused = 0
        self.broken = 0
        self._session = session
        self._tokens = tokens
        self._log = log
        self._now_us = now_us
        self._wants_progress = router.wants_progress
        self._in_turn = itertools.count()
        self._session_key = self.config.session_header.lower()
        strikes = self.config.faults.breaker_on_client_errors
        self._breaker = Breaker(strikes) if strikes is not None else None
        self._text_join: str = getattr(router.policy, "text_join", "\n")

    # -- generation: through the policy --------------------------------------------------------------------------

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        given_id = request.headers.get("X-Request-Id")
        life = _Life(given_id or uuid.uuid4().hex, self._now_us())
        key: str | None = None
        try:
            body = await self._read(request)
            turn = await self._turn(request, body, life)
            headers = request_headers(request.raw_headers)
            if given_id is None:
                headers["X-Request-Id"] = life.request_id  # so that both ends write the same id
            tried: set[str] = set()
            while True:
                shut = self._breaker.open(self._now_us()) if self._breaker is not None else set()
                decision = self.router.route(turn, self._now_us(), exclude=tried | shut)
                key = turn.request_id
                life.decision, life.routed_us = decision, self._now_us()
                life.attempts += 1
                try:
                    upstream = await self._send(request, decision.replica, headers, body, life)
                except RefusedError as error:
                    self.refused += 1
                    self.router.failed(key, self._now_us())
                    key = None
                    tried.add(decision.replica)
                    if not self.config.retry_refused or len(tried) > 1 or not self.router.fleet(0, tried).replicas:
                        return self._bad_gateway(decision.replica, error, life)
                except UpstreamError as error:
                    self.broken += 1
                    return self._bad_gateway(decision.replica, error, life)
                else:
                    response = await self._relay(request, upstream, key, life)
                    if self._breaker is not None:
                        if upstream.status >= 400:
                            self._breaker.failed(decision.replica, self._now_us())
                        else:
                            self._breaker.served(decision.replica)
                    if life.error is None and upstream.status < 500:
                        self.router.finished(key, life.output_tokens, self._now_us(), cached_tokens=life.cached_tokens)
                        key = None
                    return response
        except NoReplica as error:
            life.error = str(error)
            return self._refuse(503, f"router: {error}", "ServiceUnavailableError", life)
        except (asyncio.CancelledError, ConnectionError):
            self.client_left += 1
            life.status, life.error = CLIENT_LEFT, "client left before the answer ended"
            raise
        except Exception as error:
            life.error = f"router failed: {type(error).__name__}: {error}"
            if life.status is not None:
                raise  # the answer has begun, it can only be cut short
            return self._refuse(500, f"router: {type(error).__name__}: {error}", "InternalServerError", life)
        finally:
            if key is not None:
                self.router.failed(key, self._now_us())
            self._write_log(life)

    async def _turn(self, request: web.BaseRequest, raw: bytes, life: _Life) -> TurnView:
        needs = self.router.needs
        session_id = request.headers.get(self._session_key)
        body: GenerationBody | None = None
        if Signal.TOKENS in needs or Signal.TEXT in needs or (Signal.SESSION_ID in needs and session_id is None):
            body = read_body(raw)
        kept = self.config.faults.body_truncate_bytes
        if kept is not None and body is not None:
            body = cut_body(body, raw, kept)
        prompt: Prompt | None = None
        if Signal.TOKENS in needs:
            prompt = await self._tokens.prompt(body, self._ask_url(), self.lora_names)
            life.prompt_tokens = prompt.tokens if prompt is not None else None
        elif Signal.TEXT in needs:
            prompt = text_prompt(body, self._text_join)
        if session_id is None and body is not None:
            session_id = body.session_id
        life.session_id = session_id
        # Clients may send one id twice at a time; the ledger needs them apart.
        key = life.request_id if not self.router.knows(life.request_id) else f"{life.request_id}#{uuid.uuid4().hex}"
        return TurnView(
            request_id=key,
            session_id=session_id,
            prompt=prompt,
            priority=(body.priority or 0) if body is not None else 0,
            max_tokens=(body.max_completion_tokens or body.max_tokens) if body is not None else None,
            model=body.model if body is not None else None,
            headers={name.lower(): value for name, value in request.headers.items()},
            path=request.path,
        )

    async def _send(
        self, request: web.BaseRequest, replica: str, headers: CIMultiDict[str], body: bytes, life: _Life
    ) -> aiohttp.ClientResponse:
        url = self.router.url(replica)
        if url is None:
            raise RefusedError(f"replica {replica} has no URL")
        life.sent_us = self._now_us()
        return await send(self._session, request.method, url, _target(request), headers, body)

    async def _relay(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, key: str | None, life: _Life | None
    ) -> web.StreamResponse:
        """Pass the answer on piece by piece. A replica that breaks off leaves the client a broken answer, too."""
        try:
            response = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=response_headers(upstream.raw_headers)
            )
            if life is not None:
                life.status = upstream.status
            await response.prepare(request)
            write, next_chunk = response.write, upstream.content.readany
            streamed = 0
            before = last = b""
            while True:
                try:
                    chunk = await next_chunk()
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    return self._break_off(request, response, as_upstream_error(error), life)
                if not chunk:
                    break
                if key is not None:
                    if life is not None and life.first_byte_us is None:
                        now_us = life.first_byte_us = self._now_us()
                        if upstream.status < 400:
                            self.router.first_token(key, now_us)
                    if self._wants_progress:
                        streamed = self._progress(key, chunk, streamed)
                    before, last = last, chunk
                await write(chunk)
            await response.write_eof()
            if life is not None and self._wants_progress:
                life.output_tokens = streamed
            if life is not None and life.decision is not None and life.decision.believed_hit_tokens is not None:
                life.cached_tokens = cached_tokens(before + last)
            return response
        finally:
            if upstream.content.at_eof():
                upstream.release()
            else:
                upstream.close()  # at once, so that the engine aborts the request

    def _progress(self, key: str, chunk: bytes, before: int) -> int:
        """Output tokens so far, one per event that carries a choice; exact when a replica sends one token an event."""
        tokens = before + chunk.count(b"data: {") - chunk.count(b'"choices":[]')
        if tokens > before:
            self.router.progress(key, tokens, self._now_us())
        return tokens

    def _break_off(
        self, request: web.BaseRequest, response: web.StreamResponse, error: UpstreamError, life: _Life | None
    ) -> web.StreamResponse:
        self.broken += 1
        if life is not None:
            life.error = f"replica broke off: {error}"
        if request.transport is not None:
            request.transport.close()  # without the closing chunk: an answer cut short must not look whole
        return response

    # -- everything else: the next replica in turn -----------------------------------------------------------------

    async def pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request)
        headers = request_headers(request.raw_headers)
        error: UpstreamError | None = None
        for url in self._urls_in_turn():
            try:
                upstream = await send(self._session, request.method, url, _target(request), headers, body)
            except RefusedError as refused:
                self.refused += 1
                error = refused
                continue
            except BrokenError as broken:
                self.broken += 1
                return error_response(502, f"router: the replica at {url} failed: {broken}", "BadGatewayError")
            return await self._relay(request, upstream, None, None)
        if error is None:
            return error_response(503, "router: no replica is in the fleet: add one", "ServiceUnavailableError")
        return error_response(502, f"router: no replica took the request: {error}", "BadGatewayError")

    def _urls_in_turn(self) -> list[str]:
        views = self.router.replicas()
        urls = [view.url for view in views if view.url and not view.draining] or [v.url for v in views if v.url]
        if not urls:
            return []
        first = next(self._in_turn) % len(urls)
        return urls[first:] + urls[:first]

    def _ask_url(self) -> str | None:
        urls = self._urls_in_turn()
        return urls[0] if urls else None

    # -- small things --------------------------------------------------------------------------------------------------

    async def _read(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await request.read()

    def _bad_gateway(self, replica: str, error: UpstreamError, life: _Life) -> web.Response:
        life.error = f"replica {replica}: {error}"
        return self._refuse(502, f"router: replica {replica} failed: {error}", "BadGatewayError", life)

    def _refuse(self, status: int, message: str, kind: str, life: _Life) -> web.Response:
        life.status = status
        return error_response(status, message, kind)

    def _write_log(self, life: _Life) -> None:
        decision = life.decision
        self._log.add(
            {
                "request_id": life.request_id,
                "session_id": life.session_id,
                "replica": decision.replica if decision is not None else None,
                "reason": decision.reason if decision is not None else None,
                "rule": decision.rule if decision is not None else None,
                "believed_hit_tokens": decision.believed_hit_tokens if decision is not None else None,
                "received_us": life.received_us,
                "routed_us": life.routed_us,
                "sent_us": life.sent_us,
                "first_byte_us": life.first_byte_us,
                "ended_us": self._now_us(),
                "status": life.status,
                "error": life.error,
                "prompt_tokens": life.prompt_tokens,
                "attempts": life.attempts,
                "scores": decision.scores if decision is not None else None,
                "cached_tokens": life.cached_tokens,
            }
        )


_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_USAGE_BYTES = 4096  # the end of an answer, where its usage stands


def cached_tokens(end: bytes) -> int | None:
    """What the end of an answer, streamed or not, says was served from the cache; None where it says nothing."""
    found = _CACHED.findall(end[-_USAGE_BYTES:])
    return int(found[-1]) if found else None


def _target(request: web.BaseRequest) -> str:
    """Path and query byte for byte; of a target in absolute form (as to a forward proxy) what follows the host."""
    raw = request.raw_path
    return raw if raw.startswith("/") else request.rel_url.raw_path_qs


def error_response(status: int, message: str, kind: str) -> web.Response:
    """An error in vLLM's shape, whose message begins with `router:`, and a header that says so, too."""
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"X-Routebench-Router-Error": kind},
    )
