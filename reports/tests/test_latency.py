import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.latency import nearest_rank
from reports.tests.rows_by_hand import MS, metrics_of, request

whole = st.integers(min_value=0, max_value=10**9)


@settings(deadline=None, max_examples=100)
@given(st.lists(whole, min_size=1, max_size=40))
def test_percentiles_are_measured_values_and_never_cross(values):
    found = metrics_of(request(number, first_token_us=value, chunk_gaps_us=None) for number, value in enumerate(values))
    ttft = found["ttft_ms"]
    order = [ttft[key] for key in ("p50", "p90", "p95", "p99", "max")]
    assert order == sorted(order)
    assert ttft["max"] == max(values) / 1_000
    assert all(figure in [value / 1_000 for value in values] for figure in order)
    assert ttft["count"] == len(values)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5_000), st.sampled_from([50, 90, 95, 99]))
def test_nearest_rank_is_the_least_with_its_percent_at_or_below(count, percentile):
    rank = nearest_rank(count, percentile)
    assert 100 * (rank + 1) >= percentile * count
    assert 100 * rank < percentile * count


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(12)))
def test_figures_do_not_depend_on_the_order_of_rows(order):
    rows = [
        request(n, sent_us=n * 7_001, last_token_us=(400 + 13 * n) * MS, turn=n % 3, session=f"s{n // 3}")
        for n in range(12)
    ]
    assert metrics_of(rows[n] for n in order) == metrics_of(rows)


def test_the_conventions_stub_stream_gives_the_conventions_figures():
    found = metrics_of([request()])
    assert found["ttft_ms"]["p50"] == 200
    assert found["ttst_ms"]["p50"] == 50
    assert found["tpot_ms"]["p50"] == 50
    assert found["ntpot_ms"]["p50"] == 80
    assert found["e2e_ms"]["p50"] == 400
    gaps = found["inter_chunk_latency_ms"]
    assert (gaps["count"], gaps["p50"], gaps["max"]) == (3, 70, 80)
    assert gaps["mean"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(("first", "chunk", "gap_ms"), [(4, 4, 40), (1, 1, 10), (8, 4, 40)])
def test_the_token_gap_discounts_the_first_chunk_and_the_chunk_gap_counts_chunks(first, chunk, gap_ms):
    """128 tokens, each 10 ms apart on average after the first chunk, however they are bundled."""
    chunks = (128 - first) // chunk
    last = (200 + chunks * gap_ms) * MS
    row = request(output_tokens=128, first_chunk_tokens=first, last_token_us=last, chunk_gaps_us=[gap_ms * MS] * chunks)
    found = metrics_of([row])
    assert found["token_gap_ms"]["p50"] == 10
    assert found["inter_chunk_latency_ms"]["p50"] == gap_ms
    assert metrics_of([request()])["token_gap_ms"] is None


def test_tpot_is_undefined_for_a_single_token():
    one = request(output_tokens=1, last_token_us=200 * MS, second_token_us=None, chunk_gaps_us=[])
    assert metrics_of([one])["tpot_ms"] is None
    assert metrics_of([one])["inter_chunk_latency_ms"] is None
    assert metrics_of([one, request(1)])["tpot_ms"]["count"] == 1


def test_a_failed_request_is_in_no_latency_figure():
    slow = {"first_token_us": 9_000 * MS, "last_token_us": 9_900 * MS}
    rows = [
        request(),
        *(request(n, status=status, **slow) for n, status in enumerate(("error", "incomplete", "cancelled"), 1)),
    ]
    found = metrics_of(rows)
    assert found["ttft_ms"]["max"] == 200
    assert found["e2e_ms"]["count"] == 1
    assert (found["requests"], found["errors"], found["incomplete"]) == (4, 1, 2)


def test_warm_up_is_not_measured():
    found = metrics_of([request(0, phase="warmup", first_token_us=9), request(1)])
    assert found["ttft_ms"]["count"] == 1
    assert found["requests"] == 1


def test_what_was_not_recorded_is_null():
    bare = request(first_token_us=None, second_token_us=None, chunk_gaps_us=None, scheduled_us=None)
    found = metrics_of([bare])
    for name in ("ttft_ms", "ttst_ms", "tpot_ms", "inter_chunk_latency_ms", "queue_ms", "routing_ms", "sched_lag_ms"):
        assert found[name] is None, name
    assert found["e2e_ms"]["p50"] == 400


def test_waiting_in_the_client_is_not_ttft():
    found = metrics_of(
        [
            request(
                scheduled_us=0,
                sent_us=5_000 * MS,
                first_token_us=5_200 * MS,
                last_token_us=5_400 * MS,
                end_us=5_500 * MS,
            )
        ]
    )
    assert found["ttft_ms"]["p50"] == 200
    assert found["sched_lag_ms"]["p50"] == 5_000
    assert found["ttft_from_schedule_ms"]["p50"] == 5_200
    assert found["e2e_from_schedule_ms"]["p50"] == 5_400


def test_the_engine_queue_begins_where_the_router_let_go():
    assert metrics_of([request(routed_us=30 * MS, admitted_us=90 * MS)])["queue_ms"]["p50"] == 60
    assert metrics_of([request(routed_us=30 * MS)])["routing_ms"]["p50"] == 30
    assert metrics_of([request(admitted_us=90 * MS)])["queue_ms"]["p50"] == 90


def session(name: str, *turns: tuple[int, int], step: int | None = None, **changes) -> list[dict]:
    return [
        request(
            n,
            request_id=f"{name}-{n}",
            session=name,
            turn=n,
            sent_us=sent * MS,
            last_token_us=last * MS,
            end_us=last * MS,
            rollout_step=step,
            **changes,
        )
        for n, (sent, last) in enumerate(turns)
    ]


def test_a_session_lasts_from_its_first_send_to_its_last_token():
    found = metrics_of([*session("x", (0, 400), (1_000, 1_700)), *session("y", (100, 300))])
    assert found["session_e2e_ms"]["count"] == 2
    assert found["session_e2e_ms"]["max"] == 1_700
    assert found["session_e2e_ms"]["p50"] == 200


def test_a_session_that_begins_in_the_ramp_counts_when_it_ends_in_steady_load():
    straddling = session("straddling", (0, 200), (300, 700))
    straddling[0]["phase"] = "warmup"
    early = session("early", (0, 100), (150, 250), phase="warmup")
    found = metrics_of([*straddling, *early])
    assert (found["session_e2e_ms"]["count"], found["session_e2e_ms"]["max"]) == (1, 700)
    assert found["e2e_ms"]["count"] == 1


def test_a_session_with_a_failed_turn_has_no_length():
    rows = [*session("x", (0, 400), (1_000, 1_700)), *session("y", (100, 300))]
    rows[1]["status"] = "error"
    assert metrics_of(rows)["session_e2e_ms"]["count"] == 1


def test_the_same_session_in_two_repeats_is_two_sessions():
    again = [row | {"repeat": 1} for row in session("x", (0, 900))]
    found = metrics_of([*session("x", (0, 400)), *again])
    assert found["session_e2e_ms"]["count"] == 2


def test_the_slowest_member_sets_the_time_of_a_step():
    rows = [
        *session("x", (0, 400), (500, 900), step=0),
        *session("y", (10, 5_000), step=0),
        *session("z", (5_000, 6_000), step=1),
    ]
    found = metrics_of(rows)
    assert found["step_makespan_ms"]["count"] == 2
    assert found["step_makespan_ms"]["max"] == 5_000
    assert metrics_of(session("x", (0, 400)))["step_makespan_ms"] is None


def test_equal_mean_latency_with_one_late_member_shows_in_the_makespan():
    even = [row for n in range(4) for row in session(f"e{n}", (0, 1_000), step=0)]
    late = [row for n, last in enumerate((800, 800, 400, 2_000)) for row in session(f"l{n}", (0, last), step=0)]
    one, two = metrics_of(even), metrics_of(late)
    assert one["e2e_ms"]["mean"] == two["e2e_ms"]["mean"]
    assert two["step_makespan_ms"]["p90"] == 2 * one["step_makespan_ms"]["p90"]


def test_nine_milliseconds_of_difference_stay_nine_milliseconds():
    a = metrics_of(request(n, first_token_us=1_040 * MS) for n in range(50))
    b = metrics_of(request(n, first_token_us=1_049 * MS) for n in range(50))
    assert b["ttft_ms"]["p99"] - a["ttft_ms"]["p99"] == 9
