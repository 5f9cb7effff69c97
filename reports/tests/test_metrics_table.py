import re

import pytest

from reports import METRICS, UnknownMetricError, direction_of, lookup, metric_of
from reports.metrics_table import addresses
from reports.tests.rows_by_hand import metrics_of, request

CONTRACT = """
ttft_ms first_content_ms ttst_ms tpot_ms token_gap_ms inter_chunk_latency_ms ntpot_ms e2e_ms session_e2e_ms
step_makespan_ms group_completion_ms queue_ms routing_ms client_wait_ms ttft_with_wait_ms sched_lag_ms
ttft_from_schedule_ms e2e_from_schedule_ms
requests errors collateral_errors incomplete cut_at_end not_sent not_completed requests_per_s output_tokens_per_s
input_tokens_per_s in_flight_mean in_flight_peak engine_in_flight_peak distinct_prompt_share hit_rate engine_hit_rate
hit_rate_ceiling believed_hit_rate phantom_hit_points belief_kept_at_once belief_kept_after_wait misbelieved_queue_ms
believed_queue_ms stale_placements unseen_hits redundant_prefill_tokens preemptions evicted_blocks placement
sticky_rate load_cv burst_max_share new_session_load_r tail_idle_replica_s tpot_replica_spread index_size_max
slo_attainment request_goodput
"""


def test_the_table_holds_the_metrics_of_the_contract_and_no_other():
    assert list(METRICS) == CONTRACT.split()


def test_an_arm_has_every_metric_of_the_table_in_its_order():
    assert list(metrics_of([request()])) == list(METRICS)


def test_every_metric_says_what_it_is_and_when_it_is_unknown():
    for metric in METRICS.values():
        assert metric.title
        assert metric.formula
        assert metric.null_when
        assert not re.search(r"\bITL\b|\blatency\b", metric.title)
    assert all(metric.name.endswith("_ms") == (metric.unit == "ms") for metric in METRICS.values())


def test_an_address_finds_its_number():
    metrics = metrics_of([request(), request(1, replica="r1"), request(2)])
    assert lookup(metrics, "ttft_ms.p99") == 200
    assert lookup(metrics, "requests") == 3
    assert lookup(metrics, "placement.max_share") == pytest.approx(2 / 3)
    assert lookup(metrics, "placement.r1") == 1
    assert lookup(metrics, "load_cv.decode_blocks") is None


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ttft", "did you mean .*ttft_ms"),
        ("ttft_ms", "did you mean ttft_ms.mean"),
        ("ttft_ms.p98", "ttft_ms.p99"),
        ("hit_rat", "hit_rate"),
        ("load_cv.blocks", "load_cv.decode_blocks, load_cv.waiting"),
        ("zzzzz", "choose from ttft_ms"),
    ],
)
def test_an_unknown_address_is_an_error_that_lists_near_names(address, told):
    with pytest.raises(UnknownMetricError, match=told):
        metric_of(address)


def test_every_address_of_the_table_is_known():
    metrics = metrics_of([request()])
    for address in addresses():
        lookup(metrics, address)


def test_more_samples_are_neither_better_nor_worse():
    assert direction_of("ttft_ms.p99") == "lower"
    assert direction_of("ttft_ms.count") == "none"
    assert direction_of("output_tokens_per_s") == "higher"
