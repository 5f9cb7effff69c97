"""The router core: ledger, fleet and policy move together."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import (
    BasePolicy,
    Decision,
    EngineMetrics,
    EventGap,
    Failed,
    Finished,
    FirstToken,
    FleetError,
    KvEvents,
    LedgerError,
    Metrics,
    NoReplica,
    Progress,
    Removed,
    ReplicaAdded,
    ReplicaDraining,
    ReplicaRemoved,
    Router,
    TokenPrompt,
    TurnView,
    make_policy,
)


class Listener(BasePolicy):
    """Takes the first replica and writes down all it is told."""

    def __init__(self, answer=None):
        super().__init__(rng=random.Random(0))
        self.heard = []
        self.answer = answer
        self.fleets = []

    def choose(self, turn, fleet):
        self.fleets.append(fleet)
        return Decision(self.answer or fleet.replicas[0].name, "first", "first")

    def observe(self, event):
        self.heard.append(event)


def turn(name="q", **more):
    return TurnView(request_id=name, **more)


def test_a_request_is_told_from_its_placement_to_its_end():
    policy = Listener()
    router = Router(policy, ["r0", "r1"])
    policy.heard.clear()
    decision = router.route(turn("q", prompt=TokenPrompt([1] * 40)), 10)
    router.first_token("q", 20)
    router.first_token("q", 21)
    router.progress("q", 5, 25)
    router.finished("q", 7, 30)
    kinds = [type(event).__name__ for event in policy.heard]
    assert kinds == ["Dispatched", "FirstToken", "Progress", "Finished"]
    assert policy.heard[0].decision is decision
    assert policy.heard[1] == FirstToken("q", "r0", 20)
    assert policy.heard[2] == Progress("q", "r0", 5, 25)
    assert policy.heard[3] == Finished("q", "r0", 7, 30)


def test_a_failed_request_frees_its_replica_and_may_be_routed_again_elsewhere():
    policy = Listener()
    router = Router(policy, ["r0", "r1"])
    router.route(turn("q"), 0)
    router.failed("q", 1)
    assert policy.heard[-1] == Failed("q", "r0", 1)
    assert router.route(turn("q"), 2, exclude={"r0"}).replica == "r1"
    assert router.counts.failed == 1
    assert [view.in_flight for view in router.replicas()] == [0, 1]


def test_the_policy_sees_the_load_of_everything_routed_before():
    policy = Listener()
    router = Router(policy, ["r0", "r1"])
    for name in "abc":
        router.route(turn(name, prompt=TokenPrompt([1] * 10)), 0)
    router.finished("b", None, 5)
    router.route(turn("d"), 7)
    fleet = policy.fleets[-1]
    assert (fleet["r0"].in_flight, fleet["r0"].in_flight_tokens) == (2, 20)
    assert fleet["r1"].in_flight == 0
    assert fleet.now_us == 7


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15)), max_size=60))
def test_routed_equals_finished_plus_failed_plus_in_flight(actions):
    router = Router(make_policy("power-of-two", {}, random.Random(3)), ["r0", "r1", "r2"])
    live = []
    for number, (kind, which) in enumerate(actions):
        if kind < 2 or not live:
            router.route(turn(f"q{number}"), number)
            live.append(f"q{number}")
        elif kind == 2:
            router.finished(live.pop(which % len(live)), 1, number)
        else:
            router.failed(live.pop(which % len(live)), number)
        counts = router.counts
        assert counts.routed == counts.finished + counts.failed + router.in_flight
        assert sum(view.in_flight for view in router.replicas()) == router.in_flight == len(live)
    assert sum(router.placements.values()) == router.counts.routed


def test_an_id_in_flight_cannot_be_routed_again():
    router = Router(Listener(), ["r0"])
    router.route(turn("q"), 0)
    with pytest.raises(LedgerError, match="already in flight on r0"):
        router.route(turn("q"), 1)


@pytest.mark.parametrize("call", ["finished", "failed", "first_token", "progress"])
def test_an_unknown_request_is_an_error(call):
    router = Router(Listener(), ["r0"])
    arguments = {"finished": ("q", 1, 0), "failed": ("q", 0), "first_token": ("q", 0), "progress": ("q", 1, 0)}[call]
    with pytest.raises(LedgerError, match="never routed, or has ended"):
        getattr(router, call)(*arguments)


def test_a_draining_replica_takes_no_turn_and_ends_those_it_has():
    policy = Listener()
    router = Router(policy, ["r0", "r1"])
    router.route(turn("q"), 0)
    router.drain_replica("r0", 1)
    assert router.route(turn("p"), 2).replica == "r1"
    assert [view.name for view in policy.fleets[-1].draining] == ["r0"]
    router.finished("q", 1, 3)
    router.remove_replica("r0", 4)
    assert ReplicaDraining("r0", 1) in policy.heard
    assert ReplicaRemoved("r0", 4) in policy.heard


def test_a_drained_replica_may_be_added_again():
    router = Router(Listener(), {"r0": "http://a"})
    router.drain_replica("r0", 1)
    router.add_replica("r0", 2)
    assert router.route(turn("q"), 3).replica == "r0"
    assert router.replicas()[0].url == "http://a"


def test_a_request_may_outlive_its_replica():
    router = Router(Listener(), ["r0", "r1"])
    router.route(turn("q"), 0)
    router.remove_replica("r0", 1)
    router.finished("q", 1, 2)
    assert router.in_flight == 0


def test_nobody_to_route_to_says_why():
    router = Router(Listener(), ["r0", "r1"])
    router.drain_replica("r0", 0)
    with pytest.raises(NoReplica, match=r"none of 2 .* 1 draining \(r0\) and 1 already tried \(r1\)"):
        router.route(turn("q"), 1, exclude=["r1"])
    with pytest.raises(NoReplica, match="no replica is in the fleet"):
        Router(Listener()).route(turn("q"), 1)
    assert router.counts.no_replica == 1


def test_a_policy_that_names_a_stranger_is_an_error_and_books_nothing():
    router = Router(Listener(answer="r9"), ["r0"])
    with pytest.raises(FleetError, match="'r9', which is not routable"):
        router.route(turn("q"), 0)
    assert router.in_flight == 0


def test_replica_names_are_unique():
    router = Router(Listener(), ["r0"])
    with pytest.raises(FleetError, match="in the fleet already"):
        router.add_replica("r0", 1)
    with pytest.raises(FleetError, match="no replica named 'r5': the fleet is r0"):
        router.drain_replica("r5", 1)


def test_metrics_and_events_reach_the_policy_and_the_view():
    policy = Listener()
    router = Router(policy, ["r0"])
    gauges = EngineMetrics(running=3, waiting=1, kv_usage=0.5, at_us=9)
    router.metrics("r0", gauges, 10)
    router.kv_events("r0", [Removed((1,))], 11)
    router.event_gap("r0", 12)
    assert router.fleet(13)["r0"].metrics == gauges
    assert policy.heard[-3:] == [Metrics("r0", gauges, 10), KvEvents("r0", (Removed((1,)),), 11), EventGap("r0", 12)]


def test_late_news_of_a_replica_that_left_is_ignored():
    policy = Listener()
    router = Router(policy, ["r0"])
    router.remove_replica("r0", 1)
    policy.heard.clear()
    router.kv_events("r0", [Removed((1,))], 2)
    router.event_gap("r0", 2)
    router.metrics("r0", EngineMetrics(running=0, waiting=0, kv_usage=0.0), 2)
    assert policy.heard == []


def test_the_policy_is_told_of_the_fleet_it_starts_with():
    policy = Listener()
    Router(policy, ["r0", "r1"])
    assert policy.heard == [ReplicaAdded("r0", 0), ReplicaAdded("r1", 0)]
