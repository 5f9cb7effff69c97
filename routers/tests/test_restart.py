"""A replica that restarts in place, field case BL-08: what a careful router knows of it, and a flawed one does not."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from routers import Router, RouterFaults, Stored, TokenPrompt, TurnView, make_policy
from routers.proxy import ProxyConfig
from routers.tests.test_subscriber import Publisher, believed, joined, stored

FLAWED = ProxyConfig(faults=RouterFaults(ignore_event_sequence=True))


class Restarting(Publisher):
    async def restart(self, context):
        """As another process at the same address: connections are lost and nothing is remembered."""
        self._pub.close()
        self.kept.clear()
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        while True:  # the old one gives its port back in its own time
            try:
                return self._pub.bind(self.endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


@pytest.fixture
async def engine():
    context = zmq.asyncio.Context()
    made = Restarting(context)
    made.again = lambda: made.restart(context)
    yield made
    made.close()
    context.destroy(0)


async def warm(service, engine, eventually):
    await joined(service, engine)
    await engine.send(1, stored([1, 2, 3], None, 0))
    await eventually(lambda: believed(service) == 48)


async def test_the_belief_in_a_replica_ends_when_it_restarts_and_not_with_its_first_word(
    engine, router_for, eventually
):
    service = await router_for(["http://127.0.0.1:9"], events={0: engine.endpoint}, policy="pure-kv-affinity")
    await warm(service, engine, eventually)
    await engine.again()
    await eventually(lambda: believed(service) == 0)
    report = service.state()["events"]["r0"]
    assert report["invalidated"] == {"disconnect": 1}
    assert report["void_since_us"] is not None


async def test_it_is_believed_again_from_its_first_word_on_and_the_time_between_is_told(engine, router_for, eventually):
    service = await router_for(["http://127.0.0.1:9"], events={0: engine.endpoint}, policy="pure-kv-affinity")
    await warm(service, engine, eventually)
    await engine.again()
    await eventually(lambda: believed(service) == 0)
    stream = service.subscribers["r0"].stream
    while not stream.stats.restarts:  # until the socket is connected again, what is sent is lost
        await engine.send(0, stored([7, 8], None, 0))
        await asyncio.sleep(0.02)
    await eventually(lambda: believed(service) == 32)
    report = service.state()["events"]["r0"]
    assert report["void_since_us"] is None
    assert report["void_us_max"] > 0
    assert (report["restarts"], report["invalidated"]["disconnect"]) == (1, 1)


async def test_a_router_that_heeds_no_sequence_believes_on(engine, router_for, eventually):
    service = await router_for(
        ["http://127.0.0.1:9"], events={0: engine.endpoint}, policy="pure-kv-affinity", proxy=FLAWED
    )
    await warm(service, engine, eventually)
    await engine.again()
    stream = service.subscribers["r0"].stream
    await eventually(lambda: stream.stats.disconnects == 1)
    heard = stream.stats.batches
    while stream.stats.batches == heard:
        await engine.send(0, stored([7], None, 40))
        await asyncio.sleep(0.02)
    assert believed(service) == 48
    assert service.state()["events"]["r0"]["invalidations"] == 0


@pytest.mark.parametrize(("faults", "stale"), [(RouterFaults(ignore_event_sequence=True), 5), (RouterFaults(), 0)])
def test_placements_that_were_to_hit_and_hit_nothing_are_counted(faults, stale):
    router = Router(make_policy("pure-kv-affinity"), ["r0", "r1"], faults=faults)
    prompt = TokenPrompt(list(range(160)))
    content = tuple(prompt.block_hashes(16).tolist())
    router.kv_events("r0", [Stored(content, None, content, 16)], 0)
    router.event_gap("r0", 1)  # it restarted
    for number in range(5):
        router.route(TurnView(request_id=f"q{number}", prompt=prompt), number)
        router.finished(f"q{number}", 1, number, cached_tokens=0)
    assert sum(belief.stale for belief in router.beliefs.values()) == stale
