"""An engine that gets nowhere says so and ends, instead of turning for ever."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mock_engine import Engine, EngineConfig, Request, RunSequence, StepCost, StuckError
from mock_engine.scheduler import Plan, Scheduler
from mock_engine.tests.world import FOREVER_US
from mock_engine.watchdog import PATIENCE_US, STEPS_MAX


class Idle(Scheduler):
    """Takes requests and never does anything with them."""

    def schedule(self) -> Plan:
        return Plan()


class Forgetful(Scheduler):
    """Computes the first tokens of a prompt again and again."""

    def schedule(self) -> Plan:
        for state in self.preempt_running():
            state.preemptions = 0
        return super().schedule()


def engine(make_scheduler: Any, step_us: float = 100_000, **options: Any) -> Engine:
    config = EngineConfig(**{"num_gpu_blocks": 51, **options})
    return Engine(config, cost=StepCost(step_fixed_us=step_us), rng=Random(0), make_scheduler=make_scheduler)


def ask(name: str, prompt: int = 40, answer: int = 5) -> Request:
    return Request(request_id=name, sequence=RunSequence(((1, prompt),), 2), max_tokens=answer)


def test_half_a_minute_of_steps_without_progress_is_an_error_that_names_requests_and_blocks() -> None:
    one = engine(Idle)
    one.submit(ask("r1"), 0)
    one.submit(ask("r2", 100), 0)
    with pytest.raises(StuckError) as stuck:
        one.run_until(FOREVER_US)
    said = str(stuck.value)
    assert "no request got any further in 30.0 s of engine time (300 steps)" in said
    assert "r1 (waiting) needs 3 KV cache blocks, holds 0, and has computed 0 of 40 tokens" in said
    assert "r2 (waiting) needs 7 KV cache blocks" in said
    assert "50 of 50 KV cache blocks are available. Restart the replica" in said
    assert one.ready_us == PATIENCE_US


def test_stepping_ends_like_running() -> None:
    one = engine(Idle)
    one.submit(ask("r1"), 0)
    for _ in range(299):
        assert one.step(one.ready_us) is not None
    with pytest.raises(StuckError):
        one.step(one.ready_us)


def test_steps_that_take_no_time_are_counted() -> None:
    one = engine(Idle, step_us=0)
    one.submit(ask("r1"), 0)
    with pytest.raises(StuckError, match=f"{STEPS_MAX} steps"):
        one.run_until(FOREVER_US)


def test_computing_the_same_tokens_again_is_no_progress() -> None:
    one = engine(Forgetful, max_num_batched_tokens=16, enable_prefix_caching=False)
    one.submit(ask("r1", 40), 0)
    with pytest.raises(StuckError, match="has computed 16 of 40 tokens"):
        one.run_until(FOREVER_US)


def test_a_long_prompt_progresses_without_an_output() -> None:
    one = engine(Scheduler, step_us=20_000_000, max_num_batched_tokens=16)
    one.submit(ask("r1", 160, 1), 0)
    pieces = one.run_until(FOREVER_US)
    assert [len(piece.outputs) for piece in pieces] == [0] * 9 + [1]


def test_time_that_nobody_steps_in_does_not_count() -> None:
    one = engine(Idle, step_us=20_000_000)
    one.submit(ask("r1"), 0)
    one.step(0)
    assert one.abort("r1", 20_000_000)
    one.submit(ask("r2"), 3_600_000_000)
    assert one.step(3_600_000_000) is not None
    with pytest.raises(StuckError, match=r"40\.0 s of engine time \(2 steps\)"):
        one.step(7_200_000_000)


def test_an_error_names_five_requests_and_counts_the_rest() -> None:
    one = engine(Idle)
    for at in range(8):
        one.submit(ask(f"r{at}"), 0)
    with pytest.raises(StuckError, match=r"r4 .* and 3 more;") as stuck:
        one.run_until(FOREVER_US)
    assert "r5" not in str(stuck.value)
