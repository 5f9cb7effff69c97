"""What the field saw engines and their gauges do wrong, in ours: on the real engine, its wire and its metrics page."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from mock_engine import Engine, EngineConfig, Request, RequestError, RunSequence, StepCost
from mock_engine.tests.serving import serving
from routers.metrics_poll import parse_metrics


def small_cache(**options: int) -> Engine:
    config = EngineConfig(num_gpu_blocks=51, **options)  # 50 that can be used
    return Engine(config, cost=StepCost(step_fixed_us=1000), rng=Random(0))


def ask(name: str, run: int, prompt: int, answer: int) -> Request:
    return Request(request_id=name, sequence=RunSequence(((run, prompt),), run + 1000), max_tokens=answer)


@pytest.mark.parametrize("budget", [17, 64, 8192])
@pytest.mark.parametrize("seats", [3, 256])
def test_ten_requests_in_a_cache_for_two_all_finish_and_never_stand_still(budget: int, seats: int) -> None:
    """Undersized caches in the field hung: a request that does not fit is requeued for ever, or all running decodes
    take the last block from each other. Fifty blocks and ten requests of 300 tokens in and 300 out: in no thousand
    steps does every request's work stay below what it had reached before, and nothing is lost on the way."""
    engine = small_cache(max_num_batched_tokens=budget, max_num_seqs=seats)
    for number in range(10):
        engine.submit(ask(f"r{number}", number, 300, 300), 0)
    with pytest.raises(RequestError, match=r"57 KV cache blocks .* 50"):
        engine.submit(ask("too-long", 99, 900, 1), 0)
    done: Counter[str] = Counter()
    steps = last_progress = longest = 0
    now_us = 0
    while (step := engine.step(now_us)) is not None:
        now_us = step.ends_us
        steps += 1
        if step.outputs:  # a token counts once, however often what it stands on is computed again
            done.update(step.outputs)
            longest = max(longest, steps - last_progress)
            last_progress = steps
        snapshot = engine.snapshot()
        alive = snapshot.running + snapshot.waiting
        assert snapshot.received == snapshot.finished + snapshot.rejected + snapshot.aborted + alive
    assert longest < 1000
    assert done == {f"r{number}": 300 for number in range(10)}
    assert (engine.snapshot().finished, engine.snapshot().rejected) == (10, 1)
    assert engine.snapshot().preemptions <= 10 * 300 // 16  # at most one for each block that a request ever takes


async def test_gauges_move_as_a_router_that_reads_them_needs() -> None:
    """Routers score on gauges, and mocks in the field served constants or names of their own. Three seats and eight
    requests: running stays at the limit, the rest waits, and cache use is the used share of the blocks that can be."""
    async with serving(
        "--max-num-seqs", "3", "--mock-speedup", "1", "--num-gpu-blocks-override", "201", "--legacy-metrics"
    ) as client:
        body = {"prompt": [7] * 333, "max_tokens": 2500}
        asked = [asyncio.create_task(client.ask("POST", "/v1/completions", body)) for _ in range(8)]
        engine = client.replica.drivers[0]
        while engine.snapshot().running < 3 or client.replica.in_flight < 8:
            await asyncio.sleep(0.005)
        before = engine.snapshot()
        while engine.snapshot().steps < before.steps + 3:  # gauges are set at the end of each step
            await asyncio.sleep(0.005)
        page = await client.get("/metrics")
        after = engine.snapshot()
        read = parse_metrics(page, 0)
        assert read is not None
        assert (read.running, read.waiting) == (3, 5)
        assert before.used_blocks <= round(read.kv_usage * 200, 6) <= after.used_blocks
        assert before.used_blocks > 0
        old, new = (
            [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(name)]
            for name in ("vllm:gpu_cache_usage_perc{", "vllm:kv_cache_usage_perc{")
        )
        assert old == new != []
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        while (idle := parse_metrics(await client.get("/metrics"), 0)) is None or idle.running:
            await asyncio.sleep(0.005)
        assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
