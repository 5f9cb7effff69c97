"""Random engines and workloads for the property tests, and a flat log in which two drivers can be compared.

Pools are tiny and run ids few, so that prompts share prefixes, answers repeat, and requests are preempted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from mock_engine import (
    BlockHasher,
    Engine,
    EngineConfig,
    Request,
    RequestError,
    Run,
    RunSequence,
    Snapshot,
    Step,
    StepCost,
    TokenSequence,
)

Runs = tuple[tuple[int, int], ...]

HASHER = BlockHasher()


@dataclass(frozen=True)
class Ask:
    """A request to come: at `at_us`, aborted `abort_after_us` later, if that is not None."""

    at_us: int
    runs: Runs
    output_run: int
    max_tokens: int
    abort_after_us: int | None = None
    priority: int = 0
    stop: frozenset[int] = frozenset()
    report_full: bool = False


@dataclass(frozen=True)
class World:
    config: EngineConfig
    cost: StepCost
    asks: tuple[Ask, ...]
    seed: int = 0

    def engine(self, *, jumping: bool = True) -> Engine:
        return Engine(self.config, cost=self.cost, rng=Random(self.seed), jumping=jumping)


@dataclass
class Log:
    """Everything that is visible outside, with its instant, in order."""

    tokens: list[tuple[int, str]] = field(default_factory=list)
    events: list[tuple[int, Any]] = field(default_factory=list)
    admitted: list[tuple[str, int, int, bool]] = field(default_factory=list)
    preempted: list[tuple[int, str]] = field(default_factory=list)
    finished: list[tuple[int, str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def add(self, piece: Step | Run) -> None:
        if isinstance(piece, Run):
            instants = piece.token_instants_us().tolist()
            assert instants == [piece.token_us(j) for j in range(piece.steps)]
            assert instants[-1] == piece.ends_us
            for instant in instants:
                self.tokens += [(instant, name) for name in piece.outputs]
            for j, instant, events in piece.kv_events:
                assert instant == instants[j]
                self.events += [(instant, event) for event in events]
            return
        self.tokens += [(piece.ends_us, name) for name in piece.outputs]
        self.events += [(piece.ends_us, event) for event in piece.kv_events]
        self.admitted += [tuple(admission) for admission in piece.admitted]
        self.preempted += [(piece.ends_us, name) for name in piece.preempted]
        self.finished += [(piece.ends_us, *finish) for finish in piece.finished]


def runs_request(name: str, ask: Ask, config: EngineConfig) -> Request:
    sequence = RunSequence(ask.runs, ask.output_run, block_size=config.block_size)
    return Request(
        request_id=name,
        sequence=sequence,
        max_tokens=ask.max_tokens,
        priority=ask.priority,
        report_full=ask.report_full,
    )


def token_of(run: int, k: int) -> int:
    """A token id for token k of a run, no two alike."""
    return run * 1000 + k


def tokens_request(name: str, ask: Ask, config: EngineConfig) -> Request:
    prompt = [token_of(run, k) for run, tokens in ask.runs for k in range(tokens)]
    sequence = TokenSequence(
        prompt, hasher=HASHER, output=lambda k: token_of(ask.output_run, k), block_size=config.block_size
    )
    return Request(
        request_id=name,
        sequence=sequence,
        max_tokens=ask.max_tokens,
        priority=ask.priority,
        stop_token_ids=ask.stop,
        report_full=ask.report_full,
    )


def actions(world: World) -> list[tuple[int, int, str, Ask]]:
    """(instant, serial number, "submit" or "abort", ask) in order."""
    found = []
    for i, ask in enumerate(world.asks):
        found.append((ask.at_us, 2 * i, "submit", ask))
        if ask.abort_after_us is not None:
            found.append((ask.at_us + ask.abort_after_us, 2 * i + 1, "abort", ask))
    return sorted(found, key=lambda action: action[:2])


FOREVER_US = 1 << 50

Advance = Callable[[Engine, int, Log], None]


def advance_by_run_until(engine: Engine, horizon_us: int, log: Log) -> None:
    for piece in engine.run_until(horizon_us):
        log.add(piece)


def advance_by_next_us(engine: Engine, horizon_us: int, log: Log) -> None:
    """As an event-driven simulation does; checks what `next_us` promises on the way."""
    while (due_us := engine.next_us()) is not None and engine.ready_us < horizon_us:
        pieces = engine.run_until(min(due_us, horizon_us))
        assert pieces or due_us > horizon_us
        for piece in pieces:
            if isinstance(piece, Step) and (piece.admitted or piece.preempted or piece.finished):
                assert piece.ends_us >= due_us
            log.add(piece)
        if not pieces:
            break
    advance_by_run_until(engine, horizon_us, log)


def advance_by_step(engine: Engine, horizon_us: int, log: Log) -> None:
    """Step by step; a step that starts inside a microsecond belongs before an arrival at that microsecond's end."""
    while engine._ready_ps < horizon_us * 1_000_000:
        step = engine.step(engine.ready_us)
        if step is None:
            break
        log.add(step)


def play(world: World, make: Callable[[str, Ask, EngineConfig], Request], advance: Advance, engine: Engine) -> Log:
    log = Log()
    for at_us, serial, kind, ask in actions(world):
        advance(engine, at_us, log)
        name = f"r{serial // 2}"
        if kind == "submit":
            try:
                engine.submit(make(name, ask, world.config), at_us)
            except RequestError:
                log.refused.append(name)
        elif engine.abort(name, at_us):
            log.aborted.append(name)
        log.snapshots.append(engine.snapshot())
    advance(engine, FOREVER_US, log)
    log.snapshots.append(engine.snapshot())
    return log


@st.composite
def prompts(draw: st.DrawFn) -> Runs:
    first = draw(st.sampled_from([(1, 3), (1, 16), (2, 9), (2, 24)]))
    rest = draw(st.lists(st.tuples(st.integers(3, 5), st.integers(1, 20)), max_size=3))
    return (first, *rest)


@st.composite
def worlds(
    draw: st.DrawFn, *, asks_max: int = 12, stops: bool = False, jitter: bool = False, reports: bool = True
) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    config = EngineConfig(
        block_size=block_size,
        num_gpu_blocks=2 + draw(st.integers(50, 180)) // block_size,
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 4, 8])),
        max_num_batched_tokens=draw(st.sampled_from([2, 5, 16, 64, 512])),
        max_model_len=draw(st.sampled_from([60, 1000])),
        enable_chunked_prefill=draw(st.booleans()),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 10])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
    )
    cost = _cost(draw, jitter)
    asks: list[Ask] = []
    at_us = 0
    for _ in range(draw(st.integers(1, asks_max))):
        at_us += draw(st.integers(0, 80))
        runs = draw(prompts())
        if asks and draw(st.booleans()):  # the next turn of an earlier one
            before = draw(st.sampled_from(asks))
            runs = (*before.runs, (before.output_run, before.max_tokens), *runs[2:])
        asks.append(
            Ask(
                at_us=at_us,
                runs=runs,
                output_run=draw(st.integers(6, 9)),
                max_tokens=draw(st.integers(1, 40)),
                abort_after_us=draw(st.sampled_from([None, None, None, 0, 35, 300])),
                priority=draw(st.integers(0, 2)),
                stop=frozenset({token_of(draw(st.integers(6, 9)), draw(st.integers(0, 30)))}) if stops else frozenset(),
                report_full=reports and draw(st.sampled_from([False, False, False, True])),
            )
        )
    return World(config, cost, tuple(asks), draw(st.integers(0, 9)))


def _cost(draw: st.DrawFn, jitter: bool) -> StepCost:
    experts = draw(st.sampled_from([0, 8]))
    return StepCost(
        step_fixed_us=draw(st.sampled_from([0.0, 1.25, 10.0])),
        weight_read_us=draw(st.sampled_from([0.0, 7.3])),
        token_us=draw(st.sampled_from([0.0, 0.711])),
        prefill_attention_ns=3.7,
        sequence_us=draw(st.sampled_from([0.0, 0.33])),
        kv_read_ns=draw(st.sampled_from([0.0, 42.91])),
        experts=experts,
        top_k=experts // 4,
        jitter=0.3 if jitter else 0.0,
    )
