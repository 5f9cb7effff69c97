import pytest

from reports import SloError, arm_metrics
from reports.arms import FAILURES
from reports.tests.rows_by_hand import MS, frames, metrics_of, request


def test_an_arm_without_rows_has_counts_of_zero_and_nothing_else():
    found = arm_metrics(*frames([]))
    counts = {name: value for name, value in found.items() if value is not None}
    assert counts == dict.fromkeys(("requests", *FAILURES), 0)


def test_attainment_counts_failures_against_the_router_and_cancelled_for_nobody():
    rows = [
        request(0),
        request(1, first_token_us=900 * MS),
        request(2, status="error", first_token_us=None),
        request(3, status="incomplete"),
        request(4, status="cancelled"),
    ]
    found = metrics_of(rows, slo={"ttft_ms": 500})
    assert found["slo_attainment"] == 1 / 4
    assert found["request_goodput"] == 1 / 0.5


def test_every_bound_must_hold():
    rows = [request(0), request(1, first_token_us=300 * MS)]
    assert metrics_of(rows, slo={"ttft_ms": 250})["slo_attainment"] == 0.5
    assert metrics_of(rows, slo={"ttft_ms": 250, "e2e_ms": 399})["slo_attainment"] == 0
    assert metrics_of(rows, slo={"ttft_ms": 300, "e2e_ms": 400})["slo_attainment"] == 1


def test_a_tpot_bound_does_not_apply_to_one_token():
    one = request(output_tokens=1, second_token_us=None, last_token_us=200 * MS)
    assert metrics_of([one], slo={"tpot_ms": 1})["slo_attainment"] == 1


def test_a_bound_on_something_unmeasured_is_not_met():
    assert metrics_of([request()], slo={"queue_ms": 10_000})["slo_attainment"] == 0


def test_without_bounds_goodput_is_unknown():
    found = metrics_of([request()])
    assert found["slo_attainment"] is None
    assert found["request_goodput"] is None


@pytest.mark.parametrize("name", ["ttft", "session_e2e_ms", "sched_lag_ms"])
def test_a_bound_on_no_figure_of_a_request_is_an_error_that_lists_them(name):
    with pytest.raises(SloError, match=rf"slo\.{name}.*ttft_ms"):
        metrics_of([request()], slo={name: 1})
