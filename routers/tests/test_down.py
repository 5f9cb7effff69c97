"""Replicas that are down, without a socket: who is shown to policies, and who is believed to be there."""

import random

import pytest

from routers import (
    BasePolicy,
    Decision,
    NoReplica,
    OptionError,
    Ramp,
    Router,
    TextPrompt,
    TokenPrompt,
    TurnView,
    make_policy,
    policy_names,
)
from routers.down import HEALTH_INTERVAL_MS, Down

KEYS = [f"conversation-{i}" for i in range(2_000)]
POLICIES = [name for name in policy_names() if name != "clairvoyant"]
RINGS = ["session-ring", "ray-consistent-hash", "vllm-consistent-hash"]


def router(policy="least-requests", replicas=4, **more):
    return Router(make_policy(policy, {}, random.Random(1)), [f"r{i}" for i in range(replicas)], **more)


def turn(session, name=None):
    return TurnView(request_id=name or f"q-{session}", session_id=session)


def shown(one):
    return [view.name for view in one.fleet(0)]


def owners(one, keys=KEYS):
    fleet = one.fleet(0)
    return {key: one.policy.choose(turn(key), fleet).replica for key in keys}


def test_a_replica_is_down_from_a_failed_connection_until_it_answers():
    one = router()
    assert one.unreachable("r1", 5) is True
    assert one.unreachable("r1", 9) is False  # known
    assert shown(one) == ["r0", "r2", "r3"]
    assert [view.name for view in one.fleet(0).down] == ["r1"]
    assert one.down.since_us() == {"r1": 5}
    assert one.reachable("r1", 20) is True
    assert one.reachable("r1", 21) is False
    assert shown(one) == ["r0", "r1", "r2", "r3"]
    assert not one.fleet(0).down
    assert one.down.times == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_no_turn_goes_to_a_replica_that_is_down_whatever_the_policy(policy):
    one = router(policy)
    for number in range(12):
        one.route(turn(f"s{number}", f"a{number}"), 0)
    one.unreachable("r0", 1)
    one.unreachable("r2", 1)
    for number in range(12):
        one.failed(f"a{number}", 2)  # they look idle now
    placed = {one.route(turn(f"s{number}", f"b{number}"), 3).replica for number in range(24)}
    assert placed <= {"r1", "r3"}
    one.reachable("r0", 4)
    one.reachable("r2", 4)
    for number in range(24):
        one.finished(f"b{number}", 1, 5)
    assert one.in_flight == 0


def test_an_idle_dead_replica_draws_nothing_although_it_looks_least_loaded():
    one = router(replicas=3)
    for name in ("r0", "r1"):
        one.unreachable(name, 0)
    assert {one.route(turn(None, f"q{i}"), 1).replica for i in range(50)} == {"r2"}


def test_with_everybody_down_they_are_tried_all_the_same_each_once():
    one = router(replicas=3)
    for name in ("r0", "r1", "r2"):
        one.unreachable(name, 0)
    assert shown(one) == ["r0", "r1", "r2"]
    assert not one.fleet(0).down
    tried = set()
    for number in range(3):
        decision = one.route(turn(None, f"q{number}"), 1, exclude=tried)
        one.failed(f"q{number}", 1)
        tried.add(decision.replica)
    assert tried == {"r0", "r1", "r2"}
    with pytest.raises(NoReplica, match="3 already tried"):
        one.route(turn(None, "q3"), 1, exclude=tried)


def test_those_that_are_up_are_tried_before_those_that_are_down():
    one = router(replicas=3)
    one.unreachable("r0", 0)
    assert [view.name for view in one.fleet(0, {"r1"})] == ["r2"]
    assert [view.name for view in one.fleet(0, {"r1", "r2"})] == ["r0"]


def test_a_draining_replica_is_not_tried_for_want_of_others_that_are_up():
    one = router(replicas=2)
    one.drain_replica("r0", 0)
    one.unreachable("r1", 0)
    assert shown(one) == ["r1"]


@pytest.mark.parametrize("policy", RINGS)
def test_a_ring_moves_the_sessions_of_a_down_replica_and_no_others_and_then_moves_them_back(policy):
    one = router(policy, 5)
    before = owners(one)
    one.unreachable("r2", 0)
    while_down = owners(one)
    assert "r2" not in while_down.values()
    assert {before[key] for key in KEYS if before[key] != while_down[key]} == {"r2"}
    one.reachable("r2", 1)
    assert owners(one) == before


def test_sglang_forgets_what_an_unhealthy_replica_was_sent():
    """Its sheet: a tenant that is gone or unhealthy is purged, and the turn that found it so is not inserted."""
    one = router("sglang-cache-aware", 3)
    text = TextPrompt("a" * 400)
    first = one.route(TurnView(request_id="q0", prompt=text), 0)
    one.finished("q0", 1, 0)
    assert one.policy.stats()["tree_chars"][first.replica] == 400
    one.unreachable(first.replica, 1)
    second = one.route(TurnView(request_id="q1", prompt=text), 1)
    assert (second.rule, second.replica != first.replica) == ("gone", True)
    assert first.replica not in one.policy.stats()["tree_chars"]


def test_what_is_believed_of_a_replicas_cache_outlives_its_being_down():
    """Whether the cache is still there is for its events to say."""
    one = router("dynamo-approx", 2)
    prompt = TokenPrompt(list(range(160)))
    first = one.route(TurnView(request_id="q0", prompt=prompt), 0)
    one.finished("q0", 1, 0)
    one.unreachable(first.replica, 1)
    one.reachable(first.replica, 2)
    again = one.route(TurnView(request_id="q1", prompt=prompt), 3)
    assert (again.replica, again.believed_hit_tokens) == (first.replica, 160)


def test_who_is_added_or_was_removed_is_not_down():
    one = router(replicas=3)
    one.unreachable("r0", 0)
    one.remove_replica("r0", 1)
    assert not one.down
    assert one.unreachable("r0", 2) is False  # a request of its that ends late
    one.add_replica("r0", 3)
    assert shown(one) == ["r1", "r2", "r0"]
    one.drain_replica("r1", 4)
    one.unreachable("r1", 5)
    one.add_replica("r1", 6)
    assert not one.down


def test_a_new_replica_that_is_down_is_neither_shown_nor_counted_as_being_let_in():
    one = router(replicas=2, ramp=Ramp(100))
    one.add_replica("new", 0)
    one.unreachable("new", 0)
    for key in KEYS[:50]:
        fleet = one._routable(turn(key), 1, ())
        assert [view.name for view in fleet] == ["r0", "r1"]
        assert not fleet.ramping


def test_a_replica_that_comes_back_is_let_in_bit_by_bit_unless_only_a_connection_broke():
    one = router(replicas=3, ramp=Ramp(100))
    one.unreachable("r0", 5)
    one.reachable("r0", 5 + 1000)  # at the first look
    assert one.ramp.shares(2000) == {}
    one.unreachable("r0", 10_000)
    assert one.ramp.shares(10_000) == {}
    back_us = 10_000 + 1000 * HEALTH_INTERVAL_MS  # at the second
    one.reachable("r0", back_us)
    assert one.ramp.shares(back_us) == {"r0": 0.1}
    let_in = [key for key in KEYS if "r0" in one._routable(turn(key), back_us, ())]
    assert len(let_in) == pytest.approx(0.1 * len(KEYS), rel=0.3)
    assert one.ramp.share("r0", back_us + 100_000_000) == 1.0


def test_without_a_ramp_a_replica_that_comes_back_is_back_at_once():
    one = router(replicas=2)
    one.unreachable("r0", 0)
    one.reachable("r0", 60_000_000)
    assert all("r0" in one._routable(turn(key), 60_000_000, ()) for key in KEYS[:50])


class Patient(BasePolicy):
    """Waits until it has two to choose from."""

    may_hold = True

    def must_wait(self, turn, fleet):
        return len(fleet) < 2

    def place_in_queue(self, turn, fleet):
        return (0, 0)

    def choose(self, turn, fleet):
        return Decision(fleet.replicas[0].name, "", "")


def test_a_turn_that_waits_is_placed_when_a_replica_answers_again():
    one = Router(Patient(rng=random.Random(1)), ["r0", "r1"])
    one.unreachable("r0", 0)
    placed = []
    one.submit(turn("s"), 1, placed.append)
    assert (placed, one.waiting) == ([], 1)
    one.reachable("r0", 2)
    assert ([decision.replica for decision in placed], one.waiting) == (["r0"], 0)


def test_where_nobody_looks_nobody_is_taken_out():
    one = router(health_interval_ms=0)
    assert one.unreachable("r1", 0) is False
    assert shown(one) == ["r0", "r1", "r2", "r3"]
    with pytest.raises(OptionError, match="health_interval_ms=-1"):
        Down(-1)
