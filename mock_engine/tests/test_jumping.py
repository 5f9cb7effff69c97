"""Jumping over identical decode steps is indistinguishable from stepping; symbolic prompts place hits as tokens do."""

from hypothesis import given, settings

from mock_engine import BlockStored, EngineConfig, Run, StepCost
from mock_engine.tests.world import (
    FOREVER_US,
    Ask,
    Log,
    World,
    advance_by_next_us,
    advance_by_run_until,
    advance_by_step,
    play,
    runs_request,
    tokens_request,
    worlds,
)


def reference(world: World) -> Log:
    return play(world, runs_request, advance_by_run_until, world.engine(jumping=False))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_jumping_gives_every_instant_event_and_counter_that_stepping_gives(world: World) -> None:
    assert play(world, runs_request, advance_by_run_until, world.engine()) == reference(world)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_simulation_driven_by_next_us_sees_the_same(world: World) -> None:
    assert play(world, runs_request, advance_by_next_us, world.engine()) == reference(world)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_single_steps_inside_a_stretch_are_full_steps(world: World) -> None:
    assert play(world, runs_request, advance_by_step, world.engine()) == reference(world)


@settings(max_examples=60, deadline=None)
@given(worlds(stops=True))
def test_stop_tokens_end_a_jump_where_they_end_a_step(world: World) -> None:
    stepped = play(world, tokens_request, advance_by_run_until, world.engine(jumping=False))
    assert play(world, tokens_request, advance_by_next_us, world.engine()) == stepped


@settings(max_examples=60, deadline=None)
@given(worlds(jitter=True))
def test_jitter_draws_the_same_with_and_without_jumping(world: World) -> None:
    assert play(world, runs_request, advance_by_next_us, world.engine()) == reference(world)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_a_symbolic_prompt_is_placed_like_the_tokens_it_stands_for(world: World) -> None:
    symbolic = reference(world)
    real = play(world, tokens_request, advance_by_run_until, world.engine())
    keys: dict[int, bytes] = {}
    for (at_us, event), (real_at_us, real_event) in zip(symbolic.events, real.events, strict=True):
        assert at_us == real_at_us
        assert type(event) is type(real_event)
        for key, digest in zip(event.block_hashes, real_event.block_hashes, strict=True):
            assert keys.setdefault(key, digest) == digest
        if isinstance(event, BlockStored):
            assert (event.parent_block_hash is None) == (real_event.parent_block_hash is None)
            assert len(event.contents) * event.block_size == len(real_event.token_ids)
    assert len(set(keys.values())) == len(keys)
    symbolic.events = real.events = []
    assert symbolic == real


def test_a_jump_covers_all_decodes_of_a_lone_request() -> None:
    cost = StepCost(step_fixed_us=10.0, kv_read_ns=3.0)
    world = World(EngineConfig(num_gpu_blocks=200), cost, (Ask(0, ((1, 100),), 2, 1000),))
    engine = world.engine()
    engine.submit(runs_request("r0", world.asks[0], world.config), 0)
    pieces = engine.run_until(FOREVER_US)
    assert [piece.steps if isinstance(piece, Run) else 1 for piece in pieces] == [1, 998, 1]


def test_a_jump_stops_at_the_last_step_that_starts_before_the_horizon() -> None:
    world = World(EngineConfig(num_gpu_blocks=200), StepCost(step_fixed_us=10.0), (Ask(0, ((1, 100),), 2, 1000),))
    engine = world.engine()
    engine.submit(runs_request("r0", world.asks[0], world.config), 0)
    engine.run_until(1)
    (run,) = engine.run_until(50)  # steps start at 10, 20, 30, 40, and one at 50 exactly is left
    assert (run.steps, run.starts_us, run.ends_us) == (4, 10, 50)
    assert engine.run_until(50) == []
    (run,) = engine.run_until(51)
    assert (run.steps, run.ends_us) == (1, 60)


def test_a_queue_that_waits_for_a_seat_does_not_stop_a_jump() -> None:
    config = EngineConfig(num_gpu_blocks=200, max_num_seqs=1)
    world = World(config, StepCost(step_fixed_us=10.0), (Ask(0, ((1, 100),), 2, 1000),))
    engine = world.engine()
    for i in range(3):
        engine.submit(runs_request(f"r{i}", world.asks[0], world.config), 0)
    assert len(engine.run_until(9_000)) == 2  # the prefill and the jump
    engine.submit(runs_request("r3", world.asks[0], world.config), 9_000)
    (run,) = engine.run_until(9_500)
    assert (run.steps, run.waiting) == (50, 3)
