"""Replicas that die and come back under a running router, over real sockets."""

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web

from routers.proxy import ProxyConfig

SOON = {"health_interval_ms": 20}  # the real spacing would only make the tests wait


async def complete(session, service, times=1):
    """Statuses of so many requests, one after the other."""
    found = []
    for _ in range(times):
        async with session.post(f"{service.url}/v1/completions", json={"prompt": [1, 2, 3]}) as answer:
            await answer.read()
            found.append(answer.status)
    return found


def generations(replica):
    return sum(seen[1] == "/v1/completions" for seen in replica.seen)


def looks(replica):
    return sum(seen[1] == "/health" for seen in replica.seen)


@pytest.mark.parametrize("policy", ["round-robin", "least-requests", "power-of-two", "dynamo-kv"])
async def test_with_two_of_three_dead_every_request_succeeds_on_the_third(
    fleet, router_for, eventually, capsys, policy
):
    r0, r1, r2 = await fleet(3)
    service = await router_for([r0, r1, r2], policy=policy, **SOON)
    async with aiohttp.ClientSession() as session:
        assert await complete(session, service, 6) == [200] * 6
        await r0.stop()
        await r1.stop()
        before = generations(r2)
        assert await complete(session, service, 30) == [200] * 30
        assert generations(r2) == before + 30
        assert service.proxy.refused + service.proxy.broken <= 2  # each was found out once
        async with session.get(f"{service.url}/router/state") as answer:
            state = msgspec.json.decode(await answer.read())
        found_out = [one["replica"] for one in state["down"]]
        assert sorted(found_out) == sorted(row["name"] for row in state["replicas"] if row["down"])
        assert set(found_out) <= {"r0", "r1"}
        assert state["counts"]["went_down"] == len(found_out)
        for one in state["down"]:
            assert 0 < one["since_us"] <= state["now_us"]
        for replica in (r0, r1):
            await replica.start(replica.port)
        await eventually(lambda: not service.router.down)
        assert {view.name for view in service.router.fleet(0)} == {"r0", "r1", "r2"}
        for replica in (r0, r1, r2):
            replica.seen.clear()
        both = await asyncio.gather(*(complete(session, service) for _ in range(30)))
        assert both == [[200]] * 30
        if policy in ("round-robin", "least-requests", "power-of-two"):
            assert generations(r0)
            assert generations(r1)
    said = capsys.readouterr().err
    for name in found_out:
        assert f"router: replica {name} is down: " in said
        assert f"router: replica {name} is back after " in said


async def test_a_healthy_replica_is_never_looked_at(fleet, router_for, eventually):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin", **SOON)
    async with aiohttp.ClientSession() as session:
        await complete(session, service, 2)
        await r1.stop()
        await complete(session, service, 2)
        await eventually(lambda: service.router.down)
        await r1.start(r1.port)
        await eventually(lambda: not service.router.down)
        seen = looks(r1)
        assert seen >= 1
        await complete(session, service, 4)
    assert (looks(r0), looks(r1)) == (0, seen)


async def test_a_replica_that_closes_without_an_answer_costs_a_try_elsewhere_and_not_the_request(fleet, router_for):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin")

    async def slam(request, body):
        if request.path != "/health":
            request.transport.close()
        return web.Response()

    r0.answer = slam
    async with aiohttp.ClientSession() as session:
        assert await complete(session, service, 4) == [200] * 4
    assert generations(r1) == 4
    assert service.proxy.broken >= 1
    assert service.router.counts.failed == service.proxy.broken
    assert service.router.in_flight == 0


async def test_a_server_whose_engine_is_dead_stays_down(fleet, router_for, eventually):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin", **SOON)
    async with aiohttp.ClientSession() as session:
        await r0.stop()
        await complete(session, service, 2)
        dead = True

        async def engine(request, body):
            return web.Response(status=503) if dead and request.path == "/health" else web.Response(text="ok")

        r0.answer = engine
        await r0.start(r0.port)
        await eventually(lambda: looks(r0) >= 3)
        assert "r0" in service.router.down
        assert await complete(session, service, 4) == [200] * 4
        assert generations(r0) == 0
        dead = False
        await eventually(lambda: not service.router.down)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_an_error_that_a_replica_answers_with_takes_it_out_of_nothing(fleet, router_for, status):
    """Field case BL-43: it is there, whatever it thinks of the request."""
    (replica,) = await fleet(1)
    service = await router_for([replica], **SOON)

    async def refuse(request, body):
        return web.json_response({}, status=status)

    replica.answer = refuse
    async with aiohttp.ClientSession() as session:
        assert await complete(session, service, 3) == [status] * 3
    assert service.router.down.times == looks(replica) == 0


@pytest.mark.parametrize("alive", [True, False])
async def test_an_answer_cut_short_makes_a_replica_doubtful_and_it_is_down_if_it_does_not_answer(
    fleet, router_for, eventually, alive
):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin", **SOON)

    async def cut(request, body):
        if request.path == "/health":
            return web.Response(status=200 if alive else 503)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        request.transport.close()
        return response

    r0.answer = cut
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await complete(session, service, 2)
        await eventually(lambda: looks(r0) >= (1 if alive else 2))
    assert ("r0" in service.router.down) is not alive
    assert service.router.down.times == (0 if alive else 1)


async def test_with_everybody_down_a_replica_that_is_back_is_found_before_the_next_look(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica], health_interval_ms=3_600_000)
    async with aiohttp.ClientSession() as session:
        await replica.stop()
        assert await complete(session, service) == [502]
        assert "r0" in service.router.down
        await replica.start(replica.port)
        assert await complete(session, service) == [200]
    assert not service.router.down


async def test_where_nobody_looks_every_request_finds_out_for_itself(fleet, router_for):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin", health_interval_ms=0)
    await r0.stop()
    async with aiohttp.ClientSession() as session:
        assert await complete(session, service, 6) == [200] * 6
    assert service.proxy.refused >= 3
    assert not service.router.down


async def test_a_replica_that_leaves_while_it_is_down_is_not_looked_at_any_more(fleet, router_for, eventually):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="round-robin", **SOON)
    async with aiohttp.ClientSession() as session:
        await r0.stop()
        await complete(session, service, 2)
        assert "r0" in service.router.down
        looking = service._health._looking["r0"]
        async with session.delete(f"{service.url}/router/replicas/r0") as answer:
            assert answer.status == 200
        await eventually(looking.done)
        await r0.start(r0.port)
        assert await complete(session, service, 2) == [200] * 2
    assert r0.seen == []


async def test_what_generates_nothing_steps_over_a_down_replica_and_tells_of_one(fleet, router_for):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], proxy=ProxyConfig(retries_max=0), health_interval_ms=3_600_000)
    await r0.stop()
    async with aiohttp.ClientSession() as session:
        for _ in range(6):
            async with session.get(f"{service.url}/v1/models") as answer:
                assert answer.status == 200
        assert service.proxy.refused == 1
        assert await complete(session, service, 6) == [200] * 6  # with no retry: it is known


async def test_tokens_are_not_asked_of_a_replica_that_is_down(fleet, router_for):
    r0, r1 = await fleet(2)
    service = await router_for([r0, r1], policy="dynamo-approx", health_interval_ms=3_600_000)
    await r0.stop()
    async with aiohttp.ClientSession() as session:
        await complete(session, service, 4)
        assert "r0" in service.router.down
        failed = service._tokens.stats.failed
        for _ in range(6):
            async with session.post(f"{service.url}/v1/completions", json={"prompt": "abc"}) as answer:
                assert answer.status == 200
    assert service._tokens.stats.failed == failed
