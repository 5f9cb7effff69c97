"""llm-d's filters and saturation, the adapter scorer, and what its gauges come from."""

import random
from collections import Counter

import pytest

from routers import EngineMetrics, HashedPrompt, NoReplica, OptionError, Router, Signal, Stored, TurnView, make_policy
from routers.metrics_poll import parse_metrics

TEN = tuple(range(100, 110))


def profile(*filters, scorers=({"scorer": "active-request"},), count=3, seed=1, **more):
    options = {"scorers": list(scorers), "filters": list(filters), **more}
    return Router(make_policy("llmd-approx-prefix", options, random.Random(seed)), [f"r{i}" for i in range(count)])


def turn(name="q", contents=TEN, **more):
    return TurnView(request_id=name, prompt=HashedPrompt(16 * len(contents), contents, 16), **more)


def gauges(one, at_us=0, **values):
    for name, (waiting, usage) in values.items():
        one.metrics(name, EngineMetrics(running=0, waiting=waiting, kv_usage=usage, at_us=at_us), at_us)


def candidates(one, now_us=0, **more):
    return set(one.policy.choose(turn(**more), one.fleet(now_us)).scores)


@pytest.mark.parametrize(
    ("options", "now_us", "expected"),
    [
        ({}, 0, {"r0"}),  # r1 waits too much, r2 is too full
        ({"headroom": 0.2}, 0, {"r0", "r1", "r2"}),
        ({"queue_threshold": 6}, 0, {"r0", "r1"}),
        ({"kv_threshold": 0.9}, 0, {"r0", "r2"}),
        ({}, 200_000, {"r0"}),
        ({}, 200_001, {"r0", "r1", "r2"}),  # all are stale, so nobody passes, so all do
        ({"stale_s": 1}, 200_001, {"r0"}),
    ],
)
def test_the_utilization_filter_takes_out_the_saturated_and_all_pass_when_none_would(options, now_us, expected):
    one = profile({"filter": "utilization", **options})
    assert Signal.ENGINE_METRICS in one.needs
    gauges(one, r0=(4, 0.79), r1=(5, 0.1), r2=(0, 0.8))
    assert candidates(one, now_us) == expected


def test_a_replica_that_was_never_heard_of_does_not_pass_the_utilization_filter():
    one = profile({"filter": "utilization"})
    gauges(one, r1=(0, 0.0))
    assert candidates(one) == {"r1"}


@pytest.mark.parametrize(("options", "passes"), [({"max_requests": 2}, 2), ({"max_tokens": 320}, 2), ({}, 100)])
def test_the_concurrency_filter_takes_out_the_crowded_and_then_everybody(options, passes):
    one = profile({"filter": "concurrency", **options}, count=1)
    for number in range(passes):
        one.route(turn(f"q{number}"), 0)
    with pytest.raises(NoReplica, match="concurrency"):
        one.route(turn("over"), 0)
    assert one.counts.no_replica == 1
    one.finished("q0", 1, 1)
    assert one.route(turn("over"), 2)


@pytest.mark.parametrize(("blocks", "expected"), [(8, {"r1"}), (7, {"r0", "r1", "r2"})])
def test_the_affinity_filter_keeps_those_that_match_four_fifths(blocks, expected):
    one = profile({"filter": "prefix-cache-affinity", "exploration": 0.0}, scorers=[{"scorer": "prefix-cache"}])
    one.route(turn("warm", TEN[:blocks]), 0, exclude=["r0", "r2"])
    assert candidates(one) == expected


def test_the_affinity_filter_lets_all_pass_for_one_request_in_a_hundred():
    one = profile({"filter": "prefix-cache-affinity"}, scorers=[{"scorer": "prefix-cache"}], seed=3)
    one.route(turn("warm"), 0, exclude=["r0", "r2"])
    seen = Counter(len(candidates(one)) for _ in range(4000))
    assert 15 <= seen[3] <= 80
    assert seen[1] + seen[3] == 4000


def test_a_hit_of_any_length_is_a_whole_match_to_the_affinity_filter_behind_the_precise_scorer():
    """There the precise scorer overwrites the match with 1 of 1, or 0."""
    one = profile({"filter": "prefix-cache-affinity", "exploration": 0.0}, scorers=[{"scorer": "precise-prefix"}])
    one.kv_events("r2", [Stored(TEN[:1], None, TEN[:1], 16)], 0)
    assert candidates(one) == {"r2"}


def test_filters_work_one_after_the_other():
    one = profile({"filter": "utilization"}, {"filter": "concurrency", "max_requests": 1})
    gauges(one, r0=(0, 0.1), r1=(0, 0.1), r2=(9, 0.1))
    chosen = {one.route(turn(f"q{number}"), 0).replica for number in range(2)}
    assert chosen == {"r0", "r1"}
    with pytest.raises(NoReplica):
        one.route(turn("over"), 0)


@pytest.mark.parametrize(
    ("gauge", "priority", "turned_away"),
    [((5, 0.0), -1, True), ((4, 0.0), -1, False), ((0, 0.8), -1, True), ((5, 0.9), 0, False)],
)
def test_a_saturated_pool_turns_negative_priorities_away(gauge, priority, turned_away):
    one = profile(count=1, shed_saturated=True)
    gauges(one, r0=gauge)
    if turned_away:
        with pytest.raises(NoReplica, match="saturated"):
            one.route(turn(priority=priority), 0)
    else:
        assert one.route(turn(priority=priority), 0)


def test_saturation_is_the_mean_over_the_pool_and_silence_counts_as_full():
    from routers.policies.llmd import saturation

    one = profile(count=2)
    assert saturation(one.fleet(0)) == 1.0
    gauges(one, r0=(10, 0.4))
    assert saturation(one.fleet(0)) == pytest.approx((2 + 1) / 2)
    gauges(one, r1=(0, 0.2))
    assert saturation(one.fleet(0)) == pytest.approx((2 + 0.25) / 2)
    assert saturation(one.fleet(200_001)) == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"filters": [{"filter": "taste"}]}, "no filter named 'taste': choose one of utilization"),
        ({"filters": [{"filter": "concurrency", "headroom": 1.0}]}, "has no option 'headroom': it reads max_requests"),
        ({"filters": [{"filter": "concurrency", "max_requests": 0}]}, "max_requests=0"),
        ({"filters": [{"filter": "prefix-cache-affinity"}], "scorers": [{"scorer": "load-aware"}]}, "add the scorer"),
    ],
)
def test_a_filter_that_cannot_work_is_an_error_that_says_why(options, words):
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        make_policy("llmd-approx-prefix", options)


@pytest.mark.parametrize(
    ("running", "waiting", "most", "expected"),
    [
        (("mine", "other"), (), 2, 1.0),
        (("other",), (), 2, 0.8),
        (("other",), ("mine",), 2, 0.6),
        (("other",), ("third",), 2, 0.0),
        (("other",), ("mine",), 3, 0.8),
        ((), (), 0, 0.0),
    ],
)
def test_the_adapter_scorer(running, waiting, most, expected):
    one = profile(scorers=[{"scorer": "lora-affinity"}], count=1)
    one.metrics(
        "r0",
        EngineMetrics(
            running=0,
            waiting=0,
            kv_usage=0.0,
            adapters_running=running,
            adapters_waiting=waiting,
            adapters_max=most,
        ),
        0,
    )
    assert one.policy.choose(turn(model="mine"), one.fleet(0)).scores == {"r0": expected}


def test_a_replica_without_gauges_has_room_for_no_adapter():
    one = profile(scorers=[{"scorer": "lora-affinity"}], count=1)
    assert one.policy.choose(turn(model="mine"), one.fleet(0)).scores == {"r0": 0.0}


def test_adapters_are_read_from_the_newest_series_of_the_engines_gauge():
    text = """\
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:lora_requests_info{max_lora="4",running_lora_adapters="new,old",waiting_lora_adapters="late"} 20.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 10.0
"""
    found = parse_metrics(text, 0)
    assert (found.adapters_running, found.adapters_waiting, found.adapters_max) == (("new", "old"), ("late",), 4)
