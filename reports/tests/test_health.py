import pytest

from reports import HealthFacts, health
from reports.tests.rows_by_hand import MS, frames, metrics_of, request, sample
from reports.unfinished import account, lost
from reports.why import flags


def judge(rows=None, samples=(), **facts):
    return health(*frames([request()] if rows is None else rows, samples), HealthFacts(**facts))


def test_a_run_with_nothing_against_it_is_ok():
    assert judge() == {"verdict": "ok", "reasons": []}
    assert judge(asked_requests=1, checked_answers=5)["verdict"] == "ok"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"lost_processes": ("replica r2",)}, "replica r2 was lost"),
        ({"cpu_warnings": ("CPU usage above 90%",)}, "lower the concurrency"),
        ({"warm_arms": {"b, repeat 1": 12}}, "warm start: b, repeat 1 began with 12 cached blocks"),
        ({"checked_answers": 50, "wrong_answers": 2}, "2 of 50 checked answers"),
        ({"asked_requests": 3}, "1 requests are accounted for where 3 were planned"),
    ],
)
def test_what_makes_a_run_invalid_is_a_sentence_with_the_mend(facts, told):
    found = judge(**facts)
    assert found["verdict"] == "invalid"
    assert told in found["reasons"][0]


def test_a_run_without_a_request_or_without_a_success_is_invalid():
    assert judge(rows=[])["verdict"] == "invalid"
    found = judge(rows=[request(status="error", error="502 from router")])
    assert found["verdict"] == "invalid"
    assert "502 from router" in found["reasons"][0]


def late_by(lag_ms, ttft_ms=2_000):
    return [
        request(
            n, sent_us=lag_ms * MS, first_token_us=(lag_ms + ttft_ms) * MS, last_token_us=9_000 * MS, end_us=9_000 * MS
        )
        for n in range(20)
    ]


def test_lag_of_the_load_generator_is_held_against_its_bound_and_against_ttft():
    assert judge(late_by(0))["verdict"] == "ok"
    assert judge(late_by(99))["verdict"] == "ok"
    assert judge(late_by(101))["verdict"] == "invalid"
    found = judge(late_by(30, ttft_ms=200))
    assert found["verdict"] == "degraded"
    assert "30.0 ms late (p99), over 10% of the TTFT median of 200.0 ms" in found["reasons"][0]


def test_the_worst_arm_decides():
    rows = [*late_by(0), *(row | {"router": "b"} for row in late_by(101))]
    found = judge(rows)
    assert found["verdict"] == "invalid"
    assert found["reasons"][0].startswith("b: ")


def test_late_replicas_degrade_and_a_rare_hiccup_does_not():
    def lateness(*late_ms):
        return [sample("r0", place * 500_000, late_us_p99=late * 1_000.0) for place, late in enumerate(late_ms)]

    assert judge(samples=lateness(*[1] * 40))["verdict"] == "ok"
    assert judge(samples=lateness(*[1] * 40, 80))["verdict"] == "ok"
    found = judge(samples=lateness(*[1] * 20, *[8] * 20))
    assert found["verdict"] == "degraded"
    assert "8.0 ms late" in found["reasons"][0]


def test_a_simulation_knows_no_lateness():
    assert judge(samples=[sample("r0", 0)])["verdict"] == "ok"


def test_many_failures_degrade_since_latency_leaves_them_out():
    rows = [request(n, status="error" if n < 2 else "ok") for n in range(100)]
    assert judge(rows)["verdict"] == "degraded"
    assert judge([*rows, *(request(n) for n in range(100, 300))])["verdict"] == "ok"


def test_invalid_outweighs_degraded_and_stands_first():
    found = judge(rows=late_by(30, ttft_ms=200), lost_processes=("router",), unverified_arms=("a, repeat 1",))
    assert found["verdict"] == "invalid"
    assert len(found["reasons"]) == 3
    assert "router was lost" in found["reasons"][0]


def test_failures_are_told_in_one_line_that_adds_up_wherever_they_are():
    """As in health, so in the flags and in the gate; what was never sent is no failure of the router, but told."""
    rows = [
        *(request(n) for n in range(231)),
        request(300, status="error"),
        *(request(n, status="incomplete") for n in range(301, 306)),
        *(request(n, status="cancelled", sent_us=None, first_token_us=None) for n in range(306, 308)),
        request(308, status="cancelled"),
    ]
    told = "9 of 240 requests did not complete (1 error, 5 cut short, 1 cut at the run's end, 2 not sent)"
    metrics = metrics_of(rows)
    assert account(metrics) == told
    assert metrics["errors"] + metrics["incomplete"] == lost(metrics) == 9
    assert f"a: {told}" in judge(rows)["reasons"][0]
    assert [flag.text for flag in flags({"a": metrics}) if flag.kind == "failures"] == [
        f"a: {told}; they are in no latency figure"
    ]


def test_figures_of_an_earlier_version_add_up_with_fewer_parts():
    assert account({"requests": 9, "errors": 2, "incomplete": 1}) == (
        "3 of 9 requests did not complete (2 errors, 1 incomplete)"
    )
