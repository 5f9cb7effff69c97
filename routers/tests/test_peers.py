"""Several ingresses: what they know of each other, when, and what it is worth."""

import asyncio

import aiohttp
import msgspec
import pytest

from routers import HashedPrompt, OptionError, PeerLoad, PeerLoads, Router, TurnView, WireError, make_policy
from routers.peer_link import read_message

MS = 1000
TEN = tuple(range(100, 110))


def turn(name, contents=None):
    prompt = HashedPrompt(16 * len(contents), contents, 16) if contents else None
    return TurnView(request_id=name, prompt=prompt)


def ingresses(policy="least-requests", count=2, delay_us=0, share=True, replicas=4, **options):
    return [
        Router(
            make_policy(policy, {"ties": "first", **options} if policy == "least-requests" else options),
            [f"r{i}" for i in range(replicas)],
            peers=PeerLoads(delay_us) if share else None,
        )
        for _ in range(count)
    ]


def tell(routers, now_us, sequence):
    """Everybody tells everybody else."""
    for sender in routers:
        for receiver in routers:
            if receiver is not sender and receiver.peers is not None:
                name = str(routers.index(sender))
                receiver.peers.hear(name, sender.own_loads(), now_us, sequence=sequence)


def burst(routers, requests, told=True):
    """One request at a time, at each ingress in turn, all at one instant."""
    for number in range(requests):
        routers[number % len(routers)].route(turn(f"q{number}"), 0)
        if told:
            tell(routers, 0, number)
    total = {}
    for one in routers:
        for name, placed in one.placements.items():
            total[name] = total.get(name, 0) + placed
    return [total.get(f"r{i}", 0) for i in range(4)]


def test_two_ingresses_that_share_nothing_pick_the_same_replica_in_a_burst():
    assert burst(ingresses(share=False), 2) == [2, 0, 0, 0]
    assert burst(ingresses(share=False), 8) == [2, 2, 2, 2]


def test_two_ingresses_that_exchange_load_at_once_act_as_one():
    assert burst(ingresses(), 2) == [1, 1, 0, 0]
    assert burst(ingresses(), 10) == [3, 3, 2, 2]


def test_with_a_delay_the_burst_is_over_before_the_news():
    assert burst(ingresses(delay_us=5 * MS), 2) == [2, 0, 0, 0]


def test_news_counts_from_its_delay_on():
    peers = PeerLoads(50 * MS)
    peers.hear("b", {"r0": PeerLoad(3)}, 1000, sequence=1)
    assert [dict(peers.loads(at)) for at in (1000, 50_999)] == [{}, {}]
    assert peers.loads(51_000) == {"r0": PeerLoad(3)}


def test_the_newest_message_that_is_old_enough_counts():
    peers = PeerLoads(10)
    for at, requests in ((0, 1), (4, 2), (8, 3)):
        peers.hear("b", {"r0": PeerLoad(requests)}, at, sequence=at)
    assert [peers.loads(at).get("r0", PeerLoad()).requests for at in (9, 10, 13, 14, 18, 99)] == [0, 1, 1, 2, 3, 3]


def test_peers_add_up_and_one_that_rests_says_nothing_of_its_replicas():
    peers = PeerLoads()
    peers.hear("b", {"r0": PeerLoad(1, 10, 5, 2)}, 0, sequence=1)
    peers.hear("c", {"r0": PeerLoad(2, 20, 0, 4), "r1": PeerLoad(1)}, 0, sequence=1)
    assert peers.loads(0) == {"r0": PeerLoad(3, 30, 5, 6), "r1": PeerLoad(1)}
    peers.hear("c", {}, 1, sequence=2)
    assert peers.loads(1) == {"r0": PeerLoad(1, 10, 5, 2)}


def test_a_message_that_was_overtaken_is_dropped_and_a_restart_begins_anew():
    peers = PeerLoads()
    peers.hear("b", {"r0": PeerLoad(2)}, 0, sequence=2)
    peers.hear("b", {"r0": PeerLoad(1)}, 1, sequence=1)
    assert (peers.loads(1)["r0"].requests, peers.stats.out_of_order) == (2, 1)
    peers.hear("b", {}, 2, sequence=1, incarnation="second start")
    assert peers.loads(2) == {}


def test_a_peer_that_fell_silent_weighs_no_more():
    peers = PeerLoads(silence_us=1000)
    peers.hear("b", {"r0": PeerLoad(2)}, 0, sequence=1)
    assert peers.loads(1000) != {}
    assert peers.loads(1001) == {}
    assert (peers.peers(), peers.stats.silenced) == ((), 1)


def test_a_negative_delay_is_refused():
    with pytest.raises(OptionError, match="delay_us"):
        PeerLoads(-1)


def test_what_a_peer_has_in_flight_is_not_this_routers_own():
    one, other = ingresses()
    other.route(turn("a", TEN), 0)
    tell([one, other], 0, 1)
    assert one.fleet(0)["r0"].in_flight == 1
    assert one.fleet(0)["r0"].in_flight_tokens == 160
    assert all(view.in_flight == 0 for view in one.replicas())
    assert one.own_loads() == {}
    other.finished("a", 1, 0)
    tell([one, other], 0, 2)
    assert one.fleet(0)["r0"].in_flight == 0


def test_dynamo_shares_the_prefill_and_the_blocks_that_it_books():
    one, other = ingresses("dynamo-kv", replicas=2)
    placed = other.route(turn("a", TEN), 0).replica
    assert other.own_loads() == {placed: PeerLoad(1, 160, 160, 10)}
    tell([one, other], 0, 1)
    decision = one.route(turn("b", TEN), 0)
    rest = ({"r0", "r1"} - {placed}).pop()
    assert decision.scores == {rest: 20.0, placed: 40.0}
    other.first_token("a", 1)
    assert other.own_loads() == {placed: PeerLoad(1, 160, 0, 10)}


def test_vllm_shares_the_prefill_it_owes():
    one, other = ingresses("vllm-kv-aware", replicas=2)
    placed = other.route(turn("a", TEN), 0).replica
    tell([one, other], 0, 1)
    scores = one.route(turn("b", TEN), 0).scores
    assert scores == {placed: (160 + 160) * 2, ({"r0", "r1"} - {placed}).pop(): 160}


def test_the_load_version_grows_with_every_change_that_peers_should_hear_of():
    (one,) = ingresses(count=1)
    seen = [one.load_version]
    one.route(turn("a"), 0)
    seen.append(one.load_version)
    one.first_token("a", 0)
    seen.append(one.load_version)
    one.finished("a", 1, 0)
    seen.append(one.load_version)
    assert seen == sorted(set(seen))


def test_count_thresholds_are_as_many_times_looser_as_there_are_ingresses():
    """Field case BL-41: each of N ingresses sees an N-th of the imbalance."""

    def until_imbalanced(count, share):
        routers = ingresses("sglang-cache-aware", count, share=share, replicas=2, balance_abs_threshold=8)
        for number in range(1000):
            one = routers[number % count]
            if one.policy.choose(turn("probe"), one.fleet(0)).rule == "imbalanced":
                return number
            one.route(turn(f"q{number}"), 0, exclude=["r1"])
            tell(routers, 0, number)
        raise AssertionError("never out of balance")

    assert [until_imbalanced(count, False) for count in (1, 2, 4)] == [9, 18, 36]
    assert [until_imbalanced(count, True) for count in (1, 2, 4)] == [9, 9, 9]


# -- over HTTP ---------------------------------------------------------------------------------------------------


async def test_two_router_processes_tell_each_other_what_they_carry(fleet, router_for, eventually):
    (replica,) = await fleet(1)
    gate = asyncio.Event()

    async def slow(request, body):
        await gate.wait()
        return aiohttp.web.json_response({})

    replica.answer = slow
    probe = await router_for([replica])
    port = probe.port
    await probe.close()
    first = await router_for([replica], policy="least-requests", peers=(f"http://127.0.0.1:{port}",))
    second = await router_for([replica], policy="least-requests", listen_on=port, peers=(first.url,), peer_delay_ms=1)

    def heard(service):
        return service.router.fleet(service.now_us())["r0"].in_flight

    async with aiohttp.ClientSession() as session:
        posts = [asyncio.ensure_future(session.post(f"{first.url}/v1/completions", json={})) for _ in range(3)]
        await eventually(lambda: heard(second) == 3)
        assert first.state()["replicas"][0]["in_flight"] == 3
        assert second.state()["replicas"][0]["in_flight"] == 0  # its own
        gate.set()
        for post in posts:
            (await post).release()
        await eventually(lambda: heard(second) == 0)
        assert second.state()["peers"]["heard"] == [f"127.0.0.1:{first.port}"]
        async with session.post(f"{second.url}/router/peers", data=b"{}") as answer:
            assert answer.status == 400
    await first.close()


async def test_a_router_without_peers_hears_nobody(router_for):
    service = await router_for(["http://127.0.0.1:9"])
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/router/peers", data=b"{}") as answer:
        assert answer.status == 409
    assert service.state()["peers"] is None


def test_a_message_is_read_whole_or_not_at_all():
    body = msgspec.json.encode({"router": "a", "incarnation": "x", "sequence": 3, "loads": {"r0": [1, 2, 3, 4]}})
    message, loads = read_message(body)
    assert (message.router, message.sequence, loads) == ("a", 3, {"r0": PeerLoad(1, 2, 3, 4)})
    with pytest.raises(WireError, match="no message of a peer"):
        read_message(b'{"router": "a", "loads": {"r0": [1]}}')
