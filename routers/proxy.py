"""The reverse proxy: takes a request, asks the policy, and passes bytes on as they come.

Law: what a replica sends reaches the client at once, unchanged and in the same pieces; a request occupies its replica
in the ledger exactly from the decision until its last byte, its failure or the client's leaving. While the client has
got nothing, a replica that takes no connection or breaks it costs a try elsewhere, each replica once. The odd thing:
only requests that generate go through the policy (any POST that is not a known tool route, so that token-in endpoints
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

from routers.body import GenerationBody, cut_body, output_limit, read_body
from routers.down import RETRIES_MAX
from routers.errors import NoReplica, OptionError, RefusedError, UpstreamError
from routers.faults import NO_FAULTS, RouterFaults
from routers.health import Health
from routers.prompts import Prompt
from routers.requestlog import Life, RequestLog
from routers.router import Router
from routers.tokens import TokenSource, text_prompt
from routers.upstream import as_upstream_error, plain, request_headers, response_headers, send
from routers.view import Decision, ReplicaView, Signal, TurnView

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
    retries_max: int = RETRIES_MAX  # other replicas to try while nothing has reached the client
    faults: RouterFaults = NO_FAULTS


class Proxy:
    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        tokens: TokenSource,
        log: RequestLog,
        health: Health,
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
        self._health = health
        self._now_us = now_us
        self._wants_progress = router.wants_progress
        self._turn_number = itertools.count()
        self._session_key = self.config.session_header.lower()
        self._text_join: str = getattr(router.policy, "text_join", "\n")

    # -- generation: through the policy --------------------------------------------------------------------------

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        given_id = request.headers.get("X-Request-Id")
        life = Life(plain(given_id) if given_id else uuid.uuid4().hex, self._now_us())
        key: str | None = None
        try:
            body = await self._read(request)
            turn = await self._turn(request, body, life)
            headers = request_headers(request.raw_headers)
            if given_id is None:
                headers["X-Request-Id"] = life.request_id  # so that both ends write the same id
            tried: set[str] = set()
            while True:
                decision = await self._place(turn, tried)
                key = turn.request_id
                life.decision, life.routed_us = decision, self._now_us()
                life.attempts += 1
                try:
                    upstream = await self._send(request, decision.replica, headers, body, life)
                except UpstreamError as error:
                    self._lost(decision.replica, error)
                    self.router.failed(key, self._now_us())
                    key = None
                    tried.add(decision.replica)
                    if len(tried) > self.config.retries_max or not self.router.fleet(self._now_us(), tried).replicas:
                        return self._bad_gateway(decision.replica, error, life)
                else:
                    response = await self._relay(request, upstream, decision.replica, key, life)
                    if life.error is None:
                        self._end(key, upstream.status, life)
                        key = None
                    return response
        except web.RequestPayloadError as error:
            life.error, life.status = f"body cannot be read: {error}", 400
            raise
        except OptionError as error:
            life.error = str(error)
            return self._refuse(400, f"router: {error}", "BadRequestError", life)
        except NoReplica as error:
            life.error = str(error)
            return self._refuse(503, f"router: {error}", "ServiceUnavailableError", life)
        except (asyncio.CancelledError, ConnectionError):
            self.client_left += 1
            life.status, life.error = CLIENT_LEFT, "client left before the answer ended"
            raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever a policy raises, to exit included, is this request's fault alone
            life.error = f"router failed: {type(error).__name__}: {error}"
            if life.status is not None:
                raise  # the answer has begun, it can only be cut short
            return self._refuse(500, f"router: {type(error).__name__}: {error}", "InternalServerError", life)
        finally:
            if key is not None:
                self.router.failed(key, self._now_us())
            self._log.add(life.row(self._now_us()))

    async def _place(self, turn: TurnView, exclude: set[str]) -> Decision:
        """At once, or when the policy lets the turn go."""
        if not self.router.may_hold:
            return self.router.route(turn, self._now_us(), exclude=exclude)
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

        def placed(found: Decision | NoReplica) -> None:
            if isinstance(found, NoReplica):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        self.router.submit(turn, self._now_us(), placed, exclude=exclude)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self.router.knows(turn.request_id):  # waiting, or placed in the very moment in which the client left
                self.router.failed(turn.request_id, self._now_us())
            elif answer.done():
                answer.exception()  # seen, though nobody is there to hear it
            raise

    async def _turn(self, request: web.BaseRequest, raw: bytes, life: Life) -> TurnView:
        needs = self.router.needs
        headers = {name.lower(): plain(value) for name, value in request.headers.items()}
        session_id = headers.get(self._session_key)
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
            max_tokens=output_limit(body) if body is not None else None,
            model=body.model if body is not None else None,
            headers=headers,
            path=request.path,
        )

    async def _send(
        self, request: web.BaseRequest, replica: str, headers: CIMultiDict[str], body: bytes, life: Life
    ) -> aiohttp.ClientResponse:
        url = self.router.url(replica)
        if url is None:
            raise RefusedError(f"replica {replica} has no URL")
        life.sent_us = self._now_us()
        return await send(self._session, request.method, url, _target(request), headers, body)

    def _end(self, key: str, status: int, life: Life) -> None:
        """A whole answer was passed on."""
        if status < 400:
            self.router.finished(key, life.output_tokens, self._now_us(), cached_tokens=life.cached_tokens)
        else:
            self.router.refused(key, self._now_us(), status)

    def _lost(self, replica: str, error: UpstreamError) -> None:
        """A replica that gave no answer."""
        if isinstance(error, RefusedError):
            self.refused += 1
        else:
            self.broken += 1
        self._health.broken(replica, error)

    async def _relay(
        self,
        request: web.BaseRequest,
        upstream: aiohttp.ClientResponse,
        replica: str,
        key: str | None,
        life: Life | None,
    ) -> web.StreamResponse:
        """Pass the answer on piece by piece. A replica that breaks off leaves the client a broken answer, too."""
        try:
            response = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=response_headers(upstream.raw_headers)
            )
            if life is not None:
                life.status = upstream.status
            if upstream.status < 500:
                self._health.answered(replica)
            await response.prepare(request)
            write, next_chunk = response.write, upstream.content.readany
            streamed = 0
            before = last = b""
            while True:
                try:
                    chunk = await next_chunk()
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    self._health.doubted(replica, lost := as_upstream_error(error))
                    return self._break_off(request, response, lost, life)
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
        self, request: web.BaseRequest, response: web.StreamResponse, error: UpstreamError, life: Life | None
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
        for view in self._in_turn():
            assert view.url is not None
            try:
                upstream = await send(self._session, request.method, view.url, _target(request), headers, body)
            except UpstreamError as lost:
                self._lost(view.name, lost)
                if not isinstance(lost, RefusedError):  # it may have been done
                    return error_response(502, f"router: the replica at {view.url} failed: {lost}", "BadGatewayError")
                error = lost
                continue
            return await self._relay(request, upstream, view.name, None, None)
        if error is None:
            return error_response(503, "router: no replica is in the fleet: add one", "ServiceUnavailableError")
        return error_response(502, f"router: no replica took the request: {error}", "BadGatewayError")

    def _in_turn(self) -> list[ReplicaView]:
        """Those with a URL, the next one first; draining ones, and those that are down, only for want of others."""
        views = [view for view in self.router.replicas() if view.url]
        staying = [view for view in views if not view.draining] or views
        found = [view for view in staying if view.name not in self.router.down] or staying
        first = next(self._turn_number) % len(found) if found else 0
        return found[first:] + found[:first]

    def _ask_url(self) -> str | None:
        views = self._in_turn()
        return views[0].url if views else None

    # -- small things --------------------------------------------------------------------------------------------------

    async def _read(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await request.read()

    def _bad_gateway(self, replica: str, error: UpstreamError, life: Life) -> web.Response:
        life.error = f"replica {replica}: {error}"
        return self._refuse(502, f"router: replica {replica} failed: {error}", "BadGatewayError", life)

    def _refuse(self, status: int, message: str, kind: str, life: Life) -> web.Response:
        life.status = status
        return error_response(status, message, kind)


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


def of_the_server(request: web.BaseRequest) -> web.Response:
    """A request that names no resource of a replica: `OPTIONS *` asks for the server itself, any other is refused."""
    if request.method == "OPTIONS":
        return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"})
    return error_response(
        405, f"router: {request.method} {request.raw_path} names no route here", "MethodNotAllowedError"
    )


def error_response(status: int, message: str, kind: str) -> web.Response:
    """An error in vLLM's shape, whose message begins with `router:`, and a header that says so, too."""
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"X-Routebench-Router-Error": kind},
    )
