"""KV events as a replica sends them (section C), seen by a subscriber."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from mock_engine import generated_token_ids
from mock_engine.tests.replica_process import free_ports
from mock_engine.tests.serving import DEV, Client, serving


@asynccontextmanager
async def subscribed(
    *flags: str, events: dict[str, Any] | None = None, env: dict[str, str] | None = None, serve: Any = serving
) -> AsyncIterator[tuple[Client, Any]]:
    """A replica, and a function that gives the next batch of its events as (sequence, events)."""
    port = free_ports()[0]
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", **(events or {})}
    first_port = int(config["endpoint"].rpartition(":")[2])
    context = zmq.asyncio.Context()
    context.set(zmq.BLOCKY, 0)
    try:
        async with serve("--kv-events-config", json.dumps(config), *flags, env=env) as client:
            sock = context.socket(zmq.SUB)
            sock.setsockopt_string(zmq.SUBSCRIBE, "")
            for rank in range(client.replica.options.data_parallel_size):
                sock.connect(f"tcp://127.0.0.1:{first_port + rank}")
            await asyncio.sleep(0.15)  # a subscription takes a moment; nothing is sent before it

            async def batch() -> tuple[int, list[Any]]:
                async with asyncio.timeout(5):
                    _, seq, payload = await sock.recv_multipart()
                decoded = msgspec.msgpack.decode(payload)
                ranks.append(decoded[2])
                return int.from_bytes(seq, "big"), decoded[1]

            ranks: list[int] = []
            batch.ranks = ranks  # type: ignore[attr-defined]
            yield client, batch
    finally:
        context.destroy(linger=0)  # whatever failed above, no socket outlives the test


async def test_stored_blocks_tell_tokens_parents_and_the_session() -> None:
    async with subscribed() as (client, batch):
        prompt = list(range(2000, 2040))
        await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 9, "seed": 1}, **{"X-Session-ID": "s1"})
        seq, (stored,) = await batch()
        assert seq == 0
        assert list(stored)[:9] == [
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
            "extra_keys",
        ]  # fmt: skip
        assert (stored["token_ids"], stored["parent_block_hash"]) == (prompt[:32], None)
        assert (stored["extra_keys"], stored["group_idx"], stored["session_id"]) == ([None, None], 0, "s1")
        seq, (later,) = await batch()
        assert seq == 1
        assert later["parent_block_hash"] == stored["block_hashes"][-1]
        assert later["token_ids"] == prompt[32:] + generated_token_ids(1, 0, 8)


async def test_old_releases_get_arrays_and_bytes() -> None:
    env = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    async with subscribed("--kv-event-format", "arrays", env=env) as (client, batch):
        await client.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 1})
        _, (stored,) = await batch()
        assert stored[0] == "BlockStored"
        assert len(stored[1][0]) == 32
        assert stored[3:8] == [[7] * 16, 16, None, "GPU", None]


@pytest.mark.parametrize(
    ("mode", "idle", "next_step"),
    [
        ("next-step", 0, ["AllBlocksCleared", "BlockStored"]),
        ("eager", 1, ["BlockStored"]),
        ("never", 0, ["BlockStored"]),
    ],
)
async def test_a_reset_is_announced_at_the_next_step_at_once_or_never(
    mode: str, idle: int, next_step: list[str]
) -> None:
    async with subscribed("--mock-clear-event", mode, env=DEV) as (client, batch):
        await client.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 1})
        await batch()
        await client.post("/reset_prefix_cache")
        assert (await client.get("/mock/state"))["event_seq"] == [1 + idle]
        if idle:
            assert [event["type"] for event in (await batch())[1]] == ["AllBlocksCleared"]
        await client.post("/v1/completions", {"prompt": [8] * 20, "max_tokens": 1})
        assert [event["type"] for event in (await batch())[1]] == next_step


async def test_a_full_report_announces_the_reused_prefix_again() -> None:
    async with subscribed() as (client, batch):
        ask = {"prompt": [7] * 40, "max_tokens": 1}
        await client.post("/v1/completions", ask)
        first = (await batch())[1][0]
        await client.post("/v1/completions", {**ask, "vllm_xargs": {"kv_cache_report_mode": "full"}})
        again = (await batch())[1][0]
        assert (again["block_hashes"], again["parent_block_hash"]) == (first["block_hashes"], None)


async def test_event_sources_tell_each_ranks_endpoint() -> None:
    async with serving() as client:
        assert await client.get("/kv_event_sources") == {}
    port, _, replay, _ = free_ports(4)
    events = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}", "topic": "t"}
    async with subscribed("--data-parallel-size", "2", events=events) as (client, _):
        sources = await client.get("/kv_event_sources")
        assert [sources[rank]["endpoint"] for rank in ("0", "1")] == [f"tcp://*:{port}", f"tcp://*:{port + 1}"]
        assert list(sources["0"]) == [
            "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm",
            "max_queue_size", "topic",
        ]  # fmt: skip


async def test_each_rank_publishes_at_a_port_of_its_own_and_says_which_it_is() -> None:
    port, *_ = free_ports(2)
    async with subscribed("--data-parallel-size", "2", events={"endpoint": f"tcp://*:{port}"}) as (client, batch):
        for rank in ("1", "0"):
            ask = {"prompt": [int(rank) + 5] * 20, "max_tokens": 1}
            await client.post("/v1/completions", ask, **{"X-data-parallel-rank": rank})
            seq, (stored,) = await batch()
            assert (seq, stored["token_ids"]) == (0, [int(rank) + 5] * 16)
        assert batch.ranks == [1, 0]
        text = await client.get("/metrics")
        for rank in ("0", "1"):
            assert f'vllm:prompt_tokens_total{{engine="{rank}",model_name="m"}} 20.0' in text


async def test_ranks_share_a_replica_without_sharing_a_cache() -> None:
    async with serving("--data-parallel-size", "2", "--enable-prompt-tokens-details") as client:
        ask = {"prompt": [5] * 40, "max_tokens": 1}
        cached = [
            (await client.post("/v1/completions", ask, **{"X-data-parallel-rank": rank}))["usage"]
            for rank in ("0", "1", "0", "1")
        ]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached] == [0, 0, 32, 32]
