"""Events that are lost, late, doubled, swapped or wrong, and a restart, as a subscriber sees them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mock_engine.tests.replica_process import free_ports
from mock_engine.tests.serving import Client, listening
from mock_engine.tests.test_http_events import subscribed


async def tell(client: Client, first: int, count: int = 1) -> None:
    """Requests that each cause one batch, number `first` and on."""
    for at in range(first, first + count):
        await client.post("/v1/completions", {"prompt": [at + 1] * 16, "max_tokens": 1})


def first_token(events: list[Any]) -> int:
    return int(events[0]["token_ids"][0]) - 1


async def sent(batch: Any, count: int) -> list[tuple[int, int]]:
    """(sequence, which batch it was when it was caused) of the next batches."""
    found = []
    for _ in range(count):
        seq, events = await batch()
        found.append((seq, first_token(events)))
    return found


async def test_a_dropped_batch_leaves_a_gap_in_the_sequence_and_a_replay_fills_it(tmp_path: Path) -> None:
    flags = ("--mock-fault", "event_drop=1", "--mock-log-dir", str(tmp_path), "--mock-name", "r0")
    async with subscribed(*flags) as (client, batch):
        await tell(client, 0, 2)
        await client.post("/mock/faults", {"event_drop": None})
        await tell(client, 2)
        assert await sent(batch, 1) == [(2, 2)]
        kept = client.replica.publishers[0]._kept
        assert [seq for seq, _ in kept] == [0, 1, 2]
    rows = [json.loads(line) for line in (tmp_path / "engine-r0.faults.jsonl").read_text().splitlines()]
    assert [(row["fault"], row["rank"], row["seq"]) for row in rows] == [("event_drop", 0, 0), ("event_drop", 0, 1)]


async def test_a_doubled_batch_comes_twice_under_one_number() -> None:
    async with subscribed("--mock-fault", "event_duplicate=1") as (client, batch):
        await tell(client, 0, 2)
        assert await sent(batch, 4) == [(0, 0), (0, 0), (1, 1), (1, 1)]


async def test_a_swapped_batch_comes_after_the_next_one_or_later_alone() -> None:
    flags = ("--mock-fault", "event_reorder=1", "--mock-fault", "event_reorder_ms=10000000")
    async with subscribed(*flags) as (client, batch):
        await tell(client, 0, 2)
        assert await sent(batch, 2) == [(1, 1), (0, 0)]
        await client.post("/mock/faults", {"event_reorder_ms": 1})
        await tell(client, 2)
        assert await sent(batch, 1) == [(2, 2)]
        assert (await client.get("/mock/faults"))["injected"] == {"event_reorder": 1}


async def test_delayed_batches_keep_their_order_also_when_the_delay_ends() -> None:
    async with subscribed("--mock-speedup", "1", "--mock-fault", "event_delay_ms=400") as (client, batch):
        await tell(client, 0, 2)
        assert client.replica.publishers[0].next_seq == 2
        await client.post("/mock/faults", {"event_delay_ms": 0})
        await tell(client, 2)
        assert await sent(batch, 3) == [(0, 0), (1, 1), (2, 2)]


async def test_a_late_publisher_begins_with_a_gap() -> None:
    async with subscribed("--mock-fault", "event_late_ms=100000000") as (client, batch):
        await tell(client, 0, 3)
        await client.post("/mock/faults", {"event_late_ms": 0})
        await tell(client, 3)
        assert await sent(batch, 1) == [(3, 3)]


@pytest.mark.parametrize("int_hashes", ["1", "0"])
async def test_a_wrong_parent_is_one_that_nobody_announced(int_hashes: str) -> None:
    env = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": int_hashes}
    async with subscribed("--mock-fault", "event_wrong_parent=1", env=env) as (client, batch):
        await client.post("/v1/completions", {"prompt": [7] * 16, "max_tokens": 20})
        _, (first,) = await batch()
        _, (second,) = await batch()
        assert first["parent_block_hash"] not in (None, *first["block_hashes"])
        assert second["parent_block_hash"] not in (None, *first["block_hashes"])
        assert type(second["parent_block_hash"]) is type(first["block_hashes"][0])


async def test_after_a_restart_in_place_the_sequence_is_0_and_nothing_was_removed() -> None:
    """Same address, empty cache: a subscriber that ignores the sequence cannot know."""
    port = free_ports()[0]
    async with subscribed(events={"endpoint": f"tcp://*:{port}"}, serve=listening) as (client, batch):
        await tell(client, 0, 2)
        assert await sent(batch, 2) == [(0, 0), (1, 1)]
        await client.post("/mock/restart")
        assert (await client.get("/mock/state"))["event_seq"] == [0]
        assert (await client.get("/kv_event_sources"))["0"]["endpoint"] == f"tcp://*:{port}"
        found: list[tuple[int, list[Any]]] = []
        for at in range(2, 200):  # until the subscriber has found its way back
            await tell(client, at)
            try:
                found.append(await batch_soon(batch))
                break
            except TimeoutError:
                continue
        ((seq, events),) = found
        assert seq == first_token(events) - 2
        assert {event["type"] for event in events} == {"BlockStored"}


async def batch_soon(batch: Any) -> tuple[int, list[Any]]:
    async with asyncio.timeout(0.1):
        found: tuple[int, list[Any]] = await batch()
        return found
