"""Replicas that come and go: who moves, how a new one is let in, and the admin routes that do it."""

import asyncio
import random

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from routers import OptionError, Ramp, Router, TurnView, make_policy, policy_names

S = 1_000_000
KEYS = [f"conversation-{i}" for i in range(10_000)]
RINGS = ["session-ring", "ray-consistent-hash", "vllm-consistent-hash"]


def turn(session, name=None):
    return TurnView(request_id=name or f"q-{session}", session_id=session)


def owners(one, keys=KEYS):
    """Where each session would go now; placing one session never moves another here."""
    fleet = one.fleet(0)
    return {key: one.policy.choose(turn(key), fleet).replica for key in keys}


def moved(before, after):
    return [key for key in before if before[key] != after[key]]


@pytest.mark.parametrize("policy", RINGS)
def test_a_fifth_replica_takes_about_a_fifth_of_ten_thousand_sessions_and_nobody_else_moves(policy):
    one = Router(make_policy(policy), [f"r{i}" for i in range(4)])
    before = owners(one)
    one.add_replica("r4", 0)
    after = owners(one)
    gone = moved(before, after)
    assert {after[key] for key in gone} == {"r4"}
    assert 0.15 < len(gone) / len(KEYS) < 0.25
    one.remove_replica("r4", 0)
    assert owners(one) == before


@pytest.mark.parametrize("policy", RINGS)
def test_a_drained_replicas_sessions_move_and_no_others(policy):
    one = Router(make_policy(policy), [f"r{i}" for i in range(5)])
    before = owners(one)
    one.drain_replica("r2", 0)
    after = owners(one)
    assert {before[key] for key in moved(before, after)} == {"r2"}
    assert "r2" not in after.values()


def test_modulo_moves_most_sessions_for_one_replica_more():
    one = Router(make_policy("session-modulo"), [f"r{i}" for i in range(4)])
    before = owners(one)
    one.add_replica("r4", 0)
    assert 0.75 < len(moved(before, owners(one))) / len(KEYS) < 0.85  # 80 % is expected


@pytest.mark.parametrize("policy", ["sticky-least-loaded", "verl-sticky-inflight"])
def test_policies_that_remember_move_only_what_lost_its_replica(policy):
    one = Router(make_policy(policy), ["r0", "r1", "r2"])
    placed = {}
    for key in KEYS[:300]:
        placed[key] = one.route(turn(key), 0).replica
        one.finished(f"q-{key}", 1, 0)
    one.add_replica("r3", 0)
    again = {key: one.policy.choose(turn(key), one.fleet(1)).replica for key in placed}
    assert again == placed
    one.remove_replica("r1", 1)
    again = {key: one.policy.choose(turn(key), one.fleet(1)).replica for key in placed}
    assert {placed[key] for key in moved(placed, again)} <= {"r1"}


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "clairvoyant"])
def test_no_request_is_lost_while_replicas_come_and_go(policy):
    """Field case BL-38: adds, drains, removals and failures in the middle of it; every request ends and every count is
    back."""
    rng = random.Random(5)
    one = Router(make_policy(policy, {}, random.Random(1)), [f"r{i}" for i in range(4)], ramp=Ramp(0.001))
    names, open_requests, joined = [f"r{i}" for i in range(4)], [], 4
    for step in range(300):
        if step % 10 == 5:
            name = names.pop(rng.randrange(len(names)))
            if rng.random() < 0.5:
                one.drain_replica(name, step)
            one.remove_replica(name, step)
            names.append(f"r{joined}")
            one.add_replica(f"r{joined}", step)
            joined += 1
        elif step % 10 == 7:
            one.unreachable(rng.choice(names), step)
        elif step % 10 == 2:
            for name in one.down.since_us():
                one.reachable(name, step)
        placed = one.route(turn(f"s{step % 20}", f"q{step}"), step).replica
        assert placed in names
        assert placed not in one.down
        open_requests.append(f"q{step}")
        if len(open_requests) > 8:
            request = open_requests.pop(rng.randrange(len(open_requests)))
            one.finished(request, 1, step) if step % 7 else one.failed(request, step)
    for request in open_requests:
        one.finished(request, 1, 300)
    assert one.in_flight == 0
    assert all(view.in_flight == 0 for view in one.replicas())
    assert one.counts.routed == one.counts.finished + one.counts.failed == 300


# -- ramped traffic ----------------------------------------------------------------------------------------------


def test_the_share_grows_in_a_straight_line_from_a_tenth_to_all():
    ramp = Ramp(300)
    ramp.join("new", 100 * S)
    seen = [ramp.share("new", (100 + at) * S) for at in (0, 75, 150, 299, 300, 900)]
    assert seen == pytest.approx([0.1, 0.325, 0.55, 0.1 + 0.9 * 299 / 300, 1.0, 1.0])
    assert ramp.shares(900 * S) == {}
    assert ramp.share("old", 0) == 1.0


def test_a_session_that_was_let_in_stays_let_in():
    ramp = Ramp(100)
    ramp.join("new", 0)
    inside = set()
    for at in range(0, 101, 10):
        now_in = {key for key in KEYS[:2000] if not ramp.held_back(key, at * S)}
        assert inside <= now_in
        expected = min(1.0, 0.1 + 0.9 * at / 100)
        assert len(now_in) / 2000 == pytest.approx(expected, abs=0.04)
        inside = now_in


@pytest.mark.parametrize(("at_s", "share"), [(0, 0.1), (50, 0.55), (100, 1.0)])
def test_a_new_replica_gets_its_part_of_the_traffic_and_then_all_of_it(at_s, share):
    one = Router(make_policy("random", {}, random.Random(2)), ["r0", "r1", "r2"], ramp=Ramp(100))
    one.add_replica("new", 0)
    for number in range(4000):
        one.route(TurnView(request_id=f"q{number}"), at_s * S)
    assert one.placements["new"] / 4000 == pytest.approx(share / 4, abs=0.02)


def test_replicas_that_are_there_at_the_start_need_no_ramp_and_a_fleet_of_new_ones_serves_all():
    one = Router(make_policy("round-robin"), ["r0"], ramp=Ramp(100))
    one.add_replica("new", 0)
    assert one.ramp.shares(0) == {"new": 0.1}
    one.remove_replica("r0", 1)
    assert {one.route(TurnView(request_id=f"q{i}"), 2).replica for i in range(20)} == {"new"}
    one.remove_replica("new", 3)
    assert one.ramp.shares(3) == {}


@pytest.mark.parametrize("policy", RINGS)
def test_a_ring_hands_over_its_sessions_bit_by_bit_and_to_the_new_one_only(policy):
    one = Router(make_policy(policy), ["r0", "r1", "r2"], ramp=Ramp(100))

    def place(at_us):
        found = {}
        for key in KEYS[:1000]:
            found[key] = one.route(turn(key), at_us).replica
            one.finished(f"q-{key}", 1, at_us)
        return found

    before = place(0)
    one.add_replica("new", 0)
    early, late, full = place(0), place(50 * S), place(100 * S)
    for one_time in (early, late, full):
        assert {one_time[key] for key in moved(before, one_time)} == {"new"}
    assert set(moved(before, early)) < set(moved(before, late)) < set(moved(before, full))


def test_sglang_keeps_what_it_knows_of_a_replica_that_is_only_held_back():
    one = Router(make_policy("sglang-cache-aware"), ["r0"], ramp=Ramp(100))
    one.add_replica("new", 0)
    held = next(key for key in KEYS if one.ramp.held_back(key, 0))
    assert one.route(turn(held), 0).replica == "r0"
    assert "new" in one.policy.stats()["tree_chars"]


@pytest.mark.parametrize(("seconds", "share"), [(-1, 0.1), (float("nan"), 0.1), (1, 1.5), (1, -0.1)])
def test_a_ramp_that_cannot_be_is_refused(seconds, share):
    with pytest.raises(OptionError):
        Ramp(seconds, share)


# -- admin routes ------------------------------------------------------------------------------------------------


async def call(session, service, method, path, body=None):
    async with session.request(method, service.url + path, json=body) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def test_a_replica_joins_drains_and_leaves_over_http(fleet, router_for):
    r0, r1 = await fleet(2)
    service = await router_for([r0], policy="round-robin")
    async with aiohttp.ClientSession() as session:
        status, found = await call(session, service, "POST", "/router/replicas", {"name": "new one", "url": r1.url})
        assert (status, [row["name"] for row in found]) == (201, ["r0", "new one"])
        for _ in range(4):
            assert (await call(session, service, "POST", "/v1/completions", {}))[0] == 200
        assert (len(r0.seen), len(r1.seen)) == (2, 2)
        status, found = await call(session, service, "POST", "/router/replicas/new%20one/drain")
        assert (status, found[1]["draining"]) == (200, True)
        await call(session, service, "POST", "/v1/completions", {})
        assert len(r0.seen) == 3
        status, _ = await call(session, service, "POST", "/router/replicas", {"name": "new one", "url": r1.url})
        assert status == 201  # it takes turns again
        status, found = await call(session, service, "DELETE", "/router/replicas/new%20one")
        assert (status, [row["name"] for row in found]) == (200, ["r0"])
        assert [row["name"] for row in (await call(session, service, "GET", "/router/replicas"))[1]] == ["r0"]


async def test_a_request_in_flight_ends_on_the_replica_that_was_removed_under_it(fleet, router_for, eventually):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin")
    gate = asyncio.Event()

    async def slow(request, body):
        await gate.wait()
        return aiohttp.web.json_response({"served_by": "r0"})

    r0.answer = slow
    async with aiohttp.ClientSession() as session:
        first = asyncio.ensure_future(call(session, service, "POST", "/v1/completions", {}))
        await eventually(lambda: r0.seen)
        assert (await call(session, service, "DELETE", "/router/replicas/r0"))[0] == 200
        gate.set()
        assert await first == (200, {"served_by": "r0"})
    assert service.router.in_flight == 0
    assert service.router.counts.finished == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/router/replicas", {"name": "r0", "url": "http://h:1"}, 409, "in the fleet already"),
        ("POST", "/router/replicas", {"name": "x"}, 400, "missing required field `url`"),
        ("POST", "/router/replicas", {"name": "x", "url": "h:1"}, 400, "url=http://HOST:PORT"),
        ("POST", "/router/replicas", {"name": "x", "url": "http://h:1", "events": "h:2"}, 400, "ZeroMQ address"),
        ("POST", "/router/replicas", {"name": "x", "url": "http://h:1", "evnets": ""}, 400, "unknown field"),
        ("POST", "/router/replicas", {"name": "x", "url": "http://h:1", "events": "no://h"}, 400, "cannot subscribe"),
        ("POST", "/router/replicas", {"name": "x", "url": "http://h:1", "replay": "tcp://h:2"}, 400, "give events"),
        ("DELETE", "/router/replicas/x", None, 404, "no replica named 'x'"),
        ("POST", "/router/replicas/x/drain", None, 404, "no replica named 'x'"),
        ("PUT", "/router/replicas", None, 405, "GET and POST only"),
        ("GET", "/router/replicas/r0", None, 405, "DELETE only"),
        ("GET", "/router/replicas/r0/drain", None, 405, "POST only"),
        ("GET", "/router/nothing", None, 404, "there are /router/health"),
    ],
)
async def test_an_admin_request_that_cannot_be_says_what_to_change(router_for, method, path, body, status, message):
    service = await router_for(["http://127.0.0.1:9"], policy="pure-kv-affinity")
    async with aiohttp.ClientSession() as session:
        found, answer = await call(session, service, method, path, body)
    assert found == status
    assert message in answer["error"]["message"]
    assert [view.name for view in service.router.replicas()] == ["r0"]


async def test_events_are_heard_of_who_joins_and_no_more_of_who_leaves(router_for, eventually):
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(16)),
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    service = await router_for(["http://127.0.0.1:9"], policy="pure-kv-affinity")
    body = {"name": "r1", "url": "http://127.0.0.1:9", "events": endpoint}
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(2):  # the second time its events start anew
                assert (await call(session, service, "POST", "/router/replicas", body))[0] == 201
                blocks = service.router.policy._index.resident_blocks
                while not blocks("r1"):
                    await socket.send_multipart([b"kv", bytes(8), msgspec.msgpack.encode([1.0, [event], 0])])
                    await asyncio.sleep(0.01)
                subscriber = service.subscribers["r1"]
                assert (await call(session, service, "DELETE", "/router/replicas/r1"))[0] == 200
                assert blocks("r1") == 0
                assert "r1" not in service.subscribers
                await eventually(lambda: not service._listening)
                assert subscriber.stream.stats.batches >= 1
    finally:
        socket.close(0)
        context.destroy(0)
