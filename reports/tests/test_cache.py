import pytest

from reports.tests.rows_by_hand import metrics_of, request, sample


def test_hit_rate_is_weighted_by_tokens():
    found = metrics_of(
        [request(0, prompt_tokens=1_000, cached_tokens=900), request(1, prompt_tokens=100, cached_tokens=0)]
    )
    assert found["hit_rate"] == 900 / 1_100


def test_no_hits_is_zero_and_no_report_of_hits_is_null():
    assert metrics_of([request(cached_tokens=0)])["hit_rate"] == 0
    assert metrics_of([request(cached_tokens=None)])["hit_rate"] is None
    mixed = metrics_of([request(0, cached_tokens=50), request(1, cached_tokens=None)])
    assert mixed["hit_rate"] == 0.5


def test_the_ceiling_and_the_redundant_prefill_follow_from_one_infinite_cache():
    rows = [request(n, prompt_tokens=2_048, cached_tokens=0) for n in range(8)]
    found = metrics_of(rows, ceiling_cached_tokens=7 * 2_048)
    assert found["hit_rate_ceiling"] == 7 / 8
    assert found["redundant_prefill_tokens"] == 7 * 2_048
    joint = [request(n, prompt_tokens=2_048, cached_tokens=2_048 * (n > 0)) for n in range(8)]
    assert metrics_of(joint, ceiling_cached_tokens=7 * 2_048)["redundant_prefill_tokens"] == 0


def test_the_ceiling_and_the_hit_rate_are_of_the_same_requests():
    """A request that failed, one that was cut and one without usage are in neither."""
    rows = [
        request(0, cached_tokens=50),
        request(1, cached_tokens=0, status="error"),
        request(2, cached_tokens=0, status="incomplete"),
        request(3),
    ]
    found = metrics_of(rows, ceiling_cached_tokens=60)
    assert (found["hit_rate"], found["hit_rate_ceiling"], found["redundant_prefill_tokens"]) == (0.5, 0.6, 10)
    assert metrics_of(rows)["hit_rate_ceiling"] is None


def test_without_usage_the_ceiling_is_that_of_all_successes():
    found = metrics_of([request(0), request(1), request(2, status="error")], ceiling_cached_tokens=100)
    assert (found["hit_rate"], found["hit_rate_ceiling"]) == (None, 0.5)
    assert found["redundant_prefill_tokens"] is None


def test_redundant_prefill_is_unknown_when_a_request_of_the_ceiling_is_missing():
    rows = [request(0, cached_tokens=0), request(1, cached_tokens=0, status="error")]
    found = metrics_of(rows, ceiling_cached_tokens=100, ceiling_prompt_tokens=200)
    assert found["redundant_prefill_tokens"] is None
    assert found["hit_rate_ceiling"] == 0.5


def test_phantom_hits_are_what_was_believed_and_not_served():
    found = metrics_of([request(prompt_tokens=640, believed_hit_tokens=476, cached_tokens=316)])
    assert found["believed_hit_rate"] == 476 / 640
    assert found["phantom_hit_points"] == pytest.approx(25.0)
    assert metrics_of([request(believed_hit_tokens=10)])["phantom_hit_points"] is None
    assert metrics_of([request(cached_tokens=10)])["believed_hit_rate"] is None


def test_engine_counters_are_summed_over_replicas_not_over_samples():
    samples = [
        sample("r0", 0, hit_tokens=0, query_tokens=100, preemptions=0, evicted_blocks=2),
        sample("r1", 0, hit_tokens=10, query_tokens=100, preemptions=1, evicted_blocks=0),
        sample("r0", 500_000, hit_tokens=60, query_tokens=200, preemptions=2, evicted_blocks=7),
        sample("r1", 500_000, hit_tokens=10, query_tokens=100, preemptions=1, evicted_blocks=0),
    ]
    found = metrics_of([request()], samples)
    assert found["engine_hit_rate"] == 70 / 300
    assert (found["preemptions"], found["evicted_blocks"]) == (3, 7)


def test_a_replica_that_began_anew_loses_no_counts():
    samples = [
        sample("r0", t, preemptions=count) for t, count in ((0, 3), (500_000, 5), (1_000_000, 1), (1_500_000, 2))
    ]
    assert metrics_of([request()], samples)["preemptions"] == 7


def test_counters_of_two_repeats_add_up():
    samples = [sample("r0", 0, preemptions=3), sample("r0", 0, preemptions=4, repeat=1)]
    assert metrics_of([request()], samples)["preemptions"] == 7


def test_engines_that_do_not_tell_are_null():
    found = metrics_of([request()], [sample("r0")])
    for name in ("engine_hit_rate", "preemptions", "evicted_blocks", "load_cv"):
        assert found[name] is None, name


def believing(number, queue_ms, cached):
    return request(number, admitted_us=queue_ms * 1_000, believed_hit_tokens=80, cached_tokens=cached)


def test_a_belief_that_went_while_the_request_waited_is_told_from_one_that_was_wrong_at_once():
    waited = metrics_of([*(believing(n, 10, 80) for n in range(20)), *(believing(n, 150, 20) for n in range(20, 40))])
    assert (waited["belief_kept_at_once"], waited["belief_kept_after_wait"]) == (1.0, 0.25)
    assert (waited["misbelieved_queue_ms"], waited["believed_queue_ms"]) == (150, 10)
    stale = metrics_of([believing(n, 10, 0) for n in range(20)])
    assert (stale["belief_kept_at_once"], stale["belief_kept_after_wait"]) == (0.0, None)


def test_few_beliefs_and_engines_that_tell_no_queue_say_nothing_of_when_it_went():
    assert metrics_of([believing(n, 10, 80) for n in range(19)])["belief_kept_at_once"] is None
    untold = metrics_of([request(n, believed_hit_tokens=80, cached_tokens=0) for n in range(30)])
    assert (untold["belief_kept_at_once"], untold["misbelieved_queue_ms"]) == (None, None)
