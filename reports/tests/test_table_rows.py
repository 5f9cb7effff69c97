from reports.table_rows import table_addresses
from reports.tests.rows_by_hand import MS, metrics_of, request


def shown(scenario=None, **changes):
    return table_addresses(scenario or {}, {"a": metrics_of([request(**changes)])})


def test_a_wait_in_the_client_is_shown_beside_ttft_where_there_is_one():
    """Sent when a place was free, 3 s after it could have been: TTFT knows nothing of that."""
    waited = {"ready_us": 0, "scheduled_us": 3_000 * MS, "sent_us": 3_000 * MS}
    instants = {"first_token_us": 3_200, "last_token_us": 3_400, "end_us": 3_500}
    later = {key: at * MS for key, at in instants.items()}
    rows = shown(**waited, **later, second_token_us=None)
    assert rows[rows.index("ttft_ms.p99") + 1 :][:2] == ["client_wait_ms.p99", "ttft_with_wait_ms.p99"]
    assert "client_wait_ms.p99" not in shown(ready_us=0)
    found = metrics_of([request(**waited, **later)])
    assert (found["ttft_ms"]["p50"], found["client_wait_ms"]["p50"], found["ttft_with_wait_ms"]["p50"]) == (
        200,
        3_000,
        3_200,
    )


def test_the_token_gap_is_shown_where_first_chunks_hold_several_tokens():
    assert "token_gap_ms.p50" in shown(first_chunk_tokens=2)
    assert "token_gap_ms.p50" not in shown(first_chunk_tokens=1)


def test_first_content_is_shown_where_an_answer_begins_with_reasoning():
    assert "first_content_ms.p50" in shown(first_content_us=330 * MS)
    assert "first_content_ms.p50" not in shown(first_content_us=200 * MS)


def test_bursts_show_how_they_were_spread_and_what_was_prefilled_again():
    rows = shown({"workload": {"kind": "group-burst"}})
    assert rows[rows.index("placement") + 1 :][:2] == ["burst_max_share", "redundant_prefill_tokens"]


def test_what_a_scenario_expects_something_of_is_shown():
    scenario = {"expect": [{"metric": "sticky_rate"}, {"metric": "ttft_ms.p50"}, {"metric": "of_another_version"}]}
    assert shown(scenario)[-1] == "sticky_rate"
    assert shown(scenario).count("ttft_ms.p50") == 1


def test_requests_that_were_lost_stand_beside_the_errors_as_soon_as_there_is_one():
    rows = shown(status="incomplete")
    assert rows[rows.index("errors") + 1] == "incomplete"
    rows = shown(status="error", error_class="router")
    assert rows[rows.index("errors") + 1] == "collateral_errors"
    assert {"collateral_errors", "incomplete"}.isdisjoint(shown(status="error", error_class="http_500"))
