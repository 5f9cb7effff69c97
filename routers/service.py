"""The router as a process: sockets, tasks and admin routes around one `Router`.

Starts what the policy needs and nothing else: subscribers only for KV events, polling only for engine metrics. Admin
routes live under `/router/`; every other path belongs to the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio
from aiohttp import web

from routers.errors import StartError
from routers.metrics_poll import MetricsPoll
from routers.proxy import Proxy, ProxyConfig, error_response, generates
from routers.registry import make_policy
from routers.requestlog import RequestLog
from routers.router import Router
from routers.subscriber import Subscriber
from routers.tokens import TokenSource
from routers.upstream import HEADER_BYTES_MAX, make_session
from routers.view import Signal


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Where one replica is: its HTTP URL, and where it publishes and replays KV events, if it does."""

    name: str
    url: str
    events: str | None = None
    replay: str | None = None


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: str = "round-robin"
    options: dict[str, Any] = {}
    replicas: tuple[ReplicaAddress, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    block_size: int = 16
    seed: int = 0
    log_file: Path | None = None
    epoch_ns: int | None = None  # value of time.monotonic_ns() that is instant 0 of recorded instants; None: the start
    metrics_interval_ms: int = 200
    proxy: ProxyConfig = ProxyConfig()


class Service:
    """`start`, then `run` until cancelled, then `close`. `port` is the one listened on (0 asks for a free one)."""

    def __init__(self, config: ServiceConfig) -> None:
        policy = make_policy(config.policy, config.options, random.Random(config.seed), config.block_size)
        self.config = config
        self.router = Router(policy, {replica.name: replica.url for replica in config.replicas})
        self.port = config.port
        self.subscribers: list[Subscriber] = []
        self._epoch_ns = config.epoch_ns if config.epoch_ns is not None else time.monotonic_ns()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()
        self._started_us = 0

    def now_us(self) -> int:
        return (time.monotonic_ns() - self._epoch_ns) // 1000

    async def start(self) -> None:
        config = self.config
        self._started_us = self.now_us()
        session = await self._stack.enter_async_context(make_session())
        log = RequestLog(config.log_file)
        log.start()
        self._stack.push_async_callback(log.close)
        self._tokens = TokenSource(session, config.block_size)
        self.proxy = Proxy(self.router, session, self._tokens, log, self.now_us, config.proxy)
        needs = self.router.needs
        if Signal.KV_EVENTS in needs:
            self._subscribe()
        self._poll: MetricsPoll | None = None
        if Signal.ENGINE_METRICS in needs:
            self._poll = MetricsPoll(self.router, session, self.now_us, config.metrics_interval_ms)
            self._spawn(self._poll.run())
        self._stack.push_async_callback(self._stop_tasks)
        await self._listen()

    async def close(self) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Serves until cancelled, or until a task of the router itself fails, whose error is then raised."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        await asyncio.Event().wait()

    def state(self) -> dict[str, Any]:
        """What `/router/state` answers."""
        policy = self.router.policy
        stats = getattr(policy, "stats", None)
        return {
            "policy": self.config.policy,
            "options": _plain_options(getattr(policy, "options", None)),
            "needs": sorted(self.router.needs),
            "block_size": self.config.block_size,
            "now_us": self.now_us(),
            "up_us": self.now_us() - self._started_us,
            "in_flight": self.router.in_flight,
            "counts": {
                **msgspec.structs.asdict(self.router.counts),
                "client_left": self.proxy.client_left,
                "refused": self.proxy.refused,
                "broken": self.proxy.broken,
            },
            "replicas": [
                {
                    "name": view.name,
                    "url": view.url,
                    "in_flight": view.in_flight,
                    "in_flight_tokens": view.in_flight_tokens,
                    "draining": view.draining,
                    "routed": self.router.placements.get(view.name, 0),
                    "metrics": msgspec.structs.asdict(view.metrics) if view.metrics is not None else None,
                }
                for view in self.router.replicas()
            ],
            "events": {subscriber.replica: subscriber.report() for subscriber in self.subscribers},
            "tokens": msgspec.structs.asdict(self._tokens.stats),
            "metrics_poll": msgspec.structs.asdict(self._poll.stats) if self._poll is not None else None,
            "policy_stats": stats() if callable(stats) else {},
        }

    # -- start and stop ---------------------------------------------------------------------------------------------

    def _subscribe(self) -> None:
        context = zmq.asyncio.Context()
        self._stack.callback(context.destroy, 0)
        for replica in self.config.replicas:
            if replica.events is not None:
                subscriber = Subscriber(
                    self.router,
                    replica.name,
                    replica.events,
                    replay=replica.replay,
                    block_size=self.config.block_size,
                    now_us=self.now_us,
                    context=context,
                    lora_names=self.proxy.lora_names,
                )
                self.subscribers.append(subscriber)
                self._spawn(subscriber.run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        def whole_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            loop = asyncio.get_running_loop()
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=1 << 40)

        server = web.Server(
            self._handle,
            request_factory=whole_request,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self.config.host, self.config.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            where = f"{self.config.host}:{self.config.port}"
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"{where} is taken by another process: give another --port") from error
            raise StartError(f"cannot listen on {where} ({error.strerror or error}): give another --host") from error
        self.port = runner.addresses[0][1]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path.startswith("/router/"):
            return self._admin(request, path)
        if generates(request.method, path):
            return await self.proxy.generate(request)
        return await self.proxy.pass_on(request)

    def _admin(self, request: web.BaseRequest, path: str) -> web.Response:
        if request.method != "GET":
            return error_response(405, f"router: {path} answers GET only", "MethodNotAllowedError")
        if path == "/router/health":
            return _json({"status": "ok"})
        if path == "/router/state":
            return _json(self.state())
        return error_response(404, f"router: no {path}: there are /router/health and /router/state", "NotFoundError")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _plain_options(options: object) -> dict[str, Any]:
    return msgspec.structs.asdict(options) if isinstance(options, msgspec.Struct) else {}
