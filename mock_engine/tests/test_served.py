"""A closed loop in virtual time, worked by hand where that is possible, and the amounts that its means are made of."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import ConfigError, EngineConfig, StepCost, load_preset
from mock_engine.served import SERVED_COLUMNS, US_PER_UNIT, ClosedLoop, serve_closed_loop

CONFIG = EngineConfig(num_gpu_blocks=400, max_num_batched_tokens=256)
PLAIN = StepCost(step_fixed_us=1000, token_us=10, request_fixed_us=300)


def loop(concurrency: int, prompt: int, answer: int, requests: int) -> ClosedLoop:
    return ClosedLoop(
        concurrency=concurrency, input_tokens=(prompt, prompt), output_tokens=(answer, answer), requests=requests
    )


def test_one_client_alone_is_worked_by_hand() -> None:
    served = serve_closed_loop(CONFIG, PLAIN, loop(1, 100, 3, 2), Random(0))
    assert served.ttft_us == 300 + 1000 + 10 * 100
    assert served.tpot_us == 1000 + 10
    assert served.ttft_row.tolist() == [1, 0, 100, 5050, 1, 0, 1]
    assert served.tpot_row.tolist() == [1, 0, 1, 0, 1, (101 + 102) / 2, 0]


def test_a_long_prompt_comes_in_chunks_of_the_budget() -> None:
    served = serve_closed_loop(CONFIG, PLAIN, loop(1, 300, 1, 1), Random(0))
    assert served.ttft_us == 300 + 2 * 1000 + 10 * 300
    assert np.isnan(served.tpot_us)


def test_a_request_that_arrives_during_a_step_waits_for_its_rest() -> None:
    """Two clients, one budget of 100 tokens: the second prompt is one step behind, and both ends meet a busy engine."""
    config = EngineConfig(num_gpu_blocks=400, max_num_batched_tokens=100)
    served = serve_closed_loop(config, PLAIN, loop(2, 100, 1, 3), Random(0))
    # sent at 0, 0 and when the first ends; prefills end at 2300, 4300, 6300
    assert served.ttft_us == pytest.approx((2300 + 4300 + (6300 - 2300)) / 3)
    # the third arrives 300 us into the second prefill and waits 1700 us of it
    assert served.ttft_row[0] == pytest.approx((1 + 2 + 1700 / 2000 + 1) / 3)


@settings(max_examples=25, deadline=None)
@given(
    preset=st.sampled_from(["llama-3.1-8b-h100", "gpt-oss-120b-h100-tp2", "qwen3-32b-h100-tp4"]),
    concurrency=st.integers(1, 12),
    prompt=st.tuples(st.integers(1, 600), st.integers(0, 300)),
    answer=st.tuples(st.integers(1, 40), st.integers(0, 20)),
    blocks=st.sampled_from([80, 150, 20_000]),
    spread=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_the_amounts_times_the_coefficients_are_the_means(
    preset: str,
    concurrency: int,
    prompt: tuple[int, int],
    answer: tuple[int, int],
    blocks: int,
    spread: float,
    seed: int,
) -> None:
    """Whatever is chunked, queued or preempted on the way."""
    cost = load_preset(preset).cost
    load = ClosedLoop(
        concurrency=concurrency,
        input_tokens=(prompt[0], sum(prompt)),
        output_tokens=(answer[0], sum(answer)),
        requests=2 * concurrency + 1,
    )
    config = EngineConfig(num_gpu_blocks=blocks, max_num_batched_tokens=512, max_num_seqs=8)
    served = serve_closed_loop(config, cost, load, Random(seed), spread=spread)
    values = np.array([getattr(cost, name) for name in SERVED_COLUMNS]) * US_PER_UNIT
    assert served.ttft_row @ values == pytest.approx(served.ttft_us, abs=3)
    if not np.isnan(served.tpot_us):
        assert served.tpot_row @ values == pytest.approx(served.tpot_us, abs=2)


def test_the_same_seed_serves_the_same_load() -> None:
    load = ClosedLoop(concurrency=3, input_tokens=(50, 90), output_tokens=(2, 9), requests=12)
    one, other = (serve_closed_loop(CONFIG, PLAIN, load, Random(4), spread=0.3) for _ in range(2))
    assert (one.ttft_us, one.tpot_us) == (other.ttft_us, other.tpot_us)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"input_tokens": (5, 4)}, "input_tokens"),
        ({"requests": 0}, "requests=0"),
    ],
)
def test_a_load_that_asks_for_nothing_is_refused(changes: dict, told: str) -> None:
    values = {"concurrency": 1, "input_tokens": (1, 1), "output_tokens": (1, 1), "requests": 1, **changes}
    with pytest.raises(ConfigError, match=told):
        ClosedLoop(**values)
