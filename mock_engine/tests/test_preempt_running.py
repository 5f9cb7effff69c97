"""A cache reset that does not wait: everything that runs is thrown out, keeps its place and its answer."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import AllBlocksCleared, Engine, EngineConfig, Request, RunSequence, StepCost
from mock_engine.tests.test_engine_laws import check_state
from mock_engine.tests.world import FOREVER_US, Advance, Log, World, advance_by_run_until, play, runs_request, worlds


def resetting(every: int, inner: Advance) -> Advance:
    """Preempts and resets each time that `every` more pieces of the world's history have been played."""
    calls = 0

    def advance(engine: Engine, horizon_us: int, log: Log) -> None:
        nonlocal calls
        inner(engine, horizon_us, log)
        calls += 1
        if calls % every == 0:
            log.preempted += [(horizon_us, name) for name in engine.preempt_running()]
            assert engine.reset_prefix_cache()
            check_state(engine)
            assert engine.snapshot().running == engine.snapshot().cached_blocks == 0

    return advance


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(1, 4))
def test_whoever_is_thrown_out_still_gets_the_whole_answer(world: World, every: int) -> None:
    disturbed = play(world, runs_request, resetting(every, advance_by_run_until), world.engine())
    last = disturbed.snapshots[-1]
    assert (last.running, last.waiting, last.used_blocks) == (0, 0, 0)
    assert last.received == last.rejected + last.finished + last.aborted
    assert last.preemptions == len(disturbed.preempted)
    assert last.generation_tokens == len(disturbed.tokens)
    for i, ask in enumerate(world.asks):
        if ask.abort_after_us is None and f"r{i}" not in disturbed.refused:
            calm = play(World(world.config, world.cost, (ask,)), runs_request, advance_by_run_until, world.engine())
            assert sum(name == f"r{i}" for _, name in disturbed.tokens) == len(calm.tokens)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(1, 4))
def test_jumping_still_equals_stepping(world: World, every: int) -> None:
    advance = resetting(every, advance_by_run_until)
    stepped = play(world, runs_request, resetting(every, advance_by_run_until), world.engine(jumping=False))
    assert play(world, runs_request, advance, world.engine()) == stepped


def request(name: str, prompt: int, answer: int) -> Request:
    return Request(request_id=name, sequence=RunSequence(((ord(name), prompt),), ord(name) + 500), max_tokens=answer)


def test_the_queue_keeps_the_order_in_which_requests_ran_and_came() -> None:
    engine = Engine(EngineConfig(num_gpu_blocks=101, max_num_seqs=2), cost=StepCost(step_fixed_us=10.0), rng=Random(0))
    for name in "abc":
        engine.submit(request(name, 40, 100), 0)
    engine.run_until(105)
    assert engine.reset_prefix_cache() is False
    assert engine.preempt_running() == ("b", "a")
    assert engine.reset_prefix_cache() is True
    assert engine.preempt_running() == ()
    first = engine.run_until(111)[0]
    assert [(admission.request_id, admission.cached_tokens) for admission in first.admitted] == [("a", 0), ("b", 0)]
    assert isinstance(first.kv_events[0], AllBlocksCleared)
    assert set(first.running) == {"a", "b"}
    ended = [finish.request_id for piece in engine.run_until(FOREVER_US) for finish in getattr(piece, "finished", ())]
    assert ended == ["a", "b", "c"]
    assert engine.snapshot().preemptions == 2
