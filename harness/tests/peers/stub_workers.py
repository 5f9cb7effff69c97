"""Workers that answer when they are told to: the first piece of a stream at one word, its end at another."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from harness.peers import all_healthy, find_peer, peer_command
from harness.processes import Children, free_ports, get_json, wait_ready
from harness.tests.peers.live import require
from harness.tests.peers.lockstep import BLOCK

NAMES = ("w0", "w1", "w2", "w3")
SETTLE_S = 0.004
"""What a router does after a last byte has passed (freeing a slot) is done by then."""
ORDERS = {
    "vllm-router": ("/list_workers", lambda body: body["urls"]),
    "sglang-router": ("/workers", lambda body: [worker["url"] for worker in body["workers"]]),
}
"""Where a router tells the order in which it goes through its workers: a hash map's, so another one every start."""


class Held:
    """One request that reached a worker and waits there."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.first = asyncio.Event()
        self.end = asyncio.Event()


class StubWorkers:
    """`arrived` gets every generation request as it comes; `urls` are in the order of `names`."""

    def __init__(self, names) -> None:
        self.names = tuple(names)
        self.urls: dict[str, str] = {}
        self.arrived: asyncio.Queue[Held] = asyncio.Queue()

    async def start(self, name: str) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", _ok)
        app.router.add_get("/v1/models", _models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate(name))
        for path in ("/v1/completions/render", "/v1/chat/completions/render"):
            app.router.add_post(path, _render)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.urls[name] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def _generate(self, name):
        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            held = Held(name)
            await self.arrived.put(held)
            await held.first.wait()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n')
            await held.end.wait()
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response

        return handle


async def _ok(request: web.Request) -> web.Response:
    return web.Response()


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def _render(request: web.Request) -> web.Response:
    return web.json_response({"detail": "Not Found"}, status=404)


@asynccontextmanager
async def stub_workers(names):
    workers = StubWorkers(names)
    runners = [await workers.start(name) for name in names]
    try:
        yield workers
    finally:
        for runner in runners:
            await runner.cleanup()


class Client:
    """Sends one streamed request a call and knows when its first piece and its end have come through the router."""

    def __init__(self, session: aiohttp.ClientSession, url: str, workers: StubWorkers) -> None:
        self._session, self._url, self._workers = session, url, workers
        self._open: dict[str, tuple[Held, asyncio.Task, asyncio.Event]] = {}

    async def start(self, request_id: str, path: str, body: dict, headers: dict[str, str]) -> str:
        """The worker that the router chose."""
        came = asyncio.Event()
        task = asyncio.create_task(self._read(path, {"model": "m", "stream": True, **body}, headers, came))
        arrival = asyncio.create_task(self._workers.arrived.get())
        await asyncio.wait({task, arrival}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        if not arrival.done():
            arrival.cancel()
            raise AssertionError(f"{request_id} reached no worker: {task.exception() if task.done() else 'no answer'}")
        self._open[request_id] = (arrival.result(), task, came)
        return arrival.result().worker

    async def first(self, request_id: str) -> None:
        held, _, came = self._open[request_id]
        held.first.set()
        await asyncio.wait_for(came.wait(), 10)

    async def end(self, request_id: str) -> None:
        held, task, _ = self._open.pop(request_id)
        held.first.set()
        held.end.set()
        await asyncio.wait_for(task, 10)

    async def _read(self, path, body, headers, came) -> None:
        async with self._session.post(self._url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, f"{answer.status}: {await answer.text()}"
            async for _ in answer.content.iter_any():
                came.set()


@dataclass(frozen=True)
class Address:
    name: str
    url: str
    kv_events: str | None = None


@asynccontextmanager
async def routed(folder, peer, variant, *args, events=None):
    """(client, urls by name in the router's own order, its child process)"""
    require(peer)
    async with stub_workers(NAMES) as workers, aiohttp.ClientSession() as session:
        replicas = [Address(name, workers.urls[name], (events or {}).get(name)) for name in NAMES]
        port = free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        with Children(folder) as children:
            command = peer_command(peer, variant, args, port, replicas, block_size=BLOCK, model="m")
            child = children.start("peer", command)
            ready = f"{url}{find_peer(peer).ready_path}"
            await asyncio.to_thread(wait_ready, child, ready, 60, lambda body: all_healthy(body, replicas))
            path, read = ORDERS[peer]
            order = read(await asyncio.to_thread(get_json, f"{url}{path}"))
            names = {workers.urls[name]: name for name in NAMES}
            yield Client(session, url, workers), {names[url]: url for url in order}, child


async def replay(ops, client, ours, prompt_of, body_of, check):
    """Runs a sequence through both; `check(request_id, decision, real)` sees every decision before ours follows."""
    for op in ops:
        if op.kind == "start":
            turn, decision = ours.choose(op.request_id, prompt_of(op))
            real = await client.start(op.request_id, "/v1/completions", body_of(op), {})
            check(op.request_id, decision, real)
            ours.follow(turn, decision, real)
        elif op.kind == "first":
            await client.first(op.request_id)
            ours.first(op.request_id)
        else:
            await client.end(op.request_id)
            ours.end(op.request_id)
        await asyncio.sleep(SETTLE_S)
