"""The step-time formula, worked by hand, and its closed form."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import Batch, ConfigError, StepCost
from mock_engine.cost_model import ceil_us, steps_before, stretch_ps

DENSE = StepCost(
    step_fixed_us=3225,
    weight_read_us=3501,
    token_us=19.25,
    prefill_attention_ns=0.791,
    sequence_us=3.8,
    kv_read_ns=42.91,
)
MOE = StepCost(
    step_fixed_us=3888,
    weight_read_us=7311,
    token_us=25.15,
    prefill_attention_ns=0.497,
    sequence_us=13.9,
    kv_read_ns=5.51,
    experts=128,
    top_k=4,
)


def test_a_prefill_step_is_the_formula_worked_by_hand() -> None:
    batch = Batch.of(prefills=[(2048, 512)])
    assert batch == (2048, 1, 2048 * 512 + 2048 * 2049 // 2, 0)
    # 3225 + max(3501, 19.25 * 2048 = 39424) + 0.791e-3 * 3146752 + 3.8
    assert DENSE.step_ps(batch) == 3_225_000_000 + 39_424_000_000 + 791 * 3_146_752 + 3_800_000


def test_a_decode_step_is_the_formula_worked_by_hand() -> None:
    batch = Batch.of(decode_contexts=[1000, 2000, 500])
    assert batch == (3, 3, 0, 3500)
    # 3225 + 3501, since three tokens are far below the weights' reading time, + 3 * 3.8 + 42.91e-3 * 3500
    assert DENSE.step_ps(batch) == 3_225_000_000 + 3_501_000_000 + 11_400_000 + 42_910 * 3500


def test_a_mixed_step_is_one_step() -> None:
    batch = Batch.of(prefills=[(100, 0), (60, 40)], decode_contexts=[300])
    assert batch == (161, 3, 5050 + 60 * 40 + 1830, 300)
    assert DENSE.step_ps(batch) == (
        3_225_000_000 + 3_501_000_000 + 791 * (5050 + 2400 + 1830) + 3 * 3_800_000 + 42_910 * 300
    )


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 512, 8192])
def test_a_mixture_of_experts_reads_the_experts_that_its_tokens_touch(tokens: int) -> None:
    share = 1 - (1 - 4 / 128) ** tokens
    expected_us = 3888 + 7311 * share + 25.15 * tokens + 13.9 * tokens + 5.51e-3 * 1000 * tokens
    batch = Batch.of(decode_contexts=[1000] * tokens)
    assert MOE.step_ps(batch) == pytest.approx(expected_us * 1e6, abs=2)


def test_an_empty_step_takes_the_fixed_time_only() -> None:
    assert DENSE.step_ps(Batch()) == 3_225_000_000 == DENSE.floor_ps
    assert StepCost(step_fixed_us=0).step_ps(Batch()) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(0, 200), st.booleans())
def test_the_closed_form_of_n_decode_steps_is_their_sum_to_the_picosecond(contexts, steps: int, moe: bool) -> None:
    cost = MOE if moe else DENSE
    total = sum(cost.step_ps(Batch.of(decode_contexts=[c + j for c in contexts])) for j in range(steps))
    first = cost.step_ps(Batch.of(decode_contexts=contexts))
    assert stretch_ps(first, cost.kv_read_ps * len(contexts), steps) == total


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 3000), st.integers(0, 60))
def test_steps_before_counts_those_that_start_strictly_before(first: int, growth: int, limit: int, most: int) -> None:
    starts = [stretch_ps(first, growth, j) for j in range(most)]
    assert steps_before(limit, first, growth, most) == sum(start < limit for start in starts)


def test_instants_round_up_at_the_edge() -> None:
    assert [ceil_us(ps) for ps in (0, 1, 1_000_000, 1_000_001)] == [0, 1, 1, 2]


def test_jitter_is_seeded_bounded_and_off_by_default() -> None:
    rng = Random(1)
    assert DENSE.jittered_ps(1000, rng) == 1000
    assert rng.getstate() == Random(1).getstate()
    noisy = StepCost(step_fixed_us=100, jitter=0.2)
    drawn = [noisy.jittered_ps(100_000_000, rng) for _ in range(500)]
    assert drawn == [noisy.jittered_ps(100_000_000, again) for again in [Random(1)] for _ in range(500)]
    assert noisy.floor_ps <= min(drawn) < 82_000_000
    assert 118_000_000 < max(drawn) <= 120_000_000


@pytest.mark.parametrize(
    "bad", [{"token_us": -1.0}, {"jitter": 1.0}, {"experts": 8}, {"experts": 2, "top_k": 4}, {"step_fixed_us": -3}]
)
def test_coefficients_that_cannot_be_are_refused(bad) -> None:
    with pytest.raises(ConfigError, match="give"):
        StepCost(**{"step_fixed_us": 1.0, **bad})
