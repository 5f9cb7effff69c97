"""The engine as a driver meets it: refusals, time, aborts, counters, and the field cases about engines."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from mock_engine import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    Engine,
    EngineConfig,
    EngineError,
    Request,
    RequestError,
    Run,
    RunSequence,
    Step,
    StepCost,
    TokenSequence,
    generated_token_ids,
    load_preset,
)
from mock_engine.tests.world import FOREVER_US

HASHER = BlockHasher()


def engine(cost: StepCost | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{"num_gpu_blocks": 101, **options})
    return Engine(config, cost=cost or StepCost(step_fixed_us=1000), rng=Random(0))


def ask(name: str, prompt: int, answer: int, *, run: int | None = None, **options: Any) -> Request:
    run = 100 + int.from_bytes(name.encode(), "big") if run is None else run
    return Request(request_id=name, sequence=RunSequence(((run, prompt),), run + 10**10), max_tokens=answer, **options)


def token_instants(pieces: list[Step | Run], name: str) -> list[int]:
    instants: list[int] = []
    for piece in pieces:
        if name in piece.outputs:
            instants += piece.token_instants_us().tolist() if isinstance(piece, Run) else [piece.ends_us]
    return instants


def gaps(instants: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(instants)]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_both_block_counts_and_harms_nobody() -> None:
    one = engine(num_gpu_blocks=51)
    one.submit(ask("a", 100, 50), 0)
    with pytest.raises(RequestError, match=r"needs 51 KV cache blocks .* has only 50") as refused:
        one.submit(ask("b", 801, 10), 0)
    error = refused.value
    assert (error.status, error.type, error.param) == (400, "BadRequestError", "prompt")
    one.run_until(FOREVER_US)
    snapshot = one.snapshot()
    assert (snapshot.received, snapshot.rejected, snapshot.finished) == (2, 1, 1)


def test_an_answer_that_can_never_fit_is_refused_before_it_starts() -> None:
    one = engine(num_gpu_blocks=51)
    with pytest.raises(RequestError, match="needs 57 KV cache blocks") as refused:
        one.submit(ask("a", 700, 200), 0)
    assert refused.value.param == "prompt"
    one.submit(ask("b", 700, 101), 0)  # the last token needs no room: 800 tokens are computed
    one.run_until(FOREVER_US)
    assert one.snapshot().generation_tokens == 101


def test_a_request_for_all_that_the_model_can_say_gets_what_the_cache_can_hold() -> None:
    one = engine(num_gpu_blocks=11, max_model_len=1000)
    one.submit(ask("a", 100, 900), 0)
    pieces = one.run_until(FOREVER_US)
    assert len(token_instants(pieces, "a")) == 61
    assert pieces[-1].finished[0].reason == "length"


def test_an_answer_is_cut_at_the_models_length() -> None:
    one = engine(max_model_len=64)
    one.submit(ask("a", 60, 100), 0)
    pieces = one.run_until(FOREVER_US)
    assert len(token_instants(pieces, "a")) == 4
    assert pieces[-1].finished == (("a", "length"),)


@pytest.mark.parametrize(
    ("prompt", "answer", "param"),
    [(0, 5, "prompt"), (5, 0, "max_tokens"), (64, 1, "input_tokens"), (65, 1, "input_tokens")],
)
def test_a_malformed_request_is_a_400_that_names_the_field(prompt: int, answer: int, param: str) -> None:
    one = engine(max_model_len=64)
    with pytest.raises(RequestError) as refused:
        one.submit(ask("a", prompt, answer), 0)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_drivers_mistakes_are_told() -> None:
    one = engine()
    one.submit(ask("a", 10, 5), 0)
    with pytest.raises(EngineError, match="in the engine already"):
        one.submit(ask("a", 10, 5), 0)
    one.step(0)
    with pytest.raises(EngineError, match="time can't go backwards"):
        one.step(999)
    with pytest.raises(EngineError, match="block_size"):
        one.submit(Request(request_id="b", sequence=RunSequence(((1, 9),), 2, block_size=32), max_tokens=1), 1000)


# -- time ----------------------------------------------------------------------------------------------------------


def test_an_idle_engine_has_nothing_due() -> None:
    one = engine()
    assert one.step(5) is None
    assert one.next_us() is None
    assert one.run_until(FOREVER_US) == []


def test_a_busy_engine_wastes_no_time_between_steps() -> None:
    one = engine(StepCost(step_fixed_us=10.4))
    one.submit(ask("a", 16, 5), 100)
    steps = []
    now_us = 100
    while (step := one.step(now_us)) is not None:
        steps.append((step.starts_us, step.ends_us))
        now_us = step.ends_us
    assert steps == [(100, 111), (111, 121), (121, 132), (132, 142), (142, 152)]
    assert one.snapshot().busy_us == 52


def test_a_request_that_comes_while_the_engine_idles_starts_at_its_arrival() -> None:
    one = engine(StepCost(step_fixed_us=10.4))
    one.submit(ask("a", 16, 1), 0)
    one.run_until(50)
    one.submit(ask("b", 16, 1), 50)
    (step,) = one.run_until(51)
    assert (step.admitted[0].at_us, step.ends_us) == (50, 61)


def test_a_late_driver_starts_later() -> None:
    one = engine()
    one.submit(ask("a", 16, 3), 0)
    assert one.step(40).starts_us == 40
    assert one.step(5000).starts_us == 5000


def test_ttft_grows_with_the_prompt_and_with_the_queue() -> None:
    cost = load_preset("llama-3.1-8b-h100").cost

    def ttft_us(prompt: int, ahead: int) -> int:
        one = engine(cost, num_gpu_blocks=20_000)
        for i in range(ahead):
            one.submit(ask(f"other{i}", 4000, 1), 0)
        one.submit(ask("a", prompt, 1), 0)
        return token_instants(one.run_until(FOREVER_US), "a")[0]

    alone = [ttft_us(prompt, 0) for prompt in (200, 2000, 8000, 16_000)]
    assert alone == sorted(set(alone))
    queued = [ttft_us(2000, ahead) for ahead in (0, 1, 4, 8)]
    assert queued == sorted(set(queued))


def test_tpot_grows_with_the_batch_and_with_the_context() -> None:
    cost = load_preset("llama-3.1-8b-h100").cost

    def tpot_us(prompt: int, batch: int) -> float:
        one = engine(cost, num_gpu_blocks=28_200)
        for i in range(batch):
            one.submit(ask(f"r{i}", prompt, 400), 0)
        instants = token_instants(one.run_until(FOREVER_US), "r0")[100:]
        return (instants[-1] - instants[0]) / (len(instants) - 1)

    assert tpot_us(1000, 1) < tpot_us(1000, 8) < tpot_us(1000, 32)
    assert tpot_us(500, 16) < tpot_us(4000, 16) < tpot_us(16_000, 16)


def test_load_that_comes_later_slows_down_what_runs_already() -> None:
    """A alone for a second, then 31 more; A's gaps follow the formula for batch 1 and for batch 32."""
    cost = load_preset("llama-3.1-8b-h100").cost
    one = engine(cost, num_gpu_blocks=28_200)
    one.submit(ask("a", 200, 600), 0)
    pieces = one.run_until(1_000_000)
    for i in range(31):
        one.submit(ask(f"r{i}", 200, 100), 1_000_000)
    pieces += one.run_until(FOREVER_US)
    instants = token_instants(pieces, "a")
    before = [gap for gap, at_us in zip(gaps(instants), instants, strict=False) if at_us < 900_000]
    after = [gap for gap, at_us in zip(gaps(instants), instants, strict=False) if 1_300_000 < at_us < 1_600_000]
    last = gaps(instants)[-50:]

    def modelled_us(batch: int, context: int) -> float:
        fixed, read, sequence, kv = 3225, 3501, 3.8 * batch, 42.91e-3 * batch * context
        return fixed + max(read, 19.25 * batch) + sequence + kv

    assert before[0] == pytest.approx(modelled_us(1, 201), rel=0.05)
    assert sum(after) / len(after) == pytest.approx(modelled_us(32, 270), rel=0.05)
    assert max(last) < min(after)
    assert max(gaps(instants)) > 1.5 * max(after)  # the stall while the others' prompts were computed


# -- aborts, resets, counters --------------------------------------------------------------------------------------


def test_an_abort_frees_blocks_at_once_and_keeps_their_content() -> None:
    one = engine()
    one.submit(ask("a", 100, 50, run=1), 0)
    one.submit(ask("b", 100, 50), 0)
    one.run_until(5000)
    used = one.snapshot().used_blocks
    assert one.abort("a", 5000)
    assert one.snapshot().used_blocks == used - 7
    assert not one.abort("a", 5000)
    one.submit(ask("c", 100, 1, run=1), 5000)
    one.run_until(6001)
    assert one.snapshot().hit_tokens == 96


def test_an_aborted_request_never_shows_again() -> None:
    one = engine(max_num_seqs=1)
    for name in "abc":
        one.submit(ask(name, 20, 30), 0)
    one.run_until(3000)
    assert one.abort("b", 3000)
    pieces = one.run_until(FOREVER_US)
    assert not token_instants(pieces, "b")
    assert len(token_instants(pieces, "c")) == 30
    snapshot = one.snapshot()
    assert (snapshot.finished, snapshot.aborted, snapshot.running, snapshot.waiting) == (2, 1, 0, 0)


def test_a_reset_is_refused_while_blocks_are_held_and_told_in_the_next_step() -> None:
    one = engine()
    one.submit(ask("a", 64, 5, run=1), 0)
    one.step(0)
    assert not one.reset_prefix_cache()
    one.run_until(FOREVER_US)
    assert one.snapshot().cached_blocks == 4
    assert one.reset_prefix_cache()
    assert one.snapshot().cached_blocks == 0
    assert one.run_until(FOREVER_US) == []
    one.submit(ask("b", 64, 1, run=1), 10_000)
    (step,) = one.run_until(FOREVER_US)
    assert isinstance(step.kv_events[0], AllBlocksCleared)
    assert isinstance(step.kv_events[1], BlockStored)
    assert step.admitted[0].cached_tokens == 0


def test_a_stop_token_ends_an_answer_once_enough_was_said() -> None:
    answer = generated_token_ids(9, 0, 50)
    for min_tokens, expected in ((0, 8), (8, 8), (9, 50)):
        one = engine()
        sequence = TokenSequence(list(range(20)), hasher=HASHER, output=9)
        request = Request(
            request_id="a",
            sequence=sequence,
            max_tokens=50,
            stop_token_ids=frozenset({answer[7]}),
            min_tokens=min_tokens,
        )
        one.submit(request, 0)
        pieces = one.run_until(FOREVER_US)
        assert len(token_instants(pieces, "a")) == expected
        assert pieces[-1].finished[0].reason == ("stop" if expected == 8 else "length")


def test_a_prompt_counts_once_when_its_first_token_comes() -> None:
    one = engine(max_num_batched_tokens=64)
    one.submit(ask("a", 100, 3), 0)
    one.step(0)
    assert one.snapshot().prompt_tokens == 0
    one.run_until(FOREVER_US)
    snapshot = one.snapshot()
    assert (snapshot.prompt_tokens, snapshot.generation_tokens, snapshot.steps) == (100, 3, 4)


def test_active_decode_blocks_are_those_of_requests_past_their_prefill() -> None:
    one = engine(max_num_batched_tokens=64)
    one.submit(ask("a", 60, 30), 0)
    one.submit(ask("b", 100, 30), 0)
    step = one.step(0)
    assert step.outputs == ("a",)
    assert one.snapshot().active_decode_blocks == 4
    one.run_until(5000)
    snapshot = one.snapshot()
    assert snapshot.active_decode_blocks == snapshot.used_blocks == 4 + 7


# -- field cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_eviction_takes_the_third_of_three_blocks(seed: int) -> None:
    one = engine(num_gpu_blocks=4)
    prompt = generated_token_ids(seed, 0, 48)

    def served(name: str, ids: list[int]) -> tuple[int, list[Any]]:
        sequence = TokenSequence(ids, hasher=HASHER, output=seed)
        one.submit(Request(request_id=name, sequence=sequence, max_tokens=1), one.ready_us)
        (step,) = one.run_until(FOREVER_US)
        return step.admitted[0].cached_tokens, list(step.kv_events)

    _, stored = served("a", prompt)
    _, events = served("b", generated_token_ids(seed + 1000, 0, 16))
    assert [event for event in events if isinstance(event, BlockRemoved)] == [
        BlockRemoved((stored[0].block_hashes[2],))
    ]
    assert served("c", prompt[:32] + generated_token_ids(seed + 2000, 0, 16))[0] == 32


def test_hits_are_zero_on_unique_prompts_however_often_they_are_preempted_or_retried() -> None:
    one = engine(num_gpu_blocks=41, max_num_seqs=8)
    for i in range(20):
        one.submit(ask(f"r{i}", 100 + i, 120), 0)
    one.run_until(FOREVER_US)
    snapshot = one.snapshot()
    assert snapshot.preemptions > 0
    assert snapshot.recomputed_hit_tokens > 0
    assert snapshot.hit_tokens == 0
    assert snapshot.query_tokens == snapshot.prompt_tokens == sum(100 + i for i in range(20))


def test_an_undersized_cache_slows_everybody_but_stops_nobody() -> None:
    one = engine(num_gpu_blocks=51)
    for i in range(10):
        one.submit(ask(f"r{i}", 300, 300), 0)
    pieces = one.run_until(FOREVER_US)
    snapshot = one.snapshot()
    assert snapshot.finished == 10
    assert 0 < snapshot.preemptions < 100
    # Progress: never 1,000 steps without a token that nobody had produced before.
    produced = [piece.steps if isinstance(piece, Run) else len(piece.outputs) for piece in pieces]
    assert sum(produced) > 0
    assert all(len(token_instants(pieces, f"r{i}")) == 300 for i in range(10))
    assert snapshot.steps < 300 * 10 + 100 * 10


def test_two_requests_that_need_every_block_take_turns() -> None:
    one = engine(num_gpu_blocks=11)
    one.submit(ask("a", 10, 150), 0)
    one.submit(ask("b", 10, 150), 0)
    pieces = one.run_until(FOREVER_US)
    assert [len(token_instants(pieces, name)) for name in "ab"] == [150, 150]


def test_the_parent_of_a_partly_cached_sequence_is_the_block_before_it() -> None:
    """P, then P and more, then P and more again after a middle block was evicted."""
    one = engine(num_gpu_blocks=9)
    prefix, tail, last = (generated_token_ids(seed, 0, 32) for seed in (1, 2, 3))

    def served(name: str, ids: list[int]) -> tuple[TokenSequence, list[Any]]:
        sequence = TokenSequence(ids, hasher=HASHER, output=7)
        one.submit(Request(request_id=name, sequence=sequence, max_tokens=1), one.ready_us)
        (step,) = one.run_until(FOREVER_US)
        return sequence, list(step.kv_events)

    served("p", prefix)
    sequence, (event,) = served("q", prefix + tail)
    keys = sequence.block_keys(4)
    assert (event.block_hashes, event.parent_block_hash) == (tuple(keys[2:4]), keys[1])
    assert event.token_ids == tail
    served("other", generated_token_ids(4, 0, 80))  # takes the fourth block of q
    sequence, events = served("r", prefix + tail + last)
    keys = sequence.block_keys(6)
    (event,) = [event for event in events if isinstance(event, BlockStored)]
    assert (event.block_hashes, event.parent_block_hash) == (tuple(keys[3:6]), keys[2])
    assert event.token_ids == (prefix + tail + last)[48:]
