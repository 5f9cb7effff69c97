"""Arrival instants: exact where they are, and of the asked rate and burstiness where they are drawn."""

import random
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.arrivals import arrivals_us
from harness.drive import Drive


def drawn(count, seed=1, **keys):
    return list(islice(arrivals_us(Drive(driver="rate", **keys), random.Random(seed)), count))


def test_constant_arrivals_are_exact():
    assert drawn(4, arrival="constant", rate_per_s=4.0) == [0, 250_000, 500_000, 750_000]


def test_a_ramp_grows_from_nothing_to_the_rate():
    """10 a second after a ramp of 2 s: 10 starts in the ramp, at times that grow with the square root."""
    found = drawn(30, arrival="constant", rate_per_s=10.0, ramp_s=2.0)
    assert sum(t < 2_000_000 for t in found) == 10
    assert found[4] == pytest.approx(2e6 * (4 / 10) ** 0.5, abs=1)
    assert {b - a for a, b in pairwise(found[10:])} == {100_000}


def test_stages_follow_each_other_and_the_last_one_ends_the_load():
    stages = [{"rate_per_s": r, "duration_s": d} for r, d in ((5.0, 2.0), (0.0, 3.0), (20.0, 1.0))]
    import msgspec

    drive = msgspec.convert({"driver": "rate", "arrival": "constant", "stages": stages}, Drive)
    found = list(arrivals_us(drive, random.Random(0)))
    assert [sum(a <= t < b for t in found) for a, b in ((0, 2e6), (2e6, 5e6), (5e6, 6e6))] == [10, 0, 20]
    assert found[10] == 5_000_000


@pytest.mark.parametrize(("burstiness", "cv2"), [(1.0, 1.0), (0.25, 4.0), (4.0, 0.25)])
def test_gaps_have_the_asked_mean_and_burstiness(burstiness, cv2):
    """20,000 gaps: the mean is within 3 of its standard errors, the squared variation within 10 %."""
    keys = {"arrival": "gamma"} if burstiness != 1.0 else {}
    gaps = np.diff(drawn(20_000, rate_per_s=100.0, burstiness=burstiness, **keys))
    assert gaps.mean() == pytest.approx(10_000, rel=3 * cv2**0.5 / 20_000**0.5)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(cv2, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(0.1, 500),
    ramp=st.floats(0, 5),
    burstiness=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_arrivals_never_go_back_and_are_the_seeds_alone(seed, rate, ramp, burstiness):
    found = drawn(200, seed, rate_per_s=rate, ramp_s=ramp, burstiness=burstiness)
    assert found == sorted(found)
    assert found == drawn(200, seed, rate_per_s=rate, ramp_s=ramp, burstiness=burstiness)
