"""A full event queue holds the engine up until the publisher takes a batch: no event is lost, no token is early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from mock_engine import (
    BlockHasher,
    BlockRemoved,
    Engine,
    EngineConfig,
    FaultPlan,
    Faults,
    Request,
    StepCost,
    TokenSequence,
)
from mock_engine.bodies import CompletionBodies
from mock_engine.clock import Clock
from mock_engine.driver import Driver
from mock_engine.metrics import EngineMetrics
from mock_engine.options import KvEventsConfig, ServerOptions
from mock_engine.outbox import Outbox
from mock_engine.publisher import Publisher
from mock_engine.reply import Prompt, Reply
from mock_engine.sampling import Sampling
from mock_engine.streams import Choice
from mock_engine.tests.replica_process import free_ports
from mock_engine.tests.serving import serving
from mock_engine.tokenizer import WordTokenizer

SPEED = 1000.0


class Gate:
    """A queue that takes `free` batches; then the publisher has stalled."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.batches: list[Any] = []
        self.waiting: Callable[[], None] | None = None

    def room(self, then: Callable[[], None]) -> bool:
        if self.free > len(self.batches):
            return True
        self.waiting = then
        return False

    def drain(self) -> None:
        self.free += 1
        then, self.waiting = self.waiting, None
        assert then is not None
        then()


def choice_of(ids: list[int], max_tokens: int) -> Choice:
    prompt = Prompt(ids, None, 1)
    reply = Reply(CompletionBodies("cmpl-1", 7, "m", "fp"), [prompt], stream=False)
    sequence = TokenSequence(ids, hasher=BlockHasher(), output=3)
    request = Request(request_id="r", sequence=sequence, max_tokens=max_tokens)
    return Choice(reply, prompt, request, sequence, Sampling(max_tokens=max_tokens), WordTokenizer())


async def test_a_stalled_publisher_stops_the_engine_and_lets_it_go_on_where_it_stood() -> None:
    gate, clock, ended = Gate(1), Clock(speedup=SPEED), asyncio.Event()
    engine = Engine(EngineConfig(num_gpu_blocks=20), cost=StepCost(step_fixed_us=1000), rng=Random(0))
    metrics = EngineMetrics(0, 4096)
    driver = Driver(engine, clock, metrics, gate.batches.append, lambda *_: ended.set(), room=gate.room)
    choice = choice_of([5] * 16, 40)
    driver.submit(choice, clock.now_us())
    while gate.waiting is None:
        await asyncio.sleep(0.001)
    assert (choice.count, engine.snapshot().steps, len(gate.batches)) == (16, 17, 1)
    held_at_us = clock.now_us()
    await asyncio.sleep(0.02)
    assert (choice.count, engine.snapshot().steps, len(gate.batches)) == (16, 17, 1)
    gate.drain()
    assert choice.count == 17
    assert choice.last_us is not None
    assert choice.last_us > held_at_us, "the token could not be seen before its events"
    while gate.waiting is None:
        await asyncio.sleep(0.001)
    assert (choice.count, len(gate.batches)) == (32, 2)
    gate.drain()
    await asyncio.wait_for(ended.wait(), 10)
    assert (choice.finish_reason, choice.count) == ("length", 40)
    driver.close()


@pytest.mark.parametrize("limit", [1, 3])
async def test_the_queue_is_the_batches_that_have_not_left(limit: int) -> None:
    (port,) = free_ports()
    config = KvEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}", max_queue_size=limit
    )
    clock = Clock(speedup=SPEED)
    publisher = Publisher(config)
    plan = FaultPlan(Faults(event_delay_ms=2000), "x")
    outbox = Outbox(publisher, 0, ServerOptions(kv_events=config), plan, clock, lambda *_, **__: None)
    drained = asyncio.Event()
    try:
        for _ in range(limit):
            assert outbox.room(drained.set)
            outbox([BlockRemoved((1,))])
        assert not outbox.room(drained.set)
        await asyncio.wait_for(drained.wait(), 10)
        assert outbox.room(drained.set)
        assert publisher.next_seq == limit
    finally:
        outbox.close()
        publisher.close()


async def test_without_a_limit_nobody_waits() -> None:
    (port,) = free_ports()
    config = KvEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}", max_queue_size=0)
    publisher = Publisher(config)
    plan = FaultPlan(Faults(event_delay_ms=2_000_000), "x")
    outbox = Outbox(publisher, 0, ServerOptions(kv_events=config), plan, Clock(), lambda *_, **__: None)
    try:
        for _ in range(50):
            assert outbox.room(lambda: None)
            outbox([BlockRemoved((1,))])
    finally:
        outbox.close()
        publisher.close()


async def test_an_answer_takes_as_long_as_its_events_wait_for_room() -> None:
    """Three batches through a queue of one whose publisher is two seconds late."""
    (port,) = free_ports()
    config = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}", "max_queue_size": 1}}'
    async with serving("--kv-events-config", config, "--mock-fault", "event_delay_ms=2000") as client:
        ask = {"prompt": [5] * 16, "max_tokens": 40, "seed": 3}
        answer = await client.post("/v1/completions", ask)
        assert answer["usage"]["completion_tokens"] == 40
        assert await client.metric("vllm:e2e_request_latency_seconds_sum") > 4
        assert client.replica.publishers[0].next_seq == 3
