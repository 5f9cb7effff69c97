"""KV events over real ZeroMQ sockets, from a publisher that this test plays."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from routers import TokenPrompt, TurnView
from routers.metrics_poll import parse_metrics


class Publisher:
    """Binds as a vLLM engine does; keeps what it sent for replay."""

    def __init__(self, context):
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._replay = context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.LINGER, 0)
        self.replay_endpoint = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept = []
        self.asked = []
        self.ts = 0.0
        self._task = asyncio.create_task(self._serve_replay())

    async def send(self, sequence, *events, payload=None, lost=False):
        self.ts += 1.0
        payload = msgspec.msgpack.encode([self.ts, list(events), 0]) if payload is None else payload
        self.kept.append((sequence, payload))
        if not lost:
            await self._pub.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])

    async def _serve_replay(self):
        while True:
            identity, _, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for sequence, payload in self.kept:
                if sequence >= first:
                    await self._replay.send_multipart([identity, b"", b"kv", sequence.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    def close(self):
        self._task.cancel()
        self._pub.close()
        self._replay.close()


@pytest.fixture
async def publisher():
    context = zmq.asyncio.Context()
    made = Publisher(context)
    yield made
    made.close()
    await asyncio.sleep(0)
    context.destroy(0)


def stored(hashes, parent, first, **more):
    tokens = list(range(16 * first, 16 * (first + len(hashes))))
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, **more,
    }  # fmt: skip


PROMPT = TokenPrompt(list(range(100)))


def believed(service):
    fleet = service.router.fleet(0)
    return service.router.policy.choose(TurnView(request_id="probe", prompt=PROMPT), fleet).believed_hit_tokens


async def joined(service, publisher):
    """The subscription is up once a first (harmless) batch arrives; its number is 0."""
    stream = service.subscribers["r0"].stream

    async def knock():
        while stream.last is None:
            publisher.kept.clear()
            publisher.ts = 0.0
            await publisher.send(0)
            await asyncio.sleep(0.02)

    await asyncio.wait_for(knock(), 10)


async def start(router_for, publisher, replay=False):
    service = await router_for(
        ["http://127.0.0.1:9"],
        policy="pure-kv-affinity",
        events={0: publisher.endpoint},
        replay={0: publisher.replay_endpoint} if replay else None,
    )
    await joined(service, publisher)
    return service


async def test_events_of_a_replica_reach_the_policy(router_for, publisher, eventually):
    service = await start(router_for, publisher)
    await publisher.send(1, stored([11, 12], None, 0), stored([13], 12, 2))
    await eventually(lambda: believed(service) == 48)
    await publisher.send(2, {"type": "BlockRemoved", "block_hashes": [13], "medium": "GPU"})
    await eventually(lambda: believed(service) == 32)
    await publisher.send(3, {"type": "AllBlocksCleared"})
    await eventually(lambda: believed(service) == 0)
    report = service.state()["events"]["r0"]
    assert (report["last_sequence"], report["gaps"], report["restarts"]) == (3, 0, 0)


async def test_a_lost_batch_voids_the_belief(router_for, publisher, eventually):
    service = await start(router_for, publisher)
    await publisher.send(1, stored([11], None, 0))
    await eventually(lambda: believed(service) == 16)
    await publisher.send(2, stored([12], 11, 1), lost=True)
    await publisher.send(3, stored([13], 12, 2))
    await eventually(lambda: service.subscribers["r0"].stream.stats.gaps == 1)
    assert believed(service) == 0
    assert service.state()["policy_stats"]["index"]["unknown_parents"] == 1


async def test_a_lost_batch_is_replayed_where_the_replica_offers_it(router_for, publisher, eventually):
    service = await start(router_for, publisher, replay=True)
    await publisher.send(1, stored([11], None, 0))
    await publisher.send(2, stored([12], 11, 1), lost=True)
    await publisher.send(3, stored([13], 12, 2))
    await eventually(lambda: believed(service) == 48)
    stats = service.subscribers["r0"].stream.stats
    assert publisher.asked[-1] == 2
    assert (stats.gaps, stats.replayed, stats.invalidations) == (1, 1, 0)


async def test_a_restart_in_place_voids_the_belief(router_for, publisher, eventually):
    service = await start(router_for, publisher)
    await publisher.send(1, stored([11, 12], None, 0))
    await eventually(lambda: believed(service) == 32)
    await publisher.send(0, stored([21], None, 0))
    await eventually(lambda: believed(service) == 16)
    assert service.subscribers["r0"].stream.stats.restarts == 1


async def test_a_batch_that_cannot_be_read_is_counted_and_voids_the_belief(router_for, publisher, eventually):
    service = await start(router_for, publisher)
    await publisher.send(1, stored([11], None, 0))
    await eventually(lambda: believed(service) == 16)
    await publisher.send(2, payload=b"\xc1")
    await eventually(lambda: service.subscribers["r0"].stream.stats.undecodable == 1)
    assert believed(service) == 0
    assert "not msgpack" in service.state()["events"]["r0"]["last_error"]


async def test_another_block_size_stores_nothing_and_is_counted(router_for, publisher, eventually):
    service = await start(router_for, publisher)
    await publisher.send(1, stored([11], None, 0, block_size=32))
    await eventually(lambda: service.subscribers["r0"].skipped.block_size == 1)
    assert believed(service) == 0


async def test_a_policy_that_needs_no_events_subscribes_to_none(router_for, publisher):
    service = await router_for(["http://127.0.0.1:9"], policy="round-robin", events={0: publisher.endpoint})
    assert service.subscribers == {}


METRICS = """# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m {}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""


def test_gauges_of_all_ranks_are_read_as_one_replica():
    found = parse_metrics(METRICS, 5)
    assert (found.running, found.waiting, found.kv_usage, found.at_us) == (7, 2, 0.5, 5)


def test_metrics_without_the_gauges_are_no_metrics():
    assert parse_metrics("vllm:num_requests_running{} x\n", 0) is None
    assert parse_metrics("", 0) is None


async def test_metrics_are_polled_for_a_policy_that_needs_them(fleet, router_for, tmp_path, eventually):
    from aiohttp import web

    (replica,) = await fleet(1)

    async def metrics(request, body):
        return web.Response(text=METRICS)

    replica.answer = metrics
    own = tmp_path / "own.py"
    own.write_text(
        "from routers import BasePolicy, Decision, Signal\n"
        "class Usage(BasePolicy):\n"
        "    needs = frozenset({Signal.ENGINE_METRICS})\n"
        "    def choose(self, turn, fleet):\n"
        "        return Decision(min(fleet, key=lambda r: r.metrics.kv_usage).name, 'least used', 'usage')\n"
    )
    service = await router_for([replica], policy=f"{own}:Usage", metrics_interval_ms=20)
    await eventually(lambda: service.router.fleet(0)["r0"].metrics is not None)
    assert service.router.fleet(0)["r0"].metrics.kv_usage == 0.5
    assert service.state()["metrics_poll"]["failed"] == 0
