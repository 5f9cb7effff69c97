"""The breaker that counts clients' errors (field case BL-43): in the core, so both drivers show the same failure."""

import random

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import NoReplica, Router, RouterFaults, TurnView, make_policy
from routers.breaker import Breaker
from routers.proxy import ProxyConfig

MINUTE_US = 60_000_000


def router(strikes, replicas=2):
    names = [f"r{number}" for number in range(replicas)]
    policy = make_policy("round-robin", {}, random.Random(1))
    return Router(policy, names, faults=RouterFaults(breaker_on_client_errors=strikes))


def ask(one, name, now_us, status):
    """A request from its placement to its end; False where the router turned it away."""
    try:
        one.route(TurnView(request_id=name), now_us)
    except NoReplica:
        return False
    if status < 400:
        one.finished(name, 1, now_us)
    else:
        one.refused(name, now_us, status)
    return True


# -- the law -----------------------------------------------------------------------------------------------------


@given(statuses=st.lists(st.sampled_from([200, 400, 404, 429, 500]), max_size=60), replicas=st.integers(1, 4))
@settings(deadline=None)
def test_a_sound_router_turns_nobody_away_for_what_replicas_answer(statuses, replicas):
    one = router(None, replicas)
    assert all(ask(one, f"q{number}", number, status) for number, status in enumerate(statuses))


def test_a_breaker_on_client_errors_turns_right_requests_away_and_lets_them_in_again_when_its_time_is_over():
    one = router(3)
    assert all(ask(one, f"long{number}", number, 400) for number in range(6))
    with pytest.raises(NoReplica, match=r"2 shut out by the breaker \(r0, r1\); try later"):
        one.route(TurnView(request_id="right"), 6)
    assert one.counts.no_replica == 1
    assert not ask(one, "last", 4 + MINUTE_US - 1, 200)
    assert ask(one, "first", 4 + MINUTE_US, 200)  # r0 met its third error at 4
    assert not one.fleet(4 + MINUTE_US, ["r0"]).replicas
    assert len(one.fleet(5 + MINUTE_US)) == 2


def test_a_right_answer_between_two_client_errors_keeps_the_breaker_shut():
    one = router(2, replicas=1)
    assert all(ask(one, f"q{number}", number, status) for number, status in enumerate([400, 200] * 20))


def test_only_a_replicas_own_answer_counts():
    one = router(1, replicas=1)
    one.route(TurnView(request_id="left"), 0)
    one.failed("left", 1)  # the client went, or the answer broke off
    assert ask(one, "next", 4, 200)


def test_another_replica_under_an_old_name_has_failed_nobody():
    one = router(2, replicas=1)
    ask(one, "a", 0, 400)
    ask(one, "b", 1, 400)
    assert not one.fleet(2).replicas
    one.remove_replica("r0", 3)
    one.add_replica("r0", 4)
    assert ask(one, "c", 5, 400)
    assert len(one.fleet(6)) == 1


def test_a_retry_is_not_offered_who_is_shut_out():
    one = router(1)
    ask(one, "long", 0, 400)
    with pytest.raises(NoReplica, match=r"1 already tried \(r1\) and 1 shut out by the breaker \(r0\)"):
        one.route(TurnView(request_id="again"), 1, exclude=["r1"])


def test_a_breaker_opens_for_a_while_and_one_more_failure_opens_it_again():
    breaker = Breaker(2, open_us=100)
    breaker.failed("r0", 0)
    breaker.served("r0", 5)
    breaker.failed("r0", 10)
    assert breaker.open(10) == set()
    breaker.failed("r0", 20)
    assert [breaker.open(at) for at in (20, 119, 120)] == [{"r0"}, {"r0"}, set()]
    breaker.failed("r0", 130)
    breaker.served("r0", 229)  # it was on its way before
    assert breaker.open(229) == {"r0"}
    breaker.served("r0", 230)
    breaker.failed("r0", 231)
    assert breaker.open(231) == set()


# -- over real sockets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strikes", "collateral"), [(None, 0), (3, 6)])
async def test_a_breaker_that_counts_client_errors_refuses_healthy_requests(fleet, router_for, strikes, collateral):
    """Over-long requests rightly get 400; then nobody is left for those that are right."""
    replicas = await fleet(2)

    async def answer(request, body):
        return aiohttp.web.json_response({}, status=400 if b"too long" in body else 200)

    for replica in replicas:
        replica.answer = answer
    faults = RouterFaults(breaker_on_client_errors=strikes)
    service = await router_for(replicas, policy="round-robin", proxy=ProxyConfig(faults=faults))
    seen = []
    async with aiohttp.ClientSession() as session:
        for prompt in ["too long"] * 6 + ["right"] * 6:
            async with session.post(f"{service.url}/v1/completions", json={"prompt": prompt}) as found:
                seen.append(found.status)
    assert seen[:6] == [400] * 6
    assert seen[6:].count(503) == collateral
    assert seen[6:].count(200) == 6 - collateral
