"""llm-d's scorers one by one, and how a profile weighs, sums and picks."""

import random
from collections import Counter

import msgspec
import pytest

from routers import (
    Cleared,
    EngineMetrics,
    HashedPrompt,
    OptionError,
    Router,
    Signal,
    Stored,
    TurnView,
    make_policy,
    parse_option,
)
from routers.policies.scorers import SCORERS

TEN = tuple(range(100, 110))


def profile(*entries, policy="llmd-precise-prefix", count=3, seed=1, **more):
    entries = [{"scorer": entry} if isinstance(entry, str) else entry for entry in entries]
    return Router(
        make_policy(policy, {"scorers": entries, **more}, random.Random(seed)), [f"r{i}" for i in range(count)]
    )


def turn(name="q", contents=TEN, session=None):
    return TurnView(request_id=name, session_id=session, prompt=HashedPrompt(16 * len(contents), contents, 16))


def metrics(one, **values):
    for name, (running, waiting, usage) in values.items():
        one.metrics(name, EngineMetrics(running=running, waiting=waiting, kv_usage=usage), 0)


def load(one, **counts):
    for name, number in counts.items():
        others = [view.name for view in one.replicas() if view.name != name]
        for place in range(number):
            one.route(turn(f"{name}-{place}", [place]), 0, exclude=others)


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        ("queue-depth", {"r0": 1.0, "r1": 0.5, "r2": 0.0}),  # queues 0, 4, 8
        ("kv-cache-utilization", {"r0": 1.0, "r1": 0.75, "r2": 0.5}),
        ("running-requests", {"r0": 0.0, "r1": 1.0, "r2": 2 / 3}),  # running 6, 0, 2
        ("load-aware", {"r0": 0.5, "r1": 0.5 * 124 / 128, "r2": 0.5 * 120 / 128}),
        ({"scorer": "load-aware", "threshold": 4}, {"r0": 0.5, "r1": 0.0, "r2": 0.0}),
    ],
)
def test_a_scorer_of_polled_gauges(scorer, expected):
    one = profile(scorer)
    assert one.needs == {Signal.ENGINE_METRICS}
    metrics(one, r0=(6, 0, 0.0), r1=(0, 4, 0.25), r2=(2, 8, 0.5))
    assert one.route(turn(), 0).scores == pytest.approx(expected)


@pytest.mark.parametrize("scorer", ["queue-depth", "running-requests", "kv-cache-utilization"])
def test_replicas_that_are_equal_or_never_heard_of_all_score_one(scorer):
    assert profile(scorer).route(turn(), 0).scores == {"r0": 1.0, "r1": 1.0, "r2": 1.0}


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        ("active-request", {"r0": 1.0, "r1": 0.5, "r2": 0.0}),  # 0, 1, 2 in flight
        ({"scorer": "active-request", "idle_threshold": 1}, {"r0": 1.0, "r1": 1.0, "r2": 0.0}),
        ({"scorer": "active-request", "max_busy_score": 0.4}, {"r0": 1.0, "r1": 0.2, "r2": 0.0}),
        ({"scorer": "token-load", "threshold": 100}, {"r0": 1.0, "r1": 0.6, "r2": 0.2}),  # 16 tokens weigh 40
    ],
)
def test_a_scorer_of_requests_in_flight(scorer, expected):
    one = profile(scorer)
    load(one, r1=1, r2=2)
    assert one.route(turn(), 0).scores == pytest.approx(expected)


def test_a_session_scores_where_it_was_last():
    one = profile("session-affinity")
    assert one.needs == {Signal.SESSION_ID}
    one.route(turn("a", session="s"), 0, exclude=["r0", "r1"])
    assert one.route(turn("b", session="s"), 0).scores == {"r0": 0.0, "r1": 0.0, "r2": 1.0}
    assert set(one.route(turn("c"), 0).scores.values()) == {0.0}


def test_a_cold_prompt_goes_to_whoever_got_one_longest_ago_or_never():
    one = profile("precise-prefix", "no-hit-lru")
    placed = [one.route(turn(f"q{i}", [i]), 0) for i in range(5)]
    assert [decision.replica for decision in placed] == ["r0", "r1", "r2", "r0", "r1"]
    assert placed[0].scores == {"r0": 1.0, "r1": 0.5, "r2": 0.0}
    assert placed[1].scores == {"r1": 1.0, "r2": 0.5, "r0": 0.0}
    one.kv_events("r0", [Stored((9,), None, (9,), 16)], 0)
    assert one.route(turn("warm", [9]), 0).scores == {"r0": 1.5, "r1": 0.5, "r2": 0.5}


def test_one_replica_is_always_new_to_the_lru():
    assert profile("no-hit-lru", count=1).route(turn(), 0).scores == {"r0": 1.0}


def test_the_approximate_index_counts_blocks_without_those_before_them():
    one = profile({"scorer": "prefix-cache", "capacity": 3}, policy="llmd-approx-prefix", count=2)
    one.route(turn("a", [1, 2, 3, 4]), 0, exclude=["r1"])  # head first, so block 1 is gone from r0
    one.route(turn("b", [1]), 0, exclude=["r0"])
    assert one.route(turn("c", [1, 2, 3, 4]), 0).scores == {"r0": 0.75, "r1": 0.25}


def test_the_approximate_index_stops_at_the_first_block_that_nobody_has():
    one = profile({"scorer": "prefix-cache", "capacity": 3}, policy="llmd-approx-prefix", count=2)
    one.route(turn("a", [1, 2, 3, 4]), 0, exclude=["r1"])
    assert one.route(turn("c", [1, 2, 3, 4]), 0).scores == {"r0": 0.0, "r1": 0.0}


def test_the_approximate_index_looks_at_so_many_blocks_and_forgets_a_replica_that_left():
    one = profile({"scorer": "prefix-cache", "blocks_max": 4}, policy="llmd-approx-prefix", count=2)
    one.route(turn("a"), 0, exclude=["r1"])
    assert one.route(turn("b", TEN[:8]), 0, exclude=["r1"]).scores == {"r0": 1.0}
    one.remove_replica("r0", 0)
    one.add_replica("r0", 0)
    assert one.route(turn("c"), 0).scores == {"r1": 0.0, "r0": 0.0}


def test_the_precise_index_scores_shares_and_weighs_tiers():
    one = profile("precise-prefix")
    one.kv_events("r0", [Stored(TEN[:4], None, TEN[:4], 16)], 0)
    one.kv_events("r1", [Stored(TEN[:2], None, TEN[:2], 16), Stored(TEN[2:4], TEN[1], TEN[2:4], 16, "CPU")], 0)
    decision = one.route(turn(), 0)
    assert decision.scores == pytest.approx({"r0": 0.4, "r1": 0.36, "r2": 0.0})
    assert (decision.replica, decision.believed_hit_tokens) == ("r0", 64)


@pytest.mark.parametrize(("ignore", "held"), [(False, 0.0), (True, 1.0)])
def test_a_clear_may_be_ignored_as_it_was_once(ignore, held):
    one = profile({"scorer": "precise-prefix", "ignore_clears": ignore}, count=1)
    one.kv_events("r0", [Stored(TEN, None, TEN, 16), Cleared()], 0)
    assert one.route(turn(), 0).scores == {"r0": held}


def test_speculative_entries_live_for_their_time():
    one = profile({"scorer": "precise-prefix", "speculative_ttl_s": 2.0}, count=2)
    one.route(turn("a"), 0, exclude=["r1"])
    assert one.route(turn("b"), 1_999_999, exclude=["r1"]).scores == {"r0": 1.0}
    assert one.route(turn("c"), 4_100_000).scores == {"r0": 0.0, "r1": 0.0}


def test_a_profile_weighs_and_sums_and_the_highest_wins():
    one = Router(make_policy("llmd-precise-prefix", {}, random.Random(1)), ["r0", "r1"])
    assert one.needs == {Signal.TOKENS, Signal.KV_EVENTS, Signal.ENGINE_METRICS}
    one.kv_events("r0", [Stored(TEN[:5], None, TEN[:5], 16)], 0)
    metrics(one, r0=(1, 9, 0.8), r1=(1, 0, 0.1))
    decision = one.route(turn(), 0)
    assert decision.scores == pytest.approx({"r0": 2 * 0.5 + 0.2 + 0, "r1": 0 + 0.9 + 1})
    assert decision.replica == "r1"
    assert decision.reason == "total 1.90: precise-prefix 0.00, kv-cache-utilization 0.90, queue-depth 1.00"


def test_the_default_profile_is_queue_2_usage_2_prefix_3():
    one = Router(make_policy("llmd-approx-prefix", {}, random.Random(1)), ["r0", "r1"])
    assert one.needs == {Signal.TOKENS, Signal.ENGINE_METRICS}
    one.route(turn("a"), 0, exclude=["r1"])
    metrics(one, r0=(1, 9, 0.5), r1=(1, 0, 0.0))
    assert one.route(turn("b"), 0).scores == pytest.approx({"r0": 3 + 1, "r1": 2 + 2})


def test_ties_are_drawn_and_the_weighted_draw_follows_the_totals():
    tied = Counter(profile("queue-depth", seed=seed).route(turn(), 0).replica for seed in range(60))
    assert len(tied) == 3
    one = profile("kv-cache-utilization", picker="weighted-random", count=2)
    metrics(one, r0=(0, 0, 0.25), r1=(0, 0, 0.75))
    drawn = Counter(one.route(turn(f"q{i}"), 0).replica for i in range(800))
    assert 560 < drawn["r0"] < 640  # 0.75 against 0.25
    none = profile("session-affinity", picker="weighted-random", count=2)
    assert len({none.route(turn(f"q{i}"), 0).replica for i in range(20)}) == 2


def test_scorers_are_given_as_a_scenario_or_a_command_line_gives_them():
    key, value = parse_option('scorers=[{"scorer": "precise-prefix", "weight": 2}, {"scorer": "active-request"}]')
    policy = make_policy("llmd-precise-prefix", {key: value})
    assert [(one.scorer, one.weight) for one in policy.options.scorers] == [
        ("precise-prefix", 2),
        ("active-request", 1),
    ]
    assert policy.needs == {Signal.TOKENS, Signal.KV_EVENTS}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"scorer": "prefix"}, "no scorer named 'prefix': choose one of prefix-cache, precise-prefix"),
        ({"scorer": "queue-depth", "weight": -1}, "weight=-1"),
        ({"scorer": "queue-depth", "threshold": 3}, "scorer 'queue-depth' has no option 'threshold'"),
        ({"scorer": "queue-depth", "wieght": 3}, "unknown field `wieght`"),
        ({"weight": 1}, "missing required field `scorer`"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry, message):
    with pytest.raises(OptionError, match=message):
        make_policy("llmd-precise-prefix", {"scorers": [entry]})


def test_no_scorers_is_no_profile():
    with pytest.raises(OptionError, match="at least one"):
        make_policy("llmd-precise-prefix", {"scorers": []})


def test_every_scorer_serves_with_defaults_and_options_survive_as_plain_values():
    for name in SCORERS:
        one = profile(name)
        decision = one.route(turn(session="s"), 0)
        assert all(0 <= value <= 1 for value in decision.scores.values())
        assert msgspec.json.encode(msgspec.structs.asdict(one.policy.options))
