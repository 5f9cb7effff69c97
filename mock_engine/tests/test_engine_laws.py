"""Laws that hold in any world, whatever is asked of the engine."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import AllBlocksCleared, BlockRemoved, Engine, KvEvent, RunSequence
from mock_engine.events import BlockHash
from mock_engine.tests.world import (
    Log,
    Runs,
    World,
    advance_by_next_us,
    advance_by_run_until,
    play,
    prompts,
    runs_request,
    worlds,
)


def check_state(engine: Engine) -> None:
    scheduler, pool = engine._scheduler, engine._scheduler.pool
    waiting = list(pool.free_queue)
    assert pool.free + pool.used == pool.total == len(pool.blocks) - 1
    assert len(waiting) == pool.free == len({block.index for block in waiting})
    holders = [0] * len(pool.blocks)
    for state in scheduler.running:
        for block in state.blocks:
            holders[block.index] += 1
    holders[0] += 1  # the null block
    assert holders == [block.holders for block in pool.blocks]
    assert not any(block.holders for block in waiting)
    assert pool.cache.blocks == sum(block.key is not None for block in pool.blocks)
    decoding = {block.index for state in scheduler.running if state.prefilled for block in state.blocks}
    assert pool.active_decode_blocks == len(decoding)
    snapshot = engine.snapshot()
    alive = snapshot.running + snapshot.waiting
    assert snapshot.received == snapshot.rejected + snapshot.finished + snapshot.aborted + alive


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_blocks_and_requests_are_conserved_at_every_step(world: World) -> None:
    engine = world.engine()

    def advance(engine: Engine, horizon_us: int, log: Log) -> None:
        while engine.next_us() is not None and engine.ready_us < horizon_us:
            before = engine.ready_us
            advance_by_run_until(engine, before + 1, log)
            check_state(engine)

    log = play(world, runs_request, advance, engine)
    last = log.snapshots[-1]
    assert (last.running, last.waiting, last.used_blocks) == (0, 0, 0)
    assert last.received == len(world.asks)
    assert last.generation_tokens == len(log.tokens)
    assert last.preemptions == len(log.preempted)
    assert last.finished == len(log.finished)
    assert last.evicted_blocks == sum(isinstance(event, BlockRemoved) for _, event in log.events)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_the_same_input_gives_the_same_event_log(world: World) -> None:
    first = play(world, runs_request, advance_by_next_us, world.engine())
    assert play(world, runs_request, advance_by_next_us, world.engine()) == first


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_every_request_is_finished_rejected_or_aborted_in_the_end(world: World) -> None:
    log = play(world, runs_request, advance_by_run_until, world.engine())
    ended = [name for _, name, _ in log.finished] + log.refused + log.aborted
    assert sorted(ended) == sorted(f"r{i}" for i in range(len(world.asks)))
    for i, ask in enumerate(world.asks):
        got = sum(name == f"r{i}" for _, name in log.tokens)
        assert got <= ask.max_tokens
        if any(name == f"r{i}" for _, name, _ in log.finished):
            room = world.config.max_model_len - sum(tokens for _, tokens in ask.runs)
            capacity = world.config.usable_blocks * world.config.block_size + 1 - sum(tokens for _, tokens in ask.runs)
            assert got == min(ask.max_tokens, room, capacity)


class Index:
    """What a router can know: copies of each key, counted from events alone."""

    def __init__(self) -> None:
        self.copies: Counter[BlockHash] = Counter()
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def observe(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
        elif isinstance(event, BlockRemoved):
            self.copies -= Counter(event.block_hashes)
        else:
            self.copies += Counter(event.block_hashes)
            parent = event.parent_block_hash
            assert parent is None or self.copies[parent]
            for key in event.block_hashes:
                assert self.parents.setdefault(key, parent) == parent
                parent = key

    def longest(self, keys: Sequence[BlockHash]) -> int:
        return next((i for i, key in enumerate(keys) if not self.copies[key]), len(keys))


@settings(max_examples=80, deadline=None)
@given(worlds(reports=False), st.lists(prompts(), max_size=8))
def test_an_index_fed_by_events_alone_knows_the_longest_cached_prefix(world: World, probes: list[Runs]) -> None:
    """At every instant, for prompts old and new; and every cached block's parent is cached too."""
    size = world.config.block_size
    index = Index()

    def advance(engine: Engine, horizon_us: int, log: Log) -> None:
        seen = len(log.events)
        advance_by_run_until(engine, horizon_us, log)
        for _, event in log.events[seen:]:
            index.observe(event)
        pool = engine._scheduler.pool
        assert set(index.copies) == pool.cache.keys()
        assert index.copies.total() == pool.cache.blocks
        assert all(index.parents[key] is None or index.parents[key] in index.copies for key in index.copies)
        for runs in [*probes, *(ask.runs for ask in world.asks)]:
            sequence = RunSequence(runs, 99, block_size=size)
            blocks = sequence.prompt_tokens // size
            assert index.longest(sequence.block_keys(blocks)[:blocks]) == len(pool.hits(sequence, blocks))

    play(world, runs_request, advance, world.engine())


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_time_never_goes_backwards_and_results_never_precede_their_cause(world: World) -> None:
    log = play(world, runs_request, advance_by_next_us, world.engine())
    instants = [at_us for at_us, _ in log.tokens]
    assert instants == sorted(instants)
    arrived = {f"r{i}": ask.at_us for i, ask in enumerate(world.asks)}
    for name, _, at_us, _ in log.admitted:
        assert at_us >= arrived[name]
    assert all(at_us > arrived[name] for at_us, name in log.tokens)
