"""The router as a process: sockets, tasks and admin routes around one `Router`.

Starts what the policy needs and nothing else: subscribers only for KV events, polling only for engine metrics; whoever
the policy, replicas that are down are looked at until they answer. Admin
routes live under `/router/`; every other path belongs to the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio
from aiohttp import web

from routers.admin import ReplicaAddress, answer
from routers.down import HEALTH_INTERVAL_MS
from routers.errors import StartError
from routers.health import Health
from routers.listen import listen
from routers.metrics_poll import MetricsPoll
from routers.peer_link import PeerLink
from routers.peers import PeerLoads
from routers.prefix_poll import PrefixPoll
from routers.proxy import Proxy, ProxyConfig, error_response, generates, of_the_server
from routers.quiet import ClientErrors
from routers.ramp import Ramp
from routers.registry import make_policy, refuse_oracle
from routers.requestlog import RequestLog
from routers.router import Router
from routers.subscriber import Subscriber
from routers.tokens import TokenSource
from routers.upstream import make_session
from routers.view import POLL_INTERVALS_MS, Signal


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
    metrics_interval_ms: int = POLL_INTERVALS_MS[Signal.ENGINE_METRICS]
    prefix_interval_ms: int = POLL_INTERVALS_MS[Signal.REPORTED_PREFIXES]
    health_interval_ms: int = HEALTH_INTERVAL_MS  # between looks at replicas that are down; 0: none is ever down
    ramp_s: float = 0.0  # time in which a replica that joins later gets its full share; 0: at once
    peers: tuple[str, ...] = ()  # URLs of the other ingresses; none: nothing is shared
    peer_delay_ms: float = 0.0  # age at which what a peer said counts
    proxy: ProxyConfig = ProxyConfig()


class Service:
    """`start`, then `run` until cancelled, then `close`. `port` is the one listened on (0 asks for a free one)."""

    def __init__(self, config: ServiceConfig) -> None:
        policy = make_policy(config.policy, config.options, random.Random(config.seed), config.block_size)
        refuse_oracle(policy, config.policy)
        self.config = config
        self.router = Router(
            policy,
            {replica.name: replica.url for replica in config.replicas},
            ramp=Ramp(config.ramp_s),
            peers=PeerLoads(round(1000 * config.peer_delay_ms)) if config.peers else None,
            faults=config.proxy.faults,
            health_interval_ms=config.health_interval_ms,
        )
        # A policy that hashes tokens alone does on purpose what is a fault of others.
        overlooks_salts = not self.router.heeds_salts
        self._faults = msgspec.structs.replace(config.proxy.faults, ignore_extra_keys=overlooks_salts)
        self.port = config.port
        self.subscribers: dict[str, Subscriber] = {}
        self._addresses = {replica.name: replica for replica in config.replicas}
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] | None = None
        self._epoch_ns = config.epoch_ns if config.epoch_ns is not None else time.monotonic_ns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = contextlib.AsyncExitStack()
        self._started_us = 0
        self._client_errors = ClientErrors()
        self._link: PeerLink | None = None

    def now_us(self) -> int:
        return (time.monotonic_ns() - self._epoch_ns) // 1000

    async def start(self) -> None:
        config = self.config
        self._started_us = self.now_us()
        self._failure = asyncio.get_running_loop().create_future()
        session = await self._stack.enter_async_context(make_session())
        log = RequestLog(config.log_file)
        log.start()
        self._stack.push_async_callback(log.close)
        self._tokens = TokenSource(session, config.block_size, self._faults)
        self._health = Health(self.router, session, self.now_us, config.health_interval_ms, self._spawn)
        self.proxy = Proxy(self.router, session, self._tokens, log, self._health, self.now_us, config.proxy)
        needs = self.router.needs
        self._zmq: zmq.asyncio.Context | None = None
        if Signal.KV_EVENTS in needs:
            self._zmq = zmq.asyncio.Context()
            self._stack.callback(self._zmq.destroy, 0)
        self._stack.push_async_callback(self._stop_tasks)
        if self._zmq is not None:
            for replica in config.replicas:
                self._subscribe(replica)
        self._poll: MetricsPoll | None = None
        if Signal.ENGINE_METRICS in needs:
            self._poll = MetricsPoll(self.router, session, self.now_us, config.metrics_interval_ms)
            self._spawn(self._poll.run())
        self._prefixes: PrefixPoll | None = None
        if Signal.REPORTED_PREFIXES in needs:
            form = getattr(getattr(self.router.policy, "options", None), "report", "top-k")
            self._prefixes = PrefixPoll(
                self.router, session, self.now_us, config.prefix_interval_ms, config.block_size, form
            )
            self._spawn(self._prefixes.run())
        self.port = await listen(self._handle, config.host, config.port, self._stack, self._client_errors)
        if config.peers:
            name, incarnation = f"{config.host}:{self.port}", uuid.uuid4().hex
            self._link = PeerLink(self.router, session, name, incarnation, config.peers)
            self._spawn(self._link.run())

    async def close(self) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Serves until cancelled, or until a task of the router itself fails, whose error is then raised."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    # -- the fleet ----------------------------------------------------------------------------------------------------

    def fleet(self) -> list[dict[str, Any]]:
        """What `/router/replicas` answers."""
        shares = self.router.ramp.shares(self.now_us())
        return [
            {
                "name": view.name,
                "url": view.url,
                "in_flight": view.in_flight,
                "in_flight_tokens": view.in_flight_tokens,
                "draining": view.draining,
                "down": view.name in self.router.down,
                "routed": self.router.placements.get(view.name, 0),
                "share": shares.get(view.name, 1.0),
                "metrics": msgspec.structs.asdict(view.metrics) if view.metrics is not None else None,
            }
            for view in self.router.replicas()
        ]

    def add_replica(self, address: ReplicaAddress) -> None:
        """Joins the fleet while it runs; raises FleetError for a name that is taken, StartError for a bad address."""
        known = {view.name for view in self.router.replicas() if view.draining}
        self.router.add_replica(address.name, self.now_us(), url=address.url.rstrip("/"))
        if address.name in known and address == self._addresses.get(address.name):
            return  # it only drained, and is heard all the while
        self._unsubscribe(address.name)
        if address.name in known:  # another process under the old name: nothing that was believed holds
            self.router.event_gap(address.name, self.now_us())
        self._addresses[address.name] = address
        if self._prefixes is not None:
            self._prefixes.forget(address.name)
        try:
            self._subscribe(address)
        except StartError:
            self.router.remove_replica(address.name, self.now_us())
            raise

    def drain_replica(self, name: str) -> None:
        self.router.drain_replica(name, self.now_us())

    def remove_replica(self, name: str) -> None:
        self.router.remove_replica(name, self.now_us())
        self._unsubscribe(name)

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
            "waiting": self.router.waiting,
            "counts": {
                **msgspec.structs.asdict(self.router.counts),
                "client_left": self.proxy.client_left,
                "client_errors": self._client_errors.count,
                "refused": self.proxy.refused,
                "broken": self.proxy.broken,
                "went_down": self.router.down.times,
            },
            "down": self._health.state(),
            "beliefs": {rule: msgspec.structs.asdict(one) for rule, one in self.router.beliefs.items()},
            "faults": self.config.proxy.faults.names(),
            "replicas": self.fleet(),
            "events": {name: subscriber.report() for name, subscriber in self.subscribers.items()},
            "tokens": msgspec.structs.asdict(self._tokens.stats),
            "metrics_poll": msgspec.structs.asdict(self._poll.stats) if self._poll is not None else None,
            "prefix_poll": msgspec.structs.asdict(self._prefixes.stats) if self._prefixes is not None else None,
            "peers": self._peer_state(),
            "index_size": self.router.index_size(),
            "index_unit": self.router.index_unit,
            "policy_stats": stats() if callable(stats) else {},
        }

    # -- start and stop ---------------------------------------------------------------------------------------------

    def _subscribe(self, replica: ReplicaAddress) -> None:
        if replica.events is None or self._zmq is None:
            return
        subscriber = Subscriber(
            self.router,
            replica.name,
            replica.events,
            replay=replica.replay,
            block_size=self.config.block_size,
            now_us=self.now_us,
            context=self._zmq,
            lora_names=self.proxy.lora_names,
            faults=self._faults,
        )
        subscriber.connect().close()  # an address that cannot be one shows now
        self.subscribers[replica.name] = subscriber
        self._listening[replica.name] = self._spawn(subscriber.run())

    def _unsubscribe(self, name: str) -> None:
        self.subscribers.pop(name, None)
        task = self._listening.pop(name, None)
        if task is not None:
            task.cancel()

    def _peer_state(self) -> dict[str, Any] | None:
        peers = self.router.peers
        if peers is None or self._link is None:
            return None
        return {
            "urls": list(self.config.peers),
            "heard": list(peers.peers()),
            **msgspec.structs.asdict(peers.stats),
            **msgspec.structs.asdict(self._link.stats),
        }

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._failure is not None
            if not self._failure.done():
                self._failure.set_exception(error)
                self._failure.exception()  # seen, even if nobody is in `run` just now

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        try:
            if request.raw_path == "*" or request.method == "CONNECT":
                return of_the_server(request)
            if path.startswith("/router/") or path == "/finish_session":
                return await answer(self, request)
            if generates(request.method, path):
                return await self.proxy.generate(request)
            return await self.proxy.pass_on(request)
        except web.RequestPayloadError as error:
            return error_response(400, f"router: the body cannot be read: {error}", "BadRequestError")


def _plain_options(options: object) -> dict[str, Any]:
    return msgspec.structs.asdict(options) if isinstance(options, msgspec.Struct) else {}
