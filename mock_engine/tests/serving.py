"""A replica served inside the test's own event loop, and a client that asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse, ClientSession
from aiohttp.test_utils import TestServer

from mock_engine.clock import Clock
from mock_engine.flags import parse_flags
from mock_engine.replica import Replica
from mock_engine.server import Server, make_app
from mock_engine.tests.replica_process import free_ports

FAST = (
    "--mock-speedup",
    "50",
    "--served-model-name",
    "m",
    "--max-model-len",
    "4096",
    "--num-gpu-blocks-override",
    "200",
)
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2}


class Client:
    def __init__(self, replica: Replica, session: ClientSession, base: str) -> None:
        self.replica = replica
        self.session = session
        self.base = base

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, ClientResponse]:
        async with self.session.request(method, self.base + path, json=body, headers=headers) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text, answer

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        status, found, _ = await self.ask("POST", path, {} if body is None else body, **headers)
        assert status == 200, found
        return found

    async def get(self, path: str) -> Any:
        status, found, _ = await self.ask("GET", path)
        assert status == 200, found
        return found

    async def events(self, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
        text = await self.post(path, {**body, "stream": True})
        found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in found]

    async def metric(self, name: str) -> float:
        text = await self.get("/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    async def started(self, body: dict[str, Any]) -> asyncio.Task[Any]:
        """A long request that runs by the time this returns."""
        task = asyncio.create_task(self.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 2000, **body}))
        while not any(driver.choices for driver in self.replica.drivers):
            await asyncio.sleep(0.002)
        return task


@asynccontextmanager
async def serving(*flags: str, env: dict[str, str] | None = None) -> AsyncIterator[Client]:
    options, config = parse_flags([*FAST, *flags], env or {})
    replica = Replica(options, config, port=options.port, clock=Clock(speedup=options.speedup))
    server = TestServer(make_app(replica))
    try:
        await server.start_server(shutdown_timeout=0.1)
        replica.start()
        async with ClientSession() as session:
            yield Client(replica, session, f"http://127.0.0.1:{server.port}")
    finally:
        try:
            await server.close()
        finally:
            replica.close()


@asynccontextmanager
async def listening(*flags: str, env: dict[str, str] | None = None) -> AsyncIterator[Client]:
    """As `serving`, but behind the replica's own listening socket, which can be closed and opened again."""
    port = free_ports()[0]
    options, config = parse_flags([*FAST, "--host", "127.0.0.1", "--port", str(port), *flags], env or {})
    replica = Replica(options, config, port=port, clock=Clock(speedup=options.speedup))
    server = Server(replica)
    try:
        await server.start()
        async with ClientSession() as session:
            yield Client(replica, session, f"http://127.0.0.1:{port}")
    finally:
        await server.stop()
