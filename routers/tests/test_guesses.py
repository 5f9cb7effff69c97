"""Policies that believe in what they sent: Dynamo's approximate modes and the prefix hash."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import EngineMetrics, HashedPrompt, PrefixKeys, Router, Signal, Stored, TurnView, make_policy
from routers.sequences import RouteGuesses

TEN = list(range(100, 110))
SECOND = 1_000_000


def turn(name, contents):
    return TurnView(request_id=name, prompt=HashedPrompt(16 * len(contents), contents, 16))


def router(policy, count=3, **options):
    return Router(make_policy(policy, options, random.Random(1)), [f"r{i}" for i in range(count)])


def test_a_guess_lives_for_its_ttl_and_every_decision_refreshes_its_blocks():
    guesses, keys = RouteGuesses(2.0), PrefixKeys(TEN)
    guesses.routed("r0", keys, 0)
    seen = []
    for at_s in (0.0, 1.5, 1.9, 2.0, 3.4, 3.5):
        guesses.expire(round(at_s * SECOND))
        seen.append(guesses.match(keys).get("r0", 0))
        if at_s == 1.5:
            guesses.routed("r0", PrefixKeys(TEN[:3]), round(at_s * SECOND))
    assert seen == [10, 10, 10, 3, 3, 0]
    assert len(guesses) == 0


CHAIN = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["r0", "r1"]), CHAIN), max_size=25), CHAIN)
def test_a_guess_equals_an_expiry_per_block_and_replica(decisions, probe):
    guesses, expiry, now = RouteGuesses(10.0), {}, 0
    for wait, replica, chain in decisions:
        now += wait * SECOND
        guesses.routed(replica, PrefixKeys(chain), now)
        for depth in range(1, len(chain) + 1):
            expiry[replica, chain[:depth]] = now + 10 * SECOND
        guesses.expire(now)
        for name in ("r0", "r1"):
            depth = 0
            while depth < len(probe) and expiry.get((name, probe[: depth + 1]), -1) > now:
                depth += 1
            assert guesses.match(PrefixKeys(probe)).get(name, 0) == depth


def test_dynamo_approx_believes_what_it_routed_and_asks_for_no_events():
    one = router("dynamo-approx")
    assert one.needs == {Signal.TOKENS}
    first = one.route(turn("a", TEN), 0)
    one.finished("a", 1, 1)
    again = one.route(turn("b", TEN), 119 * SECOND)
    assert (again.replica, again.believed_hit_tokens) == (first.replica, 160)
    one.finished("b", 1, 119 * SECOND)
    assert one.route(turn("c", TEN), 240 * SECOND).believed_hit_tokens == 0


def test_predict_on_route_takes_the_larger_of_event_and_guess():
    one = router("dynamo-kv", 1, predicted_ttl_s=5.0)
    one.route(turn("a", TEN[:4]), 0)
    assert one.route(turn("b", TEN), 1).believed_hit_tokens == 64
    one.kv_events("r0", [Stored(tuple(TEN[:6]), None, tuple(TEN[:6]), 16)], 2)
    assert one.route(turn("c", TEN[:8]), 6 * SECOND).believed_hit_tokens == 96


def test_the_load_aware_preset_believes_nothing_and_shares_nothing():
    one = router("dynamo-load-aware", 1)
    assert one.needs == {Signal.TOKENS}
    one.kv_events("r0", [Stored(tuple(TEN), None, tuple(TEN), 16)], 0)
    one.route(turn("a", TEN), 0)
    one.first_token("a", 1)
    decision = one.route(turn("b", TEN), 2)
    assert decision.scores == {"r0": 10 + 10 + 10}
    assert decision.believed_hit_tokens == 0


def test_a_prefix_goes_where_it_went_and_among_several_to_the_lowest_usage():
    one = router("prefix-hash", 4)
    window = list(range(32))
    first = one.route(turn("a", [*window, 1]), 0)
    assert first.rule == "cold"
    same = one.route(turn("b", [*window, 2, 3]), 0)
    assert (same.replica, same.rule) == (first.replica, "warm")
    one.metrics(first.replica, EngineMetrics(running=1, waiting=0, kv_usage=0.85), 1)
    other = one.route(turn("c", [*window, 4]), 1, exclude=[first.replica])
    one.metrics(other.replica, EngineMetrics(running=1, waiting=0, kv_usage=0.5), 2)
    assert one.route(turn("d", window), 2).replica == other.replica  # the first one is at its limit
    one.metrics(first.replica, EngineMetrics(running=1, waiting=0, kv_usage=0.4), 3)
    assert one.route(turn("e", window), 3).replica == first.replica


def test_a_prompt_without_a_full_block_has_no_prefix():
    one = router("prefix-hash")
    assert one.route(TurnView(request_id="a"), 0).rule == "no-prefix"
    assert one.route(TurnView(request_id="b", prompt=HashedPrompt(9, [], 16)), 0).rule == "no-prefix"


def test_prefixes_are_bounded_and_a_removed_replica_is_warm_no_more():
    one = router("prefix-hash", 2, capacity=2)
    placed = {number: one.route(turn(f"q{number}", [number]), 0).replica for number in range(3)}
    assert one.policy.stats() == {"prefixes": 2}
    one.remove_replica(placed[2], 1)
    assert one.route(turn("again", [2]), 2).rule == "cold"


# -- affinity-load-score -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("difference", "hit_wins"), [(0.66, True), (0.67, False)])
def test_a_full_hit_outweighs_a_load_difference_below_two_thirds(difference, hit_wins):
    one = router("affinity-load-score", 2)
    one.kv_events("r0", [Stored(tuple(TEN), None, tuple(TEN), 16)], 0)
    one.metrics("r0", EngineMetrics(running=0, waiting=0, kv_usage=0.2 + difference), 0)
    one.metrics("r1", EngineMetrics(running=0, waiting=0, kv_usage=0.2), 0)
    assert (one.route(turn("q", TEN), 1).replica == "r0") is hit_wins


def test_load_may_be_the_requests_in_flight_and_then_nothing_is_polled():
    one = router("affinity-load-score", 2, load="requests")
    assert Signal.ENGINE_METRICS not in one.needs
    one.kv_events("r0", [Stored(tuple(TEN), None, tuple(TEN), 16)], 0)
    assert [one.route(turn(f"q{i}", TEN), 0).replica for i in range(2)] == ["r0", "r1"]


def test_without_weight_on_load_it_is_pure_affinity():
    one = router("affinity-load-score", 2, w_load=0.0)
    one.kv_events("r0", [Stored(tuple(TEN), None, tuple(TEN), 16)], 0)
    one.metrics("r0", EngineMetrics(running=0, waiting=0, kv_usage=1.0), 0)
    assert {one.route(turn(f"q{i}", TEN), 0).replica for i in range(9)} == {"r0"}
