"""Session policies of the catalogue: who stays, who moves, and the traps that are kept."""

import random
from collections import Counter

import pytest

from routers import EngineMetrics, FleetView, ReplicaView, Router, TextPrompt, TokenPrompt, TurnView, make_policy
from routers.policies.rings import vllm_key

KEYS = [f"session-{i}" for i in range(3000)]


def turn(name="q", session=None, **more):
    return TurnView(request_id=name, session_id=session, **more)


def router(policy, count=4, **options):
    return Router(make_policy(policy, options, random.Random(1)), [f"r{i}" for i in range(count)])


def owners(one):
    placed = {}
    for number, key in enumerate(KEYS):
        placed[key] = one.route(turn(f"q{number}", key), number).replica
        one.finished(f"q{number}", 1, number)
    return placed


def moved(before, after):
    return sum(before[key] != after[key] for key in KEYS) / len(KEYS)


RINGS = ["session-ring", "session-ring-valve", "ray-consistent-hash", "vllm-consistent-hash"]


@pytest.mark.parametrize("policy", RINGS)
def test_a_ring_moves_about_a_fifth_when_a_fifth_replica_comes(policy):
    one = router(policy)
    before = owners(one)
    one.add_replica("r4", 0)
    after = owners(one)
    assert 0.12 < moved(before, after) < 0.29
    assert {after[key] for key in KEYS if before[key] != after[key]} == {"r4"}
    one.remove_replica("r4", 1)
    assert owners(one) == before


def test_modulo_moves_most_when_a_fifth_replica_comes():
    one = router("session-modulo")
    before = owners(one)
    one.add_replica("r4", 0)
    assert moved(before, owners(one)) > 0.75


@pytest.mark.parametrize("policy", ["sticky-least-loaded", "verl-sticky-inflight"])
def test_a_remembered_session_moves_only_when_its_replica_leaves(policy):
    one = router(policy)
    before = owners(one)
    one.add_replica("r4", 0)
    assert moved(before, owners(one)) == 0
    one.remove_replica("r2", 1)
    after = owners(one)
    assert all(after[key] == before[key] for key in KEYS if before[key] != "r2")


def test_the_valve_opens_at_its_limit_and_not_below():
    one = router("session-ring-valve", 3)
    owner = one.route(turn("a", "s"), 0).replica
    one.metrics(owner, EngineMetrics(running=1, waiting=0, kv_usage=0.849), 1)
    assert one.route(turn("b", "s"), 1).replica == owner
    one.metrics(owner, EngineMetrics(running=1, waiting=0, kv_usage=0.85), 2)
    decision = one.route(turn("c", "s"), 2)
    assert decision.replica != owner
    assert decision.rule == "spill"
    assert "85% of its KV blocks" in decision.reason


def test_rays_fallbacks_are_two_and_then_load_decides():
    one = router("ray-consistent-hash", 5)
    walk = []
    for number in range(5):
        decision = one.route(turn(f"q{number}", "s"), 0, exclude=walk)
        walk.append(decision.replica)
        assert decision.rule == ("ring" if number == 0 else "ring-next" if number < 3 else "no-owner")
    assert len(set(walk)) == 5


def test_without_a_session_rays_ring_spreads_by_request_id():
    one = router("ray-consistent-hash")
    placed = Counter(one.route(turn(f"id-{i}"), 0).replica for i in range(800))
    assert min(placed.values()) > 100


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"headers": {"x-user-id": "u", "x-request-id": "q"}}, "header:x-user-id:u"),
        ({"headers": {"x-session-id": "", "x-trace-id": "t"}}, "header:x-trace-id:t"),
        ({"session": "s"}, "header:x-session-id:s"),
        ({"headers": {"host": "h"}, "prompt": TextPrompt("hi"), "path": "/v1/completions"}, "request:hi"),
        ({"headers": {"host": "h"}, "prompt": TextPrompt("hi"), "path": "/v1/chat/completions"}, "request:"),
        ({}, "request:"),
    ],
)
def test_the_key_of_vllm_router_is_its_first_header_else_a_completions_text(given, key):
    assert vllm_key(turn(**given)) == key


def test_a_long_text_is_reduced_to_sixteen_hex_digits():
    assert vllm_key(turn(prompt=TextPrompt("x" * 100))) == "request:" + "x" * 100
    assert len(vllm_key(turn(prompt=TextPrompt("x" * 101)))) == len("request_hash:") + 16


def test_chat_without_headers_all_goes_to_one_replica_as_observed():
    one = router("vllm-consistent-hash")
    for number in range(40):
        one.route(turn(f"q{number}", headers={"host": "h"}, path="/v1/chat/completions"), 0)
    assert len(one.placements) == 1


def test_sticky_least_loaded_counts_open_sessions_not_requests():
    one = router("sticky-least-loaded", 2)
    first = one.route(turn("a", "s1"), 0).replica
    for number in range(5):
        assert one.route(turn(f"b{number}", "s1"), 0).replica == first
    other = one.route(turn("c", "s2"), 0).replica
    assert other != first
    one.finished("c", 1, 1)
    for name in ("s3", "s4"):
        one.route(turn(name, name), 2)
    assert one.policy.stats() == {"open_sessions": {first: 2, other: 2}}


def test_a_session_idle_for_two_hours_counts_no_more():
    one = router("sticky-least-loaded", 2)
    one.route(turn("a", "s1"), 0)
    one.route(turn("b", "s2"), 7_000_000_000)
    assert one.route(turn("c", "s1"), 7_300_000_000).rule == "new-session"
    assert sum(one.policy.stats()["open_sessions"].values()) == 2


def test_turns_without_a_session_pin_one_replica_while_session_counts_are_equal():
    one = router("sticky-least-loaded", 3)
    for number in range(20):
        assert one.route(turn(f"q{number}"), 0).rule == "no-session"
    assert len(one.placements) == 1


def test_verl_gives_a_tie_to_the_first_registered_and_forgets_the_least_recently_used():
    one = router("verl-sticky-inflight", 3, capacity=2)
    assert [one.route(turn(name, name), 0).replica for name in ("s0", "s1", "s2")] == ["r0", "r1", "r2"]
    for name in ("s0", "s1", "s2"):
        one.finished(name, 1, 1)
    assert one.route(turn("again", "s2"), 2).rule == "sticky"
    assert one.route(turn("lost", "s0"), 2).rule == "new-session"


def test_least_tokens_weighs_prompts_where_least_requests_counts_them():
    one = router("least-tokens", 2)
    long = one.route(turn("long", prompt=TokenPrompt([1] * 1000)), 0).replica
    placed = [one.route(turn(f"s{i}", prompt=TokenPrompt([1] * 10)), 0).replica for i in range(5)]
    assert long not in placed
    view = FleetView([ReplicaView(name="a", in_flight=2), ReplicaView(name="b", in_flight=1)])
    assert make_policy("least-tokens").choose(turn(), view).replica == "b"


def test_a_session_that_is_said_to_have_ended_counts_as_open_no_more():
    one = router("sticky-least-loaded", 2)
    home = one.route(turn("a", "s"), 0).replica
    assert one.policy.stats() == {"open_sessions": {home: 1}}
    one.session_ended("s", 1)
    one.session_ended("unknown", 1)
    assert one.policy.stats() == {"open_sessions": {}}


async def test_the_routers_own_route_ends_a_session(router_for):
    import aiohttp

    service = await router_for(["http://127.0.0.1:9"], policy="sticky-least-loaded")
    service.router.route(turn("a", "s 1"), 0)
    async with aiohttp.ClientSession() as session:
        for method, query, status in (
            ("post", "", 400),
            ("get", "?session_id=s", 405),
            ("post", "?session_id=s%201", 200),
        ):
            async with getattr(session, method)(f"{service.url}/finish_session{query}") as answer:
                assert answer.status == status
    assert service.router.policy.stats() == {"open_sessions": {}}
