import math
import random
from statistics import fmean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.distributions import Distribution, Uniform, check_pause, length_sampler, pause_sampler_us

TABLES = [
    {"dist": "uniform", "low": 10, "high": 30},
    {"dist": "lognormal", "mean": 20, "sigma": 0.6},
    {"dist": "normal", "mean": 20, "sd": 3},
    {"dist": "exponential", "mean": 20},
    {"dist": "geometric", "mean": 20},
    {"dist": "choice", "values": [10, 30], "weights": [1, 1]},
]


def distribution(table):
    return msgspec.convert(table, Distribution)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["dist"])
def test_the_mean_is_the_one_asked_for(table):
    rng = random.Random(5)
    mean = fmean(distribution(table).sample(rng) for _ in range(20_000))
    assert mean == pytest.approx(20, rel=0.03)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["dist"])
@given(u=st.floats(0, 1, exclude_max=True), v=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=60)
def test_a_larger_draw_never_gives_a_smaller_sample(table, u, v):
    d = distribution(table)
    low, high = sorted((max(u, 2**-54), max(v, 2**-54)))
    assert d.quantile(low) <= d.quantile(high)
    assert math.isfinite(d.quantile(high))


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["dist"])
def test_bounds_hold_and_a_sample_takes_one_draw(table):
    d = distribution(table | {"min": 15, "max": 22})
    rng, count = random.Random(1), random.Random(1)
    samples = [d.sample(rng) for _ in range(200)]
    for _ in range(200):
        count.random()
    assert rng.getstate() == count.getstate()
    assert 15 <= min(samples) <= max(samples) <= 22


def test_uniform_reaches_both_ends():
    rng = random.Random(0)
    d = distribution({"dist": "uniform", "low": 1, "high": 3})
    assert {d.sample(rng) for _ in range(200)} == {1.0, 2.0, 3.0}


def test_a_constant_draws_nothing():
    rng = random.Random(3)
    assert length_sampler(7, rng, 1)() == 7
    assert pause_sampler_us(1.5, rng)() == 1500
    assert rng.getstate() == random.Random(3).getstate()


def test_a_length_is_a_whole_number_of_at_least_the_floor():
    sample = length_sampler(distribution({"dist": "normal", "mean": 0, "sd": 4}), random.Random(0), 1)
    lengths = [sample() for _ in range(200)]
    assert min(lengths) == 1
    assert all(type(length) is int for length in lengths)


def test_a_pause_is_never_negative():
    sample = pause_sampler_us(distribution({"dist": "normal", "mean": 0, "sd": 4}), random.Random(0))
    assert min(sample() for _ in range(200)) == 0


def test_a_pause_that_would_go_below_zero_is_refused():
    with pytest.raises(ValueError, match="raise low"):
        check_pause("think_time_ms", Uniform(low=-5, high=3))
