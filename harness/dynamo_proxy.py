"""`python -m harness.dynamo_proxy`: a thin proxy in front of replicas that asks Dynamo's selection service where to go.

Law: a request is booked at the service exactly from its selection until its last byte, its failure or the client's
leaving; its prefill ends with the first piece of the answer. Bytes pass as they come. The odd thing: what tells the
service of first byte and end runs beside the stream, in order for each request, so a slow service delays no token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import sys
import time
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from harness.dynamo_select import Selection, SelectionService, Worker
from harness.errors import HarnessError, ProcessLost, StartError
from harness.processes import free_ports
from routers import OptionError, RoutersError, parse_option
from routers.__main__ import parse_replica
from routers.body import read_body
from routers.listen import listen
from routers.policies.dynamo_options import SELECT_HEADER, Wishes, read_wishes
from routers.proxy import CLIENT_LEFT, error_response, generates
from routers.quiet import ClientErrors
from routers.requestlog import RequestLog
from routers.tokens import TokenSource
from routers.upstream import as_upstream_error, make_session, plain, request_headers, response_headers, send

RULE = "dynamo-select"
RULE_NO_TOKENS = "no-tokens"
_SETTLE_S = 2.0


class _Row(msgspec.Struct):
    """The log's line of one request, with the fields that our own router writes."""

    request_id: str
    session_id: str | None
    received_us: int
    replica: str | None = None
    reason: str | None = None
    rule: str | None = None
    believed_hit_tokens: int | None = None
    routed_us: int | None = None
    sent_us: int | None = None
    first_byte_us: int | None = None
    ended_us: int | None = None
    status: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    attempts: int = 0
    scores: dict[str, float] | None = None


class _Booking:
    """What the service is told of one request, in order and beside the stream."""

    def __init__(self, proxy: DynamoProxy, selection: Selection) -> None:
        self._proxy = proxy
        self._selection_id = selection.selection_id
        self._prefill: asyncio.Task[None] | None = None

    def first_byte(self) -> None:
        if self._prefill is None:
            self._prefill = self._proxy.beside(self._proxy.service.prefill_complete(self._selection_id))

    def end(self) -> None:
        self._proxy.beside(self._free())

    async def _free(self) -> None:
        if self._prefill is not None:
            await asyncio.wait({self._prefill})
        await self._proxy.service.free(self._selection_id)


class DynamoProxy:
    """`now_us` counts from the epoch of the run."""

    def __init__(
        self,
        service: SelectionService,
        session: aiohttp.ClientSession,
        tokens: TokenSource,
        log: RequestLog,
        *,
        epoch_ns: int,
        session_header: str,
    ) -> None:
        self.service = service
        self.in_flight = [0] * len(service.workers)
        self.routed = [0] * len(service.workers)
        self.lost_calls = 0
        self._session = session
        self._tokens = tokens
        self._log = log
        self._epoch_ns = epoch_ns
        self._session_header = session_header
        self._in_turn = itertools.cycle(range(len(service.workers)))
        self._beside: set[asyncio.Task[None]] = set()

    def now_us(self) -> int:
        return (time.monotonic_ns() - self._epoch_ns) // 1000

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a call to the service that no stream waits for; one that fails is counted."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.lost_calls += 1

    async def settle(self) -> None:
        """Lets running calls end, for a moment."""
        if self._beside:
            await asyncio.wait(self._beside, timeout=_SETTLE_S)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/router/health":
            alive = self.service.running
            body = {"status": "ok" if alive else "selection service lost", "healthy_workers": len(self.in_flight)}
            return web.json_response(body, status=200 if alive else 503)
        if path == "/router/state":
            return web.json_response(await self._state())
        if generates(request.method, path):
            return await self._generate(request)
        url = self.service.workers[next(self._in_turn)].url
        try:
            return await self._forward(request, await request.read(), url, None, None)
        except RoutersError as error:
            return error_response(502, f"router: the replica at {url} failed: {error}", "BadGatewayError")

    async def _state(self) -> dict[str, Any]:
        names = [worker.name for worker in self.service.workers]
        return {
            "policy": RULE,
            "in_flight": sum(self.in_flight),
            "lost_calls": self.lost_calls,
            "replicas": [
                {"name": name, "url": worker.url, "in_flight": self.in_flight[i], "routed": self.routed[i]}
                for i, (name, worker) in enumerate(zip(names, self.service.workers, strict=True))
            ],
            "tokens": msgspec.structs.asdict(self._tokens.stats),
            "loads": await self.service.loads(),
        }

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        row = _Row(
            plain(request.headers.get("X-Request-Id", "")) or uuid.uuid4().hex,
            plain(request.headers.get(self._session_header, "")) or None,
            self.now_us(),
        )
        booking: _Booking | None = None
        place: int | None = None
        try:
            body = await request.read()
            wishes = read_wishes(request.headers.get(SELECT_HEADER))
            place, booking = await self._place(body, row, wishes)
            self.in_flight[place] += 1
            self.routed[place] += 1
            return await self._forward(request, body, self.service.workers[place].url, row, booking)
        except ProcessLost as error:
            row.status, row.error = 503, str(error)
            return error_response(503, f"router: {error}", "ServiceUnavailableError")
        except OptionError as error:
            row.status, row.error = 400, str(error)
            return error_response(400, f"router: {error}", "BadRequestError")
        except RoutersError as error:
            row.status, row.error = 502, f"replica {row.replica}: {error}"
            return error_response(502, f"router: replica {row.replica} failed: {error}", "BadGatewayError")
        except (asyncio.CancelledError, ConnectionError):
            row.status, row.error = CLIENT_LEFT, "client left before the answer ended"
            raise
        finally:
            if place is not None:
                self.in_flight[place] -= 1
            if booking is not None:
                booking.end()
            row.ended_us = self.now_us()
            self._log.add(msgspec.structs.asdict(row))

    async def _place(self, body: bytes, row: _Row, wishes: Wishes) -> tuple[int, _Booking | None]:
        """Asks the service, if the prompt has tokens; else the fewest in flight, which the service never hears of."""
        ask_url = self.service.workers[next(self._in_turn)].url
        prompt = await self._tokens.prompt(read_body(body), ask_url, set())
        row.attempts = 1
        booking = None
        if prompt is None or not prompt.tokens:
            place = min(range(len(self.in_flight)), key=self.in_flight.__getitem__)
            row.reason, row.rule = "prompt not tokenised: fewest requests in flight", RULE_NO_TOKENS
        else:
            selection_id = uuid.uuid4().hex
            selecting = asyncio.ensure_future(self.service.select(selection_id, list(prompt.token_ids()), wishes))
            try:
                selection = await asyncio.shield(selecting)
            except asyncio.CancelledError:
                # The client left while the service held its request: what it books in the end is given back.
                self.beside(self._give_back(selecting, selection_id))
                raise
            booking = _Booking(self, selection)
            place = selection.worker_id
            row.prompt_tokens = prompt.tokens
            row.believed_hit_tokens = selection.overlap.longest_matched
            row.reason = (
                f"Dynamo chose it: {selection.effective_prefill_tokens} of {prompt.tokens} tokens left to prefill"
            )
            row.rule = RULE
        row.replica, row.routed_us = self.service.workers[place].name, self.now_us()
        return place, booking

    async def _give_back(self, selecting: asyncio.Future[Selection], selection_id: str) -> None:
        await selecting
        await self.service.free(selection_id)

    async def _forward(
        self, request: web.BaseRequest, body: bytes, url: str, row: _Row | None, booking: _Booking | None
    ) -> web.StreamResponse:
        headers = request_headers(request.raw_headers)
        if row is not None:
            headers.setdefault("X-Request-Id", row.request_id)
            row.sent_us = self.now_us()
        upstream = await send(self._session, request.method, url, request.raw_path, headers, body)
        try:
            response = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=response_headers(upstream.raw_headers)
            )
            if row is not None:
                row.status = upstream.status
            await response.prepare(request)
            while True:
                try:
                    chunk = await upstream.content.readany()
                except (TimeoutError, aiohttp.ClientError, OSError) as error:
                    if row is not None:
                        row.error = f"replica broke off: {as_upstream_error(error)}"
                    if request.transport is not None:
                        request.transport.close()  # an answer cut short must not look whole
                    return response
                if not chunk:
                    break
                if row is not None and row.first_byte_us is None:
                    row.first_byte_us = self.now_us()
                    if booking is not None:
                        booking.first_byte()
                await response.write(chunk)
            await response.write_eof()
            return response
        finally:
            if upstream.content.at_eof():
                upstream.release()
            else:
                upstream.close()  # at once, so that the engine aborts the request


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.dynamo_proxy",
        description="Route by NVIDIA Dynamo's selection service (package ai-dynamo), which this starts and asks.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--select-port", type=int, help="port of the selection service (default: a free one)")
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="NAME=URL[,events=ENDPOINT[,replay=ENDPOINT]]",
        help="a replica, and where it publishes and replays KV events; repeat it",
    )
    parser.add_argument("--model", default="mock-model", help="model name that the replicas serve")
    parser.add_argument("--block-size", type=int, default=16, help="KV block size in tokens (default: %(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the service; repeat it"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, help="what queue_threshold is a share of")
    parser.add_argument("--session-header", default="X-Session-ID", help="header that carries the session id")
    parser.add_argument("--log-file", type=Path, help="append one JSON line per request here")
    parser.add_argument("--epoch-ns", type=int, help="value of the monotonic clock that is instant 0 of the log")
    return parser


async def serve(given: argparse.Namespace) -> None:
    """Until SIGINT or SIGTERM. Raises HarnessError when the service does not start or goes away."""
    workers = [Worker(r.name, r.url, r.events, r.replay) for r in map(parse_replica, given.replica)]
    if not workers:
        raise StartError("no replica to route to: give at least one --replica NAME=http://HOST:PORT")
    service = SelectionService(
        given.select_port or free_ports(1)[0],
        workers,
        block_size=given.block_size,
        model=given.model,
        options=dict(map(parse_option, given.option)),
        max_num_batched_tokens=given.max_num_batched_tokens,
    )
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    log = RequestLog(given.log_file)
    log.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(log.close)
        session = await stack.enter_async_context(make_session())
        await stack.enter_async_context(service)
        proxy = DynamoProxy(
            service,
            session,
            TokenSource(session, given.block_size),
            log,
            epoch_ns=given.epoch_ns if given.epoch_ns is not None else time.monotonic_ns(),
            session_header=given.session_header,
        )
        stack.push_async_callback(proxy.settle)
        await listen(proxy.handle, given.host, given.port, stack, ClientErrors())
        print(f"dynamo-select on http://{given.host}:{given.port}, service {service.url}", file=sys.stderr, flush=True)
        while not stop.is_set():
            if not service.running:
                raise ProcessLost("the selection service ended; its last words are above")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        asyncio.run(serve(build_parser().parse_args(arguments)))
    except (HarnessError, RoutersError, OSError) as error:
        print(f"dynamo-select: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, HarnessError) else 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
