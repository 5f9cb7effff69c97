"""Resident memory of one replica with 100,000 KV blocks and 256 running requests, beside an empty small one.

    python benchmarks/replica_memory.py [--blocks 100000] [--requests 256]

The replica is started as a user would, KV events and replay buffer included, on a step cost of its own that decodes
slowly enough to hold all requests at once. They are streamed over HTTP with token-id prompts that together fill almost
every block; the figure is the peak while all of them run. The limit is 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from harness.processes import PYTHON, Child, Children, free_ports, wait_ready
from mock_engine import Preset
from mock_engine.presets import preset_toml

MB = 1e6
LIMIT_MB = 300
BLOCK = 16
ANSWER_TOKENS = 300
STEP_US = 40_000  # long enough for a Python process to stream 256 tokens in
POLL_S = 0.05
WAIT_S_MAX = 180
SMALL_BLOCKS = 1_000


@dataclass(frozen=True)
class Replica:
    child: Child
    url: str

    def rss_mb(self) -> float:
        return float(psutil.Process(self.child.process.pid).memory_info().rss / MB)


@contextlib.contextmanager
def started(folder: Path, blocks: int) -> Iterator[Replica]:
    preset = Preset(
        name="slow", step_fixed_us=STEP_US, weight_read_us=0, token_us=0, prefill_attention_ns=0, sequence_us=0,
        kv_read_ns=0, kv_bytes_per_token=131_072, kv_blocks_16=blocks,
    )  # fmt: skip
    file = folder / "slow.toml"
    file.write_text(preset_toml(preset), encoding="utf-8")
    port, events = free_ports(2)
    kv_events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{events}"}
    command = [
        *PYTHON, "-m", "mock_engine", "--host", "127.0.0.1", "--port", str(port), "--mock-preset", str(file),
        "--kv-events-config", json.dumps(kv_events),
    ]  # fmt: skip
    with Children(folder) as children:
        child = children.start("replica", command)
        url = f"http://127.0.0.1:{port}"
        wait_ready(child, f"{url}/health", WAIT_S_MAX)
        yield Replica(child, url)


async def state(client: aiohttp.ClientSession, url: str) -> dict[str, int]:
    async with client.get(f"{url}/mock/state") as answer:
        found: dict[str, int] = await answer.json()
        return found


async def stream(client: aiohttp.ClientSession, url: str, prompt: list[int], answer_tokens: int) -> None:
    body = {
        "model": "mock-model", "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "stream": True,
        "seed": prompt[0],
    }  # fmt: skip
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            pass


async def fill(replica: Replica, blocks: int, requests: int) -> tuple[float, float, int]:
    """(MB idle, MB at the peak, used blocks at the peak) with all requests running."""
    prompt_tokens = (blocks - 1) // requests * BLOCK - ANSWER_TOKENS
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        idle_mb = peak_mb = replica.rss_mb()
        used = 0
        prompts = ([1000 + (i * 7919 + k * k) % 30_000 for k in range(prompt_tokens)] for i in range(requests))
        streams = [asyncio.create_task(stream(client, replica.url, prompt, ANSWER_TOKENS)) for prompt in prompts]
        together = False
        while not all(task.done() for task in streams):
            now = await state(client, replica.url)
            peak_mb = max(peak_mb, replica.rss_mb())
            used = max(used, now["used_blocks"])
            together = together or now["running"] == requests
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*streams)
        if not together:
            raise SystemExit(f"the {requests} requests never ran all at once, so this measured something else")
        return idle_mb, peak_mb, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    if (args.blocks - 1) // args.requests * BLOCK <= ANSWER_TOKENS:
        parser.error(f"--blocks {args.blocks} hold no {args.requests} requests of {ANSWER_TOKENS} tokens: give more")
    with tempfile.TemporaryDirectory() as folder:
        with started(Path(folder), SMALL_BLOCKS) as replica:
            small_mb = replica.rss_mb()
        with started(Path(folder), args.blocks) as replica:
            idle_mb, peak_mb, used = asyncio.run(fill(replica, args.blocks, args.requests))
    print(f"{'':44}{'MB':>7}{'ratio':>8}")
    print(f"{f'idle, {SMALL_BLOCKS:,} blocks':44}{small_mb:7.0f}{1:8.2f}")
    print(f"{f'idle, {args.blocks:,} blocks':44}{idle_mb:7.0f}{idle_mb / small_mb:8.2f}")
    full = f"{args.requests} running, {used:,} of {args.blocks:,} blocks in use"
    print(f"{full:44}{peak_mb:7.0f}{peak_mb / small_mb:8.2f}")
    print(f"limit {LIMIT_MB} MB: {'kept' if peak_mb < LIMIT_MB else 'EXCEEDED'}")


if __name__ == "__main__":
    main()
