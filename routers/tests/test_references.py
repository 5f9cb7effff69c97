"""The ceiling, which only a simulation can ask, and the bad example, which fails as reported."""

import random

import pytest

from routers import OptionError, Router, TurnView, make_policy
from routers.service import Service, ServiceConfig

S = 1_000_000


class Truth:
    """An oracle of fixed prices: 10 us a prompt token, 1,000 us a step and 100 more for each request in it."""

    def __init__(self, lengths, cached=None, capacity=10**9):
        self.lengths = lengths  # request -> (prompt, output)
        self.cached = cached or {}
        self.capacity = capacity

    def prompt_tokens(self, request_id):
        return self.lengths[request_id][0]

    def output_tokens(self, request_id):
        return self.lengths[request_id][1]

    def cached_tokens(self, request_id, replica):
        return self.cached.get((request_id, replica), 0)

    def cache_tokens(self, replica):
        return self.capacity

    def prefill_us(self, replica, tokens):
        return 10.0 * tokens

    def decode_us(self, replica, requests, context_tokens):
        return 1000.0 + 100.0 * requests


def seer(truth, count=2, **options):
    policy = make_policy("clairvoyant", options, random.Random(1))
    policy.consult(truth)
    return Router(policy, [f"r{i}" for i in range(count)])


def turn(name, session=None):
    return TurnView(request_id=name, session_id=session)


def test_the_cost_is_the_time_of_the_request_and_what_it_takes_from_others():
    one = seer(Truth({"a": (1000, 50), "b": (200, 10)}, {("b", "r0"): 160}))
    assert one.route(turn("a"), 0).scores == {"r0": 10_000 + 50 * 1100, "r1": 10_000 + 50 * 1100}
    placed = next(name for name, number in one.placements.items() if number)
    decision = one.route(turn("b"), 0)
    idle = 10 * (200 - (160 if placed == "r1" else 0)) + 10 * 1100
    new = 10 * (200 - (160 if placed == "r0" else 0))
    busy = 10_000 + new + 10 * 1200 + (new + 10 * 100)  # waits for the other, and the other for it
    assert decision.scores == {placed: busy, ({"r0", "r1"} - {placed}).pop(): idle}


def test_a_cache_is_worth_its_prefill_and_no_more():
    lengths = {"a": (100, 10), "b": (1000, 10), "c": (1000, 10)}
    one = seer(Truth(lengths, {("b", "r0"): 1000, ("c", "r0"): 10}))
    one.route(turn("a"), 0, exclude=["r1"])
    assert one.route(turn("b"), 0).replica == "r0"
    two = seer(Truth(lengths, {("b", "r0"): 1000, ("c", "r0"): 10}))
    two.route(turn("a"), 0, exclude=["r1"])
    assert two.route(turn("c"), 0).replica == "r1"


def test_true_lengths_count_where_a_router_sees_one_request_each():
    one = seer(Truth({"long": (10, 1000), "short": (10, 5), "new": (10, 500)}))
    one.route(turn("long"), 0, exclude=["r1"])
    one.first_token("long", 1000)
    one.route(turn("short"), 0, exclude=["r0"])
    one.first_token("short", 1000)
    assert one.route(turn("new"), 2000).replica == "r1"


def test_output_already_given_is_owed_no_more():
    one = seer(Truth({"long": (10, 100), "short": (10, 50), "new": (10, 500)}))
    one.route(turn("long"), 0, exclude=["r1"])
    one.first_token("long", 0)
    one.route(turn("short"), 99 * 1100, exclude=["r0"])
    one.first_token("short", 99 * 1100)
    assert one.route(turn("new"), 99 * 1100).replica == "r0"


def test_context_beyond_the_cache_costs_its_prefill_again():
    lengths = {"big": (900, 100), "new": (50, 100)}
    one = seer(Truth(lengths, {("new", "r0"): 50}, capacity=1000))
    one.route(turn("big"), 0, exclude=["r1"])
    one.first_token("big", 0)
    assert one.route(turn("new"), 100 * S).replica == "r1"  # by then nobody would decode beside it


def test_without_an_oracle_it_says_where_it_can_run():
    one = Router(make_policy("clairvoyant"), ["r0"])
    with pytest.raises(OptionError, match="--mode sim"):
        one.route(turn("a"), 0)
    with pytest.raises(OptionError, match="only a simulation can tell: run it with --mode sim"):
        Service(ServiceConfig(policy="clairvoyant"))


def bl31(policy):
    """r0 runs eight very long answers; forty sessions of one short turn come, one a second, and end in half a one."""
    one = Router(make_policy(policy, {}, random.Random(3)), ["r0", "r1"])
    for number in range(8):
        one.route(turn(f"long{number}", f"l{number}"), 0, exclude=["r1"])
    placed = []
    for number in range(40):
        placed.append(one.route(turn(f"q{number}", f"s{number}"), number * S).replica)
        if placed[-1] == "r1":  # r0 is too slow to end anything
            one.finished(f"q{number}", 5, number * S + S // 2)
    return placed.count("r0") / len(placed)


def test_lowest_completed_qps_sends_new_sessions_to_the_stuck_replica():
    assert bl31("lowest-completed-qps") > 0.8
    assert bl31("least-requests") == 0.0


def test_a_session_stays_with_its_mistake_unless_told_otherwise():
    one = Router(make_policy("lowest-completed-qps"), ["r0", "r1"])
    assert one.route(turn("a", "s"), 0).replica == "r0"
    one.finished("a", 5, 1)
    assert one.route(turn("b", "s"), 2).rule == "sticky"
    two = Router(make_policy("lowest-completed-qps", {"sticky": False}), ["r0", "r1"])
    two.route(turn("a", "s"), 0)
    two.finished("a", 5, 1)
    assert two.route(turn("b", "s"), 2).replica == "r1"


def test_completions_older_than_the_window_are_forgotten():
    one = Router(make_policy("lowest-completed-qps", {"window_s": 10}), ["r0", "r1"])
    one.route(turn("a"), 0)
    one.finished("a", 5, 0)
    assert one.route(turn("b"), 10 * S).replica == "r1"
    assert one.route(turn("c"), 10 * S + 1).replica == "r0"
