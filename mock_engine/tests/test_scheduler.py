"""Scheduling rules of vLLM that the golden traces do not, or hardly, touch; one fact each."""

from random import Random
from typing import Any

import pytest

from mock_engine import (
    BlockHasher,
    BlockStored,
    Engine,
    EngineConfig,
    Request,
    RunSequence,
    Step,
    StepCost,
    TokenSequence,
)
from mock_engine.scheduler import RequestState, Scheduler

STEP_US = 1000
HASHER = BlockHasher()


class Bench:
    """An engine whose every step takes 1 ms."""

    def __init__(self, **options: Any) -> None:
        self.config = EngineConfig(**{"num_gpu_blocks": 101, **options})
        self.engine = Engine(self.config, cost=StepCost(step_fixed_us=STEP_US), rng=Random(0))

    def ask(self, name: str, prompt: int, answer: int = 4, *, run: int | None = None, **options: Any) -> None:
        """A prompt of one run; requests of the same run share their prefix."""
        run = 100 + int.from_bytes(name.encode(), "big") if run is None else run
        sequence = RunSequence(((run, prompt),), run + 10**10, block_size=self.config.block_size)
        self.submit(Request(request_id=name, sequence=sequence, max_tokens=answer, **options))

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self.engine.ready_us)

    def step(self) -> Step:
        step = self.engine.step(self.engine.ready_us)
        assert step is not None
        return step

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    def drain(self) -> list[Step]:
        steps = []
        while (step := self.engine.step(self.engine.ready_us)) is not None:
            steps.append(step)
        return steps


def test_running_requests_come_before_waiting_ones_and_a_prompt_takes_what_is_left() -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.ask("a", 100)
    bench.ask("b", 50)
    bench.ask("c", 10)
    scheduled = [dict(step.scheduled) for step in bench.steps(3)]
    assert scheduled == [{"a": 64}, {"a": 36, "b": 28}, {"a": 1, "b": 22, "c": 10}]


def test_a_long_prefill_threshold_caps_chunks_only_in_company() -> None:
    bench = Bench(long_prefill_token_threshold=20)
    bench.ask("a", 100)
    assert dict(bench.step().scheduled) == {"a": 100}
    bench.ask("b", 50)
    bench.ask("c", 30)
    assert [dict(step.scheduled) for step in bench.steps(3)] == [
        {"a": 1, "b": 20, "c": 20},
        {"a": 1, "b": 20, "c": 10},
        {"a": 1, "b": 10, "c": 1},
    ]


def test_the_threshold_lifts_when_the_company_leaves() -> None:
    bench = Bench(long_prefill_token_threshold=8)
    bench.ask("a", 4, 2)
    bench.ask("b", 40)
    assert [dict(step.scheduled) for step in bench.steps(3)] == [{"a": 4, "b": 8}, {"a": 1, "b": 8}, {"b": 24}]


def test_a_capped_request_keeps_the_budget_for_those_behind_it() -> None:
    bench = Bench(long_prefill_token_threshold=10, max_num_batched_tokens=25)
    for name in "abc":
        bench.ask(name, 30)
    assert dict(bench.step().scheduled) == {"a": 10, "b": 10, "c": 5}


def test_without_chunking_a_prompt_that_exceeds_the_rest_of_the_budget_ends_admission() -> None:
    bench = Bench(enable_chunked_prefill=False, max_num_batched_tokens=64)
    bench.ask("a", 40)
    bench.ask("b", 30)
    bench.ask("c", 10)  # would fit, but b stops the scan
    assert [dict(step.scheduled) for step in bench.steps(2)] == [{"a": 40}, {"a": 1, "b": 30, "c": 10}]


def test_without_chunking_only_new_tokens_count() -> None:
    bench = Bench(enable_chunked_prefill=False, max_num_batched_tokens=64)
    bench.ask("a", 64, 1, run=1)
    bench.drain()
    bench.ask("b", 60)
    bench.ask("c", 66, run=1)  # 64 of it are cached
    assert dict(bench.step().scheduled) == {"b": 60, "c": 2}


def test_without_chunking_a_prompt_beyond_the_whole_budget_is_chunked_when_alone() -> None:
    """vLLM refuses such a config at start; here the request must not wait for ever."""
    bench = Bench(enable_chunked_prefill=False, max_num_batched_tokens=64)
    bench.ask("a", 100, 2)
    assert [dict(step.scheduled) for step in bench.drain()] == [{"a": 64}, {"a": 36}, {"a": 1}]


def test_admission_needs_room_for_the_whole_prompt_not_for_its_first_chunk() -> None:
    bench = Bench(num_gpu_blocks=11, max_num_batched_tokens=32)
    bench.ask("a", 80)
    bench.ask("b", 96)  # six blocks, five are left
    bench.ask("c", 16)
    steps = bench.steps(4)
    assert [dict(step.scheduled) for step in steps] == [{"a": 32}, {"a": 32}, {"a": 16}, {"a": 1}]
    assert steps[-1].waiting == 2


def test_hit_blocks_in_the_free_queue_count_as_needed() -> None:
    bench = Bench(num_gpu_blocks=11)
    bench.ask("a", 160, 1, run=1)
    bench.drain()  # ten blocks cached, all free
    bench.ask("b", 64, 40)  # four blocks, later more
    bench.step()
    bench.ask("c", 112, run=1)  # seven blocks: six hits, but all of them in the queue, which holds six
    assert bench.step().admitted == ()


def test_hit_blocks_that_are_in_use_are_not_needed_again() -> None:
    bench = Bench(num_gpu_blocks=12)
    bench.ask("a", 150, 10, run=1)  # ten of eleven blocks
    bench.step()
    bench.ask("b", 144, 1, run=1)  # nine blocks: eight are hits in use, one is left
    (admission,) = bench.step().admitted
    assert admission.cached_tokens == 128


def test_a_watermark_keeps_blocks_free_unless_nothing_runs() -> None:
    bench = Bench(num_gpu_blocks=20, watermark=0.25)  # int(5.0) blocks
    bench.ask("a", 16 * 16, 30)  # 16 of 19 blocks: fine, it is alone
    assert len(bench.step().admitted) == 1
    bench = Bench(num_gpu_blocks=20, watermark=0.25)
    bench.ask("a", 16 * 4, 30)
    bench.ask("b", 16 * 11, 30)  # 15 - 11 = 4 < 5; a was admitted in this very step and counts as running
    assert [admission.request_id for admission in bench.step().admitted] == ["a"]
    bench = Bench(num_gpu_blocks=20, watermark=0.25)
    bench.ask("a", 16 * 4, 30)
    bench.ask("b", 16 * 10, 30)
    assert len(bench.step().admitted) == 2


def test_a_watermark_does_not_hold_back_a_running_request() -> None:
    bench = Bench(num_gpu_blocks=6, watermark=0.5)
    bench.ask("a", 16 * 4, 10)
    assert [len(step.outputs) for step in bench.drain()] == [1] * 10


def test_a_cached_prompt_computes_its_last_token_again() -> None:
    bench = Bench()
    bench.ask("a", 32, 1, run=1)
    bench.drain()
    for prompt, cached in ((32, 16), (33, 32), (31, 16), (16, 0), (48, 32)):
        bench.ask(f"p{prompt}", prompt, 1, run=1)
        (step,) = bench.drain()
        assert step.admitted[0].cached_tokens == cached
        assert step.scheduled == ((f"p{prompt}", prompt - cached),)


def test_identical_prompts_in_one_step_share() -> None:
    bench = Bench()
    for name in "abc":
        bench.ask(name, 40, run=1)
    step = bench.step()
    assert [admission.cached_tokens for admission in step.admitted] == [0, 32, 32]
    assert sum(isinstance(event, BlockStored) for event in step.kv_events) == 1


def test_a_finished_requests_last_token_is_never_computed() -> None:
    for answer, blocks in ((8, 2), (9, 3)):
        bench = Bench()
        bench.ask("a", 40, answer)
        bench.drain()
        assert bench.engine.snapshot().cached_blocks == blocks


def test_preemption_takes_the_last_of_the_list_and_admits_nobody() -> None:
    bench = Bench(num_gpu_blocks=7)
    bench.ask("a", 48, 20)
    bench.ask("b", 48, 20)
    bench.step()
    bench.ask("c", 1, 1)
    step = bench.step()
    assert step.preempted == ("b",)
    assert step.admitted == ()
    assert step.scheduled == (("a", 1),)
    assert step.waiting == 2
    assert bench.step().admitted == ()  # b is the head again and does not fit beside a; c has to wait behind it
    order = [admission.request_id for step in bench.drain() for admission in step.admitted]
    assert order == ["b", "c"]


def test_a_request_may_have_to_preempt_itself() -> None:
    bench = Bench(num_gpu_blocks=8)
    bench.ask("a", 60, 20)
    bench.ask("b", 48, 20)
    steps = bench.drain()
    victims = [(step.preempted, [name for name, _ in step.scheduled]) for step in steps if step.preempted]
    assert victims == [(("b",), ["a"])]


def test_a_resumed_request_hits_its_own_blocks_but_is_no_query_of_the_cache() -> None:
    bench = Bench(num_gpu_blocks=8)
    bench.ask("a", 60, 20)
    bench.ask("b", 48, 20)
    steps = bench.drain()
    admissions = [admission for step in steps for admission in step.admitted if admission.request_id == "b"]
    assert [(admission.cached_tokens, admission.resumed) for admission in admissions] == [(0, False), (32, True)]
    snapshot = bench.engine.snapshot()
    assert (snapshot.query_tokens, snapshot.hit_tokens, snapshot.recomputed_hit_tokens) == (108, 0, 32)


def test_a_priority_preemption_takes_the_least_urgent_even_if_it_was_scheduled_already() -> None:
    bench = Bench(num_gpu_blocks=7, scheduling_policy="priority")
    bench.ask("low", 40, 20, priority=5)
    bench.step()
    bench.ask("high", 48, 20, priority=1)
    assert [step.scheduled for step in bench.steps(2)] == [(("low", 1), ("high", 48)), (("high", 1),)]
    assert bench.engine.snapshot().preemptions == 1


def test_a_victims_share_of_the_step_goes_back_to_the_budget() -> None:
    scheduler = Scheduler(EngineConfig(num_gpu_blocks=7, scheduling_policy="priority"))
    for name, prompt, priority in (("low", 40, 5), ("high", 48, 1)):
        sequence = RunSequence(((prompt, prompt),), 1)
        request = Request(request_id=name, sequence=sequence, max_tokens=9, priority=priority)
        scheduler.waiting.add(RequestState(request, prompt + 9, prompt))
    plan = scheduler.schedule()
    assert [(entry.state.request_id, entry.tokens) for entry in plan.scheduled] == [("high", 48), ("low", 40)]
    victim = plan.scheduled[1].state
    assert scheduler._take_back(plan, victim) == 40
    assert [entry.state.request_id for entry in plan.scheduled] == ["high"]
    assert scheduler.running == [plan.scheduled[0].state]
    assert scheduler.waiting.head() is victim


def test_waiting_requests_are_admitted_by_priority_then_by_arrival() -> None:
    bench = Bench(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("a", 3), ("b", 1), ("c", 1), ("d", 2)):
        bench.ask(name, 10, 1, priority=priority)
    assert [step.scheduled[0][0] for step in bench.drain()] == ["b", "c", "d", "a"]


def test_priority_is_ignored_under_fcfs() -> None:
    bench = Bench(max_num_seqs=1)
    bench.ask("a", 10, 1, priority=3)
    bench.ask("b", 10, 1, priority=1)
    assert [step.scheduled[0][0] for step in bench.drain()] == ["a", "b"]


def test_a_prompt_logprobs_request_skips_the_cache_and_is_no_query() -> None:
    bench = Bench()
    bench.ask("a", 64, 1, run=1)
    bench.ask("b", 64, 1, run=1, skip_cache_read=True)
    (step,) = bench.drain()
    assert [admission.cached_tokens for admission in step.admitted] == [0, 0]
    assert bench.engine.snapshot().query_tokens == 64


def test_a_full_report_announces_the_reused_prefix_again() -> None:
    bench = Bench()
    bench.ask("a", 64, 1, run=1)
    first = bench.drain()[0].kv_events
    bench.ask("b", 70, 1, run=1, report_full=True)
    (event,) = bench.drain()[0].kv_events
    assert event == first[0]
    assert event.parent_block_hash is None


def test_other_salts_never_share() -> None:
    bench = Bench()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        sequence = TokenSequence(list(range(40)), hasher=HASHER, output=1, cache_salt=salt)
        bench.submit(Request(request_id=name, sequence=sequence, max_tokens=1))
    (step,) = bench.drain()
    assert [admission.cached_tokens for admission in step.admitted] == [0, 0, 32]


@pytest.mark.parametrize("size", [1, 32, 64])
def test_any_block_size_is_filled_block_by_block(size: int) -> None:
    bench = Bench(block_size=size, num_gpu_blocks=400)
    bench.ask("a", 100, 60, run=1)
    bench.drain()
    assert bench.engine.snapshot().cached_blocks == 159 // size
    bench.ask("b", 100, 1, run=1)
    (step,) = bench.drain()
    assert step.admitted[0].cached_tokens == 99 // size * size


def test_without_prefix_caching_nothing_hits_and_nothing_is_announced() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.ask("a", 64, 20, run=1)
    bench.ask("b", 64, 20, run=1)
    steps = bench.drain()
    assert not any(step.kv_events for step in steps)
    assert not any(admission.cached_tokens for step in steps for admission in step.admitted)
    snapshot = bench.engine.snapshot()
    assert (snapshot.query_tokens, snapshot.cached_blocks, snapshot.used_blocks) == (0, 0, 0)
