"""Load, session and affinity policies: who is chosen, and what is left to chance."""

import random
from collections import Counter

import numpy as np
import pytest

from routers import (
    EngineMetrics,
    FleetView,
    HashedPrompt,
    ReplicaView,
    Router,
    Stored,
    TurnView,
    make_policy,
)

BLOCK = 16


def fleet(**in_flight):
    return FleetView([ReplicaView(name=name, in_flight=count) for name, count in in_flight.items()])


def turn(name="q", session=None, contents=None):
    prompt = HashedPrompt(BLOCK * len(contents), contents, BLOCK) if contents is not None else None
    return TurnView(request_id=name, session_id=session, prompt=prompt)


def serve(router, turns, *, finish=True):
    placed = []
    for number, one in enumerate(turns):
        placed.append(router.route(one, number).replica)
        if finish:
            router.finished(one.request_id, 1, number)
    return placed


@pytest.mark.parametrize(
    "policy",
    [
        make_policy("least-requests", {}, random.Random(7)),
        make_policy("round-robin", {}, random.Random(7)),
        make_policy("dynamo-kv", {}, random.Random(7)),
    ],
)
def test_a_decision_without_a_tie_draws_nothing_from_the_rng(policy):
    policy.rng = random.Random(7)
    if type(policy).__name__ == "DynamoKv":
        router = Router(policy, ["r0", "r1"])
        router.kv_events("r0", [Stored((1, 2), None, (5, 6), BLOCK)], 0)
        assert router.route(turn(contents=[5, 6, 7]), 0).replica == "r0"
    else:
        assert policy.choose(turn(), fleet(r0=1, r1=4)).replica == "r0"
    assert policy.rng.getstate() == random.Random(7).getstate()


def test_every_policy_places_alike_for_one_seed_and_one_history():
    for name in ("random", "power-of-two", "least-requests", "pure-kv-affinity", "dynamo-kv"):
        runs = []
        for _ in range(2):
            router = Router(make_policy(name, {}, random.Random(11)), ["r0", "r1", "r2"])
            runs.append(serve(router, [turn(f"q{i}", contents=[i]) for i in range(20)], finish=False))
        assert runs[0] == runs[1]


def test_random_uses_every_replica_about_equally():
    router = Router(make_policy("random", {}, random.Random(1)), ["r0", "r1", "r2", "r3"])
    serve(router, [turn(f"q{i}") for i in range(2000)])
    assert all(400 < count < 600 for count in router.placements.values())


def test_round_robin_goes_round_and_no_replica_that_comes_or_goes_makes_another_skip():
    router = Router(make_policy("round-robin"), ["r0", "r1", "r2"])
    assert serve(router, [turn(f"a{i}") for i in range(4)]) == ["r0", "r1", "r2", "r0"]
    router.drain_replica("r1", 0)
    assert serve(router, [turn(f"b{i}") for i in range(3)]) == ["r2", "r0", "r2"]
    router.add_replica("r1", 0)
    assert serve(router, [turn(f"c{i}") for i in range(3)]) == ["r1", "r0", "r2"]


def test_least_requests_takes_the_fewest_in_flight():
    decision = make_policy("least-requests").choose(turn(), fleet(r0=3, r1=1, r2=2))
    assert (decision.replica, decision.rule) == ("r1", "least-requests")
    assert "1" in decision.reason


@pytest.mark.parametrize("seed", range(8))
def test_idle_replicas_share_sequential_requests_evenly_though_one_is_away_half_the_time(seed):
    """Field case BL-22: 3/3/3/3 within one, where a positional tie gave 12/0/0/0."""
    router = Router(make_policy("least-requests", {}, random.Random(seed)), ["r0", "r1", "r2", "r3"])
    for number in range(12):
        router.route(turn(f"q{number}"), number, exclude=["r1"] if number % 2 else [])
        router.finished(f"q{number}", 1, number)
    assert all(2 <= router.placements[name] <= 4 for name in ("r0", "r1", "r2", "r3"))


def test_tie_rules_first_and_random_do_what_they_say():
    first = Router(make_policy("least-requests", {"ties": "first"}), ["r0", "r1", "r2"])
    assert set(serve(first, [turn(f"q{i}") for i in range(9)])) == {"r0"}
    drawn = Router(make_policy("least-requests", {"ties": "random"}, random.Random(5)), ["r0", "r1", "r2"])
    assert set(serve(drawn, [turn(f"q{i}") for i in range(30)])) == {"r0", "r1", "r2"}


def test_power_of_two_never_takes_the_most_loaded_of_three():
    policy = make_policy("power-of-two", {}, random.Random(2))
    seen = Counter(policy.choose(turn(), fleet(r0=0, r1=5, r2=9)).replica for _ in range(300))
    assert seen["r2"] == 0
    assert seen["r0"] > seen["r1"] > 0


def test_power_of_two_ties_go_to_the_one_drawn_first():
    policy, twin = make_policy("power-of-two", {}, random.Random(4)), random.Random(4)
    for _ in range(50):
        names = [view.name for view in twin.sample(fleet(r0=1, r1=1, r2=1).replicas, 2)]
        assert policy.choose(turn(), fleet(r0=1, r1=1, r2=1)).replica == names[0]


def test_one_replica_needs_no_draw():
    for name in ("random", "power-of-two", "least-requests"):
        policy = make_policy(name, {}, random.Random(3))
        assert policy.choose(turn(), fleet(r0=9)).replica == "r0"
        assert policy.rng.getstate() == random.Random(3).getstate()


# -- session-ring ------------------------------------------------------------------------------------------------


def sessions(count=2000):
    return [f"session-{i}" for i in range(count)]


def owners(router, names):
    return dict(zip(names, serve(router, [turn(f"t-{n}", session=n) for n in names]), strict=True))


def test_every_turn_of_a_session_goes_to_one_replica_whatever_the_load():
    router = Router(make_policy("session-ring"), ["r0", "r1", "r2"])
    placed = serve(router, [turn(f"q{i}", session="s") for i in range(50)], finish=False)
    assert len(set(placed)) == 1


@pytest.mark.parametrize("replicas", [3, 7])
def test_one_added_replica_takes_about_its_share_of_sessions_and_nobody_else_moves(replicas):
    router = Router(make_policy("session-ring"), [f"r{i}" for i in range(replicas)])
    names = sessions()
    before = owners(router, names)
    router.add_replica("new", 0)
    after = owners(router, names)
    moved = [name for name in names if before[name] != after[name]]
    assert {after[name] for name in moved} == {"new"}
    assert 0.5 / (replicas + 1) < len(moved) / len(names) < 1.6 / (replicas + 1)


def test_a_drained_replica_gives_away_its_own_sessions_and_gets_them_back():
    router = Router(make_policy("session-ring"), ["r0", "r1", "r2", "r3"])
    names = sessions(500)
    before = owners(router, names)
    router.drain_replica("r2", 0)
    during = owners(router, names)
    assert all(during[name] == before[name] or before[name] == "r2" for name in names)
    assert "r2" not in during.values()
    router.add_replica("r2", 0)
    assert owners(router, names) == before


def test_a_retry_goes_to_the_next_on_the_ring():
    router = Router(make_policy("session-ring"), ["r0", "r1", "r2"])
    owner = router.route(turn("a", session="s"), 0).replica
    decision = router.route(turn("b", session="s"), 0, exclude=[owner])
    assert decision.replica != owner
    assert decision.rule == "ring-next"


def test_a_turn_without_session_goes_where_least_is_in_flight():
    router = Router(make_policy("session-ring"), ["r0", "r1", "r2"])
    placed = serve(router, [turn(f"q{i}") for i in range(6)], finish=False)
    assert Counter(placed) == {"r0": 2, "r1": 2, "r2": 2}
    assert router.route(turn("last"), 9).rule == "no-session"


# -- pure-kv-affinity --------------------------------------------------------------------------------------------


def test_the_longest_prefix_wins_whatever_the_load():
    router = Router(make_policy("pure-kv-affinity"), ["r0", "r1"])
    router.kv_events("r0", [Stored((1, 2), None, (5, 6), BLOCK)], 0)
    router.kv_events("r1", [Stored((1,), None, (5,), BLOCK)], 0)
    for number in range(20):
        decision = router.route(turn(f"q{number}", contents=[5, 6, 7]), 0)
        assert decision.replica == "r0"
    assert decision.believed_hit_tokens == 32
    assert decision.reason == "longest prefix: 2 of 3 blocks resident"


def test_a_warm_system_prompt_on_one_replica_takes_all_144_requests():
    rng = np.random.default_rng(7)
    router = Router(make_policy("pure-kv-affinity", {"ties": "first"}), ["r0", "r1", "r2", "r3"])
    system = [1, 2, 3, 4]
    router.kv_events("r0", [Stored((1, 2, 3, 4), None, tuple(system), BLOCK)], 0)
    talks = [system + rng.integers(10, 2**60, size=rng.integers(3, 10)).tolist() for _ in range(48)]
    for _ in range(3):
        for number, talk in enumerate(talks):
            placed = router.route(turn("q", contents=talk), 0).replica
            router.kv_events(placed, [Stored(tuple(talk), None, tuple(talk), BLOCK)], 0)
            router.finished("q", 1, 0)
            talks[number] = talk + rng.integers(10, 2**60, size=2).tolist()
    assert router.placements == {"r0": 144}


def test_without_tokens_the_choice_falls_to_the_tie_rule_and_believes_nothing():
    decision = make_policy("pure-kv-affinity", {"ties": "first"}).choose(turn(), fleet(r0=5, r1=0))
    assert (decision.replica, decision.rule, decision.believed_hit_tokens) == ("r0", "no-tokens", None)


def test_metrics_are_no_business_of_policies_that_do_not_ask():
    for name in ("random", "round-robin", "least-requests", "power-of-two", "session-ring", "pure-kv-affinity"):
        router = Router(make_policy(name), ["r0"])
        router.metrics("r0", EngineMetrics(running=1, waiting=0, kv_usage=0.1), 0)
        assert router.route(turn("q", session="s", contents=[1]), 0).replica == "r0"
