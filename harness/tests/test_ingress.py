"""Several ingresses: which one a turn meets, what they know of each other, and how a scenario says so."""

import itertools

import numpy as np
import pytest

from harness.errors import UsageError
from harness.ingress import RouterSetup
from harness.load_plan import LoadPlan
from harness.scenario import check_scenario
from harness.sim import Simulation
from harness.spread import ingress_of
from harness.tests.arms import arm, small
from routers import POLL_INTERVALS_MS, Signal

FIRST = {"name": "first", "policy": "least-requests", "options": {"ties": "first"}}
BURST = {"kind": "uniform-unique", "requests": 8, "input_tokens": 160, "output_tokens": 40}
AT_ONCE = {"concurrency": 8, "ramp_s": 0.0}


def burst(**router):
    """How eight requests of one instant are placed on eight replicas."""
    scenario = small(routers=[FIRST], workload=BURST, fleet={"replicas": 8}, load=AT_ONCE, router=router)
    rows = Simulation(arm(scenario)).run().requests
    return [sum(r["replica"] == f"r{i}" for r in rows) for i in range(8)]


def test_two_ingresses_that_share_nothing_pick_the_same_replicas_in_a_burst():
    assert burst() == [1] * 8
    assert burst(ingresses=2) == [2, 2, 2, 2, 0, 0, 0, 0]
    assert burst(ingresses=4) == [4, 4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("ingresses", [2, 4, 8])
def test_ingresses_that_share_their_load_at_once_spread_a_burst_as_one_would(ingresses):
    assert burst(ingresses=ingresses, share_load=True) == burst()


def test_load_that_is_told_too_late_is_no_news_in_a_burst():
    assert burst(ingresses=2, share_load=True, share_delay_ms=5) == burst(ingresses=2)


def test_what_was_told_counts_when_it_is_old_enough():
    """Requests that come one after another: each ingress knows of the other's as soon as the delay has passed."""
    workload = {**BURST, "requests": 4, "output_tokens": 400}
    load = {"driver": "rate", "arrival": "constant", "rate_per_s": 20.0, "concurrency": None, "ramp_s": 0.0}

    def placed(delay_ms):
        router = {"ingresses": 2, "share_load": True, "share_delay_ms": delay_ms}
        scenario = small(routers=[FIRST], workload=workload, fleet={"replicas": 4}, load=load, router=router)
        rows = Simulation(arm(scenario)).run().requests
        return [r["replica"] for r in rows]

    assert placed(49) == ["r0", "r1", "r2", "r3"]  # arrivals lie 50 ms apart
    assert placed(51) != placed(49)


@pytest.mark.parametrize("ingresses", [2, 3, 4])
def test_a_sessions_next_turn_meets_another_ingress_unless_it_is_to_stay(ingresses):
    for session, turn in itertools.product(range(12), range(9)):
        here, there = (ingress_of("turn", session, t, ingresses) for t in (turn, turn + 1))
        assert here != there
        assert ingress_of("session", session, turn, ingresses) == ingress_of("session", session, 0, ingresses)


@pytest.mark.parametrize("spread", ["turn", "session"])
def test_requests_are_spread_evenly_and_every_row_names_its_ingress(spread):
    workload = {"kind": "multi-turn", "sessions": 12, "turns": 4, "output_tokens": 20}
    rows = Simulation(arm(small(workload=workload, router={"ingresses": 2, "spread": spread}))).run().requests
    met = [r["ingress"] for r in rows]
    assert met.count("i0") == met.count("i1") == 24
    by_session = {}
    for row in sorted(rows, key=lambda r: r["turn"]):
        by_session.setdefault(row["session"], []).append(row["ingress"])
    same = [a == b for turns in by_session.values() for a, b in itertools.pairwise(turns)]
    assert all(same) if spread == "session" else sum(same) / len(same) < 0.6


def test_the_load_generator_sends_a_turn_where_the_simulation_does():
    plan = LoadPlan(
        workload={}, seed=1, rows_dir="x", epoch_ns=0, concurrency=1, ingresses={"i0": "http://a", "i1": "http://b"}
    )
    for session, turn in itertools.product(range(5), range(5)):
        assert plan.ingress(session, turn) == f"i{ingress_of('turn', session, turn, 2)}"
    assert LoadPlan(workload={}, seed=1, rows_dir="x", epoch_ns=0, concurrency=1).ingress(3, 1) is None


@pytest.mark.parametrize("router", ["dynamo-kv", "reported-prefixes", "round-robin", "clairvoyant", "power-of-two"])
def test_every_turn_is_answered_through_several_ingresses_and_each_counts_its_own(router):
    scenario = small(routers=[router], router={"ingresses": 3})
    simulation = Simulation(arm(scenario))
    rows = simulation.run()
    assert {r["status"] for r in rows.requests} == {"ok"}
    routed = [one.counts.routed for one in simulation.routers]
    assert routed == [sum(r["ingress"] == f"i{place}" for r in rows.requests) for place in range(3)]
    assert [one.in_flight for one in simulation.routers] == [0, 0, 0]
    assert {s["ingress"] for s in rows.router} == {"i0", "i1", "i2"}


def test_every_ingress_hears_every_replica():
    """Blocks that one ingress had computed are found by the other, since engines publish to both."""
    workload = {"kind": "multi-turn", "sessions": 4, "turns": 2, "first_input_tokens": 320, "think_time_ms": 500}
    scenario = small(routers=["pure-kv-affinity"], workload=workload, router={"ingresses": 2})
    rows = Simulation(arm(scenario)).run().requests
    assert all(r["believed_hit_tokens"] >= 320 for r in rows if r["turn"] == 1)


def test_a_replica_that_joins_with_a_ramp_gets_fewer_turns_at_first():
    workload = {"kind": "uniform-unique", "requests": 200, "input_tokens": 64, "output_tokens": 20}
    load = {"driver": "rate", "arrival": "constant", "rate_per_s": 100.0, "concurrency": None, "ramp_s": 0.0}
    churn = [{"at_s": 0.2, "do": "add"}]

    def joined(ramp_s):
        scenario = small(routers=["round-robin"], workload=workload, load=load, churn=churn, router={"ramp_s": ramp_s})
        rows = Simulation(arm(scenario)).run().requests
        return sum(r["replica"] == "r3" for r in rows if r["sent_us"] < 1_000_000)

    assert joined(0.0) == 20  # every fourth turn
    assert 0 < joined(10.0) <= 12  # let in for 10 to 18 % of turns


def test_gauges_are_read_as_often_as_the_scenario_says():
    def polled(ms):
        simulation = Simulation(arm(small(routers=["session-ring-valve"], router={"metrics_interval_ms": ms})))
        times = []
        for router in simulation.routers:
            router.metrics = lambda name, metrics, now: times.append(now)
        simulation.run()
        return {b - a for a, b in itertools.pairwise(sorted(set(times)))}

    assert polled(50) == {50_000}
    assert polled(400) == {400_000}


# ---- what a scenario may say -----------------------------------------------------------------------------------------


def refused(**tables):
    with pytest.raises(UsageError) as caught:
        small(**tables)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_defaults_are_those_of_a_lone_router_process():
    setup = RouterSetup()
    assert (setup.ingresses, setup.share_load, setup.ramp_s) == (1, False, 0.0)
    assert setup.metrics_interval_ms == POLL_INTERVALS_MS[Signal.ENGINE_METRICS]
    from routers.service import ServiceConfig

    assert setup.prefix_interval_ms == ServiceConfig().prefix_interval_ms


def test_an_entry_overrides_the_table_for_itself_and_both_come_back_resolved():
    routers = ["round-robin", {"name": "two", "policy": "round-robin", "ingresses": 2, "share_load": True}]
    scenario = small(routers=routers, router={"ramp_s": 3.0})
    assert [(arm(scenario, i).setup.ingresses, arm(scenario, i).setup.ramp_s) for i in (0, 1)] == [(1, 3.0), (2, 3.0)]
    resolved = scenario.resolved()
    assert resolved["router"]["ramp_s"] == 3.0
    assert resolved["routers"][1]["ingresses"] == 2
    assert check_scenario(resolved, "again").resolved() == resolved


def test_an_unknown_key_is_named_with_its_nearest_neighbour():
    assert "'ingreses' in router: did you mean 'ingresses'?" in refused(router={"ingreses": 2})


def test_a_value_that_cannot_work_says_why():
    assert "ingresses = 0: give a whole number from 1" in refused(router={"ingresses": 0})
    assert "ramp_s = -1.0: give a time of at least 0" in refused(router={"ramp_s": -1.0})
    assert "metrics_interval_ms = 0: give at least 1" in refused(router={"metrics_interval_ms": 0})
    for value in (float("inf"), 1e308, float("nan")):
        assert f"share_delay_ms = {value}" in refused(router={"share_delay_ms": value})
        assert f"ramp_s = {value}: give a time of at least 0, at most 1e+09" in refused(router={"ramp_s": value})
    assert "prefix_interval_ms = 1000000000000000000" in refused(router={"prefix_interval_ms": 10**18})
    assert "'turns'" in refused(router={"spread": "turns"})


def test_load_that_nobody_is_told_is_refused():
    assert "nobody to share with: set router.ingresses = 2" in refused(router={"share_load": True})
    assert "delays nothing" in refused(router={"share_delay_ms": 20.0})
    entry = {"name": "x", "policy": "round-robin", "share_delay_ms": 20.0}
    assert "shares no load: set share_load = true" in refused(routers=[entry])


def test_what_only_routers_of_ours_know_is_refused_of_others():
    assert "only routers of ours know" in refused(routers=[{"name": "x", "command": ["x"], "share_load": True}])
    other = {"name": "x", "url": "http://127.0.0.1:1"}
    assert "already runs at one address" in refused(routers=[other], router={"ingresses": 2})
    assert small(routers=[{**other, "ingresses": 1}], router={"ingresses": 2})


def test_ingresses_have_chance_of_their_own():
    scenario = small(routers=["random"], router={"ingresses": 2})
    draws = [[one.policy.rng.random() for _ in range(4)] for one in Simulation(arm(scenario)).routers]
    assert draws[0] != draws[1]
    assert np.allclose(
        draws, [[one.policy.rng.random() for _ in range(4)] for one in Simulation(arm(scenario)).routers]
    )
