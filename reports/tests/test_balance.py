import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.rows import natural_key
from reports.tests.rows_by_hand import MS, metrics_of, request, sample


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1_000), st.integers(1, 500)), min_size=1, max_size=25))
def test_in_flight_agrees_with_littles_law(spans):
    rows = [
        request(n, sent_us=s * MS, last_token_us=(s + d) * MS, end_us=(s + d) * MS, chunk_gaps_us=None)
        for n, (s, d) in enumerate(spans)
    ]
    found = metrics_of(rows)
    assert found["in_flight_mean"] == pytest.approx(found["requests_per_s"] * found["e2e_ms"]["mean"] / 1_000)
    assert found["in_flight_mean"] <= found["in_flight_peak"] <= len(rows)


def test_a_request_that_ends_as_another_begins_is_not_beside_it():
    rows = [request(0, sent_us=0, end_us=100 * MS), request(1, sent_us=100 * MS, end_us=200 * MS)]
    found = metrics_of(rows)
    assert (found["in_flight_mean"], found["in_flight_peak"]) == (1, 1)


def test_failed_and_warm_up_requests_are_load_too():
    rows = [
        request(0),
        request(1, status="error", first_token_us=None),
        request(2, phase="warmup"),
        request(3, status="cancelled", end_us=None),
    ]
    found = metrics_of(rows)
    assert found["in_flight_peak"] == 4
    assert found["in_flight_mean"] == 4


def test_rates_are_over_the_window_from_the_first_send_to_the_last_end():
    rows = [
        request(0, sent_us=0, end_us=1_000 * MS),
        request(1, sent_us=500 * MS, end_us=2_000 * MS),
        request(2, phase="warmup", sent_us=-9_000 * MS),
    ]
    found = metrics_of(rows)
    assert found["requests_per_s"] == 1
    assert found["output_tokens_per_s"] == 5
    assert found["input_tokens_per_s"] == 100


def test_repeats_are_pooled_by_work_over_time_not_as_a_mean_of_means():
    fast = request(0, sent_us=0, end_us=1_000 * MS)
    slow = request(1, sent_us=0, end_us=3_000 * MS, repeat=1)
    assert metrics_of([fast, slow])["requests_per_s"] == 0.5


def test_placement_counts_replicas_that_got_nothing():
    found = metrics_of([request(0, replica="r10"), request(1, replica="r2")], [sample("r0")], replicas=["r3"])
    assert found["placement"] == {"r0": 0, "r2": 1, "r3": 0, "r10": 1}
    assert list(found["placement"]) == ["r0", "r2", "r3", "r10"]
    assert metrics_of([request(replica=None)])["placement"] is None


def test_names_sort_as_people_expect():
    assert sorted(["r10", "r2", "a1b3", "a1b20", "r"], key=natural_key) == ["a1b3", "a1b20", "r", "r2", "r10"]


def test_sticky_rate_looks_at_later_turns_only():
    def turns(name, *replicas):
        return [
            request(n, request_id=f"{name}{n}", session=name, turn=n, replica=replica)
            for n, replica in enumerate(replicas)
        ]

    assert metrics_of(turns("x", "r0", "r0", "r1"))["sticky_rate"] == 0.5
    assert metrics_of([*turns("x", "r0", "r0"), *turns("y", "r1", "r1")])["sticky_rate"] == 1
    assert metrics_of([*turns("x", "r0"), *turns("y", "r1")])["sticky_rate"] is None
    shuffled = turns("x", "r0", "r0", "r1")[::-1]
    assert metrics_of(shuffled)["sticky_rate"] == 0.5


def test_a_session_that_began_in_warm_up_keeps_its_first_replica():
    rows = [
        request(0, session="x", turn=0, phase="warmup", replica="r1"),
        request(1, session="x", turn=1, replica="r1"),
    ]
    assert metrics_of(rows)["sticky_rate"] == 1


def test_load_imbalance_is_the_mean_over_time_of_deviation_over_mean():
    samples = [
        *(sample(name, 0, active_decode_blocks=load) for name, load in (("r0", 10), ("r1", 30))),
        *(sample(name, 500_000, active_decode_blocks=load) for name, load in (("r0", 8), ("r1", 8))),
        *(sample(name, 1_000_000, active_decode_blocks=0) for name in ("r0", "r1")),
        *(sample(name, 90_000_000, active_decode_blocks=load) for name, load in (("r0", 0), ("r1", 8))),
    ]
    found = metrics_of([request(end_us=1_000 * MS)], samples)
    assert found["load_cv"] == {"decode_blocks": (0.5 + 0) / 2, "waiting": None}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64))
def test_imbalance_lies_between_even_and_all_on_one(loads):
    samples = [sample(f"r{n}", 0, active_decode_blocks=load, waiting=7) for n, load in enumerate(loads)]
    found = metrics_of([request()], samples)["load_cv"]
    assert found["waiting"] == 0
    if sum(loads):
        assert 0 <= found["decode_blocks"] <= math.sqrt(len(loads) - 1) + 1e-9


def test_one_replica_has_no_imbalance():
    assert metrics_of([request()], [sample("r0", 0, active_decode_blocks=5)])["load_cv"] is None
