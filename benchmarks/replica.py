"""Streamed tokens per second that one replica process carries, with the lateness of its steps, beside a bare server.

    python benchmarks/replica.py [--streams 16 64 128 256] [--seconds 5] [--preset llama-3.1-8b-h100]

Each row opens that many streams, lets them decode for some seconds and reads: tokens that reached the client, CPU
seconds of the replica per token, and how late its tokens left (p99 of the steps, from its own log). The baseline is
an aiohttp server that writes one constant chunk to each of as many streams at the pace that the replica's steps had:
the price of the transport alone. The replica carries a load when its lateness p99 stays below a few milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from harness.json_lines import read_json_lines
from harness.processes import PYTHON, Child, Children, free_ports, wait_ready

WARM_S = 2.0
BASELINE = """
import asyncio, sys
from aiohttp import web
CHUNK = b"data: " + b"x" * 230 + b"\\n\\n"
async def stream(request):
    step_s, n = float(request.query["step_s"]), int(request.query["n"])
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for _ in range(n):
        due += step_s
        await asyncio.sleep(max(0.0, due - loop.time()))
        await answer.write(CHUNK)
    return answer
app = web.Application()
app.router.add_get("/health", lambda request: web.Response())
app.router.add_get("/stream", stream)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""


async def count_chunks(port: int, request: bytes, counts: list[int], place: int) -> None:
    """Reads one stream and counts its events; as little work as possible, so that the server is what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        while data := await reader.read(65536):
            counts[place] += data.count(b"\n\n")
    finally:
        writer.close()


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def measure(port: int, requests: list[bytes], child: Child, seconds: float) -> tuple[float, float]:
    """(tokens per second, CPU microseconds of the server per token) once all streams run."""
    counts = [0] * len(requests)
    tasks = [asyncio.create_task(count_chunks(port, r, counts, i)) for i, r in enumerate(requests)]
    process = psutil.Process(child.process.pid)
    await asyncio.sleep(WARM_S)
    before, cpu, start = sum(counts), process.cpu_times(), time.perf_counter()
    await asyncio.sleep(seconds)
    tokens, used, took = sum(counts) - before, process.cpu_times(), time.perf_counter() - start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cpu_s = used.user + used.system - cpu.user - cpu.system
    return tokens / took, 1e6 * cpu_s / max(1, tokens)


def replica_row(streams: int, preset: str, seconds: float) -> tuple[float, float, float, float]:
    """(tokens/s, CPU us a token, lateness p99 in ms, mean step in s)."""
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        (port,) = free_ports(1)
        command = [*PYTHON, "-m", "mock_engine", "--port", str(port), "--mock-preset", preset, "--mock-log-dir", folder]
        child = children.start("replica", [*command, "--served-model-name", "m", "--mock-name", "r0"])
        wait_ready(child, f"http://127.0.0.1:{port}/health", 60)
        body = {"model": "m", "prompt": [5] * 64, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        requests = [post("/v1/completions", {**body, "seed": i}) for i in range(streams)]
        tokens_s, cpu_us = asyncio.run(measure(port, requests, child, seconds))
        children.stop()
        samples = [s for s in read_json_lines(Path(folder).glob("*.fleet.jsonl")) if s["step_us_mean"]][2:]
    late = sorted(s["late_us_p99"] for s in samples)
    return tokens_s, cpu_us, late[int(0.99 * (len(late) - 1))] / 1e3, samples[-1]["step_us_mean"] / 1e6


def baseline_row(streams: int, step_s: float, seconds: float) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        (port,) = free_ports(1)
        child = children.start("bare", [sys.executable, "-c", BASELINE, str(port)])
        wait_ready(child, f"http://127.0.0.1:{port}/health", 60)
        request = f"GET /stream?step_s={step_s}&n=1000000 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        return asyncio.run(measure(port, [request] * streams, child, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--preset", default="llama-3.1-8b-h100")
    args = parser.parse_args()
    print(f"one replica, {args.preset}, {args.seconds:g} s a row")
    columns = ("streams", "step ms", "tokens/s", "late p99 ms", "us/token", "bare us/chunk", "ratio")
    print("".join(f"{column:>14}" for column in columns))
    for streams in args.streams:
        tokens_s, cpu_us, late_ms, step_s = replica_row(streams, args.preset, args.seconds)
        _, bare_us = baseline_row(streams, step_s, args.seconds)
        row = (1e3 * step_s, tokens_s, late_ms, cpu_us, bare_us, cpu_us / bare_us)
        print(f"{streams:14}" + "".join(f"{value:14,.2f}" for value in row))


if __name__ == "__main__":
    main()
