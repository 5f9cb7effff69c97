"""What a router costs: added latency of a request, and streamed chunks per second, beside a direct connection.

    python benchmarks/proxy.py [--requests 2000] [--streams 64] [--chunks 200] [--rounds 5] [--body-ids 512]

One process plays two tiny upstreams; in front of them stands `python -m routers --policy round-robin`, and, where it is
installed, the real `vllm-router --policy round_robin`. Routes take turns round by round in one run, so that a busy
machine is busy for all of them. Latency: one small answer a request, one request at a time. Flood: every upstream
writes its chunks as fast as they are taken, so that several travel in one piece. Paced: a chunk every 5 ms a stream, as
from an engine, so that each travels alone; CPU is that of the router's process for each of these, and its inverse is
what one core would carry.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil

from harness.peers import all_healthy, find_peer, peer_command
from harness.processes import PYTHON, Child, Children, free_ports, wait_ready

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word","token_ids":[17]}]}\n\n'
PACE_US = 5000
WIDTHS = (9, 9, 11, 11, 11, 10, 14, 12)
DONE = b"data: [DONE]\n\n"


def framed(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


# -- the upstreams, in a process of their own ----------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP/1.1 with as little work as can be: POST answers at once or streams, anything else is a healthy 200."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            if head.startswith(b"PRI "):
                break  # somebody tries HTTP/2
            if b'"stream":true' in body.replace(b" ", b""):
                asked = msgspec.json.decode(body)
                pace_s = asked["seed"] / 1e6
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                piece = framed(CHUNK)
                for _ in range(asked["max_tokens"]):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pace_s)
                writer.write(framed(DONE) + b"0\r\n\r\n")
            else:
                text = (
                    b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}],"status":"ok"}'
                )
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(text), text)
                )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve(ports: Sequence[int]) -> None:
    servers = [await asyncio.start_server(answer, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


# -- the client ----------------------------------------------------------------------------------------------------


class Connection:
    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def post(self, body: bytes) -> int:
        """Bytes of the answer's body, framing included, once it has come whole."""
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head[:16]:
            raise SystemExit(f"the answer is no 200: {head[:200]!r}")
        if b"content-length:" in head:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            await self._reader.readexactly(length)
            return length
        seen, end = 0, b""
        while not end.endswith(b"0\r\n\r\n"):
            piece = await self._reader.read(1 << 16)
            if not piece:
                raise SystemExit("the answer broke off")
            seen += len(piece)
            end = (end + piece)[-5:]
        return seen

    def close(self) -> None:
        self._writer.close()


async def latencies(port: int, body: bytes, count: int) -> list[float]:
    connection = await Connection(port).open()
    samples = []
    for number in range(count + 20):
        started = time.perf_counter()
        await connection.post(body)
        if number >= 20:  # the first ones open connections behind the router
            samples.append(time.perf_counter() - started)
    connection.close()
    return samples


async def chunks_per_s(ports: Sequence[int], body: bytes, streams: int, chunks: int) -> float:
    connections = [await Connection(ports[place % len(ports)]).open() for place in range(streams)]
    started = time.perf_counter()
    await asyncio.gather(*(connection.post(body) for connection in connections))
    spent = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return streams * chunks / spent


# -- the run ---------------------------------------------------------------------------------------------------------


class Route:
    """`ports` are where clients connect; a direct one has no router process to charge."""

    def __init__(self, name: str, ports: Sequence[int], child: Child | None) -> None:
        self.name, self.ports, self.child = name, ports, child
        self.samples: list[float] = []
        self.rates: list[float] = []
        self.paced: list[float] = []
        self.cpu_us: list[float] = []

    def cpu_s(self) -> float:
        if self.child is None:
            return 0.0
        process = psutil.Process(self.child.process.pid)
        processes = [process, *process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def line(self, direct: Route) -> str:
        def at(samples: list[float], share: float) -> float:
            return 1e6 * sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]

        p50, p99 = at(self.samples, 0.5), at(self.samples, 0.99)
        added50, added99 = p50 - at(direct.samples, 0.5), p99 - at(direct.samples, 0.99)
        rate = statistics.median(self.rates)
        paced, cpu_us = statistics.median(self.paced), statistics.median(self.cpu_us)
        cpu = f"{cpu_us:14.1f}{1e6 / cpu_us:12,.0f}" if self.child is not None else f"{'-':>14}{'-':>12}"
        figures = f"{p50:9.0f}{p99:9.0f}{added50:11.0f}{added99:11.0f}{rate:11,.0f}{paced:10,.0f}"
        return f"{self.name:12}{figures}{cpu}"


def start_routers(children: Children, ports: Sequence[int]) -> list[Route]:
    (port,) = free_ports(1)
    replicas = [
        SimpleNamespace(name=f"r{i}", url=f"http://127.0.0.1:{one}", kv_events=None) for i, one in enumerate(ports)
    ]
    listed = [part for replica in replicas for part in ("--replica", f"{replica.name}={replica.url}")]
    ours = children.start("ours", [*PYTHON, "-m", "routers", "--port", str(port), *listed])
    wait_ready(ours, f"http://127.0.0.1:{port}/router/health", 60)
    found = [Route("ours", [port], ours)]
    peer = find_peer("vllm-router")
    if not peer.installed:
        print(f"vllm-router is not installed and is left out: {peer.install_line}")
        return found
    (port,) = free_ports(1)
    theirs = children.start("vllm-router", peer_command("vllm-router", "round_robin", (), port, replicas, model="m"))
    wait_ready(theirs, f"http://127.0.0.1:{port}{peer.ready_path}", 60, lambda body: all_healthy(body, replicas))
    return [*found, Route("vllm-router", [port], theirs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--body-ids", type=int, default=512, help="token ids in a request's body")
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    prompt = list(range(10_000, 10_000 + args.body_ids))
    small = msgspec.json.encode({"model": "m", "prompt": prompt, "max_tokens": 1})
    asked = {"model": "m", "prompt": prompt, "max_tokens": args.chunks, "stream": True}
    flood, paced = (msgspec.json.encode({**asked, "seed": pace_us}) for pace_us in (0, PACE_US))
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        ports = free_ports(2)
        upstreams = children.start("upstreams", [*PYTHON, __file__, "--serve", *map(str, ports)])
        for port in ports:
            wait_ready(upstreams, f"http://127.0.0.1:{port}/health", 60)
        routes = [Route("direct", ports, None), *start_routers(children, ports)]
        for _ in range(args.rounds):
            for route in routes:
                route.samples += asyncio.run(latencies(route.ports[0], small, args.requests // args.rounds))
                route.rates.append(asyncio.run(chunks_per_s(route.ports, flood, args.streams, args.chunks)))
                before = route.cpu_s()
                route.paced.append(asyncio.run(chunks_per_s(route.ports, paced, args.streams, args.chunks)))
                route.cpu_us.append(1e6 * (route.cpu_s() - before) / (args.streams * args.chunks))
    print(f"{args.requests} requests of {len(small):,} bytes; {args.streams} streams of {args.chunks} chunks")
    columns = ("p50 us", "p99 us", "added p50", "added p99", "flood/s", "paced/s", "CPU us/chunk", "per core/s")
    print(f"{'':12}" + "".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    for route in routes:
        print(route.line(routes[0]))


if __name__ == "__main__":
    sys.exit(main())
