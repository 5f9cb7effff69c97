"""Fakes for the shell's tests: a replica that answers as it is told, and a router process's inside on a free port."""

import asyncio
import contextlib
import time

import msgspec
import pytest
from aiohttp import web

from routers.service import ReplicaAddress, Service, ServiceConfig


@pytest.fixture
def eventually():
    """`await eventually(condition)` waits until it holds; the limit is there so that a broken test ends."""

    async def wait(condition, seconds=10.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"did not come true within {seconds} s"
            await asyncio.sleep(0.005)

    return wait


class FakeReplica:
    """Speaks just enough of an engine's HTTP. `answer` may be replaced; `seen` holds method, path, headers, body."""

    def __init__(self, name):
        self.name = name
        self.seen = []
        self.left = 0
        self.answer = self.complete
        self.tokenizer = lambda question: list(range(len(str(question.get("prompt", question.get("messages"))))))

    async def complete(self, request, body):
        return web.json_response({"id": "cmpl-1", "served_by": self.name})

    async def handle(self, request):
        body = await request.read()
        self.seen.append((request.method, request.raw_path, request.raw_headers, body))
        try:
            if request.path == "/tokenize":
                tokens = self.tokenizer(msgspec.json.decode(body))
                return web.json_response({"count": len(tokens), "max_model_len": 9, "tokens": tokens})
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise

    async def start(self, port=0):
        """On any free port, or after a `stop` on the one that it had."""
        self._runner = web.ServerRunner(
            web.Server(self.handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        await self._runner.cleanup()


@pytest.fixture
async def fleet():
    """`await fleet(2)` starts two fake replicas named r0, r1."""
    started = []

    async def start(count):
        for _ in range(count):
            started.append(await FakeReplica(f"r{len(started)}").start())
        return started

    yield start
    for replica in started:
        await replica.stop()


@pytest.fixture
async def router_for():
    """`await router_for(replicas, policy=...)` starts a router in front of fake replicas (or URLs)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(replicas, *, events=None, replay=None, listen_on=0, **config):
            addresses = tuple(
                ReplicaAddress(f"r{i}", getattr(replica, "url", replica), (events or {}).get(i), (replay or {}).get(i))
                for i, replica in enumerate(replicas)
            )
            service = Service(ServiceConfig(replicas=addresses, port=listen_on, **config))
            await service.start()
            stack.push_async_callback(service.close)
            service.url = f"http://127.0.0.1:{service.port}"
            return service

        yield start
