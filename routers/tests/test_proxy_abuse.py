"""What clients may do to the router: nothing of it is a traceback in its log, a 502 or memory without bound."""

import asyncio
import contextlib
import logging
import socket
import struct

import msgspec
import pytest
from aiohttp import web

from routers import Decision, FleetView
from routers.policies.load import RoundRobin

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = HEAD + b"Content-Length: 2\r\n\r\n{}"


@pytest.fixture
def logged(caplog):
    """Names of loggers with an error so far; the fake replicas log under the library's own name."""
    caplog.set_level(logging.ERROR)
    return lambda: [record.name for record in caplog.records if record.name != "aiohttp.server"]


async def ask(service, *pieces, take=4096):
    """First bytes of the answer to these bytes, sent one after the other. Read from the start, because a router that
    has seen enough answers and closes while more is being sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    answer = asyncio.ensure_future(reader.read(take))
    for piece in pieces:
        writer.write(piece)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(0.02)
    got = await asyncio.wait_for(answer, 5)
    writer.close()
    return got


async def counts(service):
    body = await ask(service, b"GET /router/state HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", take=-1)
    return msgspec.json.decode(body.partition(b"\r\n\r\n")[2])["counts"]


@pytest.mark.parametrize(
    "sent",
    [
        b"HELLO\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",  # no host
        HEAD + b"Content-Length: -4\r\n\r\n",
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n0\r\n\r\n",
        HEAD + b"X-Session-ID: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"A: " + b"x" * 300_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_and_no_line_in_the_log(sent, fleet, router_for, logged):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    assert (await ask(service, sent)).split(b"\r\n")[0].endswith(b"400 Bad Request")
    assert not logged()
    assert not replica.seen


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/models", b"/router/replicas"])
async def test_a_body_that_turns_bad_or_stops_on_its_way_reaches_no_replica(
    path, fleet, router_for, logged, eventually
):
    """The HTTP library tells nobody of it while the client stays; when it has left, nothing is left of it."""
    (replica,) = await fleet(1)
    service = await router_for([replica])
    for ending in (b"ZZ\r\n", b""):
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.02)
        writer.write(ending)
        await asyncio.sleep(0.02)
        writer.close()
    assert b"200 OK" in await ask(service, BODY)
    assert len(replica.seen) == 1
    assert not logged()
    await eventually(lambda: service.router.in_flight == 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"204"),
        (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", b"40"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
    ],
)
async def test_a_request_for_no_resource_is_answered_here(sent, status, fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    assert (await ask(service, sent)).split(b" ")[1].startswith(status)
    assert not replica.seen


async def test_a_body_in_a_coding_that_it_is_not_in_goes_to_the_replica_as_it_is(fleet, router_for, logged):
    """The replica says what it thinks of it; the router reads no more than it can and does not mind."""
    service = await router_for(await fleet(1), policy="dynamo-kv")
    sent = HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"
    answer = await ask(service, sent)
    assert answer.split(b" ")[1] != b"502"
    assert b"X-Routebench-Router-Error" not in answer
    assert not logged()


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics"])
async def test_a_client_that_resets_while_it_is_written_to_leaves_no_traceback(
    path, fleet, router_for, logged, eventually
):
    (replica,) = await fleet(1)

    async def pour(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)

    replica.answer = pour
    service = await router_for([replica])
    for _ in range(8):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(BODY if path == "/v1/completions" else b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.read(1000)
        # RST instead of FIN: the next write fails.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    await eventually(lambda: service.router.in_flight == 0 and replica.left == 8)
    assert not logged()


async def test_a_reader_that_stops_stops_the_replica_and_not_the_memory(fleet, router_for, eventually):
    """What is on the way are the sockets' buffers, which the system bounds."""
    (replica,) = await fleet(1)
    poured = 0

    async def pour(request, body):
        nonlocal poured
        response = web.StreamResponse()
        await response.prepare(request)
        while poured < 1 << 30:
            await response.write(b"x" * 65_536)
            poured += 65_536
        return response

    replica.answer = pour
    service = await router_for([replica])
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1024)
    writer.write(BODY)
    await reader.read(1000)
    writer.transport.pause_reading()
    before = -1
    while before != poured:  # until the replica is held up
        before = poured
        await asyncio.sleep(0.3)
    assert poured < 1 << 27
    writer.transport.abort()
    await eventually(lambda: service.router.in_flight == 0)


async def test_errors_of_clients_are_counted_and_errors_of_ours_are_logged(fleet, router_for, logged):
    service = await router_for(await fleet(1))
    await ask(service, b"HELLO WORLD HTTP/1.1\r\n\r\n")
    assert (await counts(service))["client_errors"] == 1

    def fail():
        raise KeyError("state")

    service.state = fail
    assert b"500" in await ask(service, b"GET /router/state HTTP/1.1\r\nHost: x\r\n\r\n")
    assert logged() == ["routers.http"]


# -- turns that a policy holds back ------------------------------------------------------------------------------------


class OneAtATime(RoundRobin):
    """Holds everything back while anything is in flight."""

    may_hold = True

    def must_wait(self, turn, fleet: FleetView) -> bool:
        return any(replica.in_flight for replica in fleet)

    def choose(self, turn, fleet: FleetView) -> Decision:
        return Decision(fleet.replicas[0].name, "the only one", "only")


@pytest.fixture
async def one_at_a_time(fleet, router_for, monkeypatch):
    from routers import registry

    monkeypatch.setitem(registry.POLICIES, "one-at-a-time", OneAtATime)
    (replica,) = await fleet(1)
    gate = asyncio.Semaphore(0)

    async def answer(request, body):
        await gate.acquire()
        return web.json_response({"ok": True})

    replica.answer = answer
    return replica, gate, await router_for([replica], policy="one-at-a-time")


async def test_a_turn_that_is_held_back_is_sent_when_the_one_before_has_ended(one_at_a_time, eventually):
    replica, gate, service = one_at_a_time
    asking = [asyncio.create_task(ask(service, BODY)) for _ in range(3)]
    await eventually(lambda: service.router.waiting == 2 and len(replica.seen) == 1)
    assert service.state()["waiting"] == 2
    for _ in asking:
        gate.release()
    assert all(b"200 OK" in answer for answer in await asyncio.gather(*asking))
    assert service.router.counts.held == 2


async def test_a_client_that_leaves_while_held_back_is_never_sent(one_at_a_time, eventually, logged):
    replica, gate, service = one_at_a_time
    first = asyncio.create_task(ask(service, BODY))
    await eventually(lambda: len(replica.seen) == 1)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(BODY)
    await eventually(lambda: service.router.waiting == 1)
    writer.transport.abort()
    await eventually(lambda: service.router.waiting == 0)
    gate.release()
    assert b"200 OK" in await first
    assert (len(replica.seen), service.router.counts.withdrawn, service.proxy.client_left) == (1, 1, 1)
    assert not logged()


async def test_when_the_last_replica_leaves_those_held_back_get_a_503(one_at_a_time, eventually):
    _, gate, service = one_at_a_time
    asking = [asyncio.create_task(ask(service, BODY)) for _ in range(2)]
    await eventually(lambda: service.router.waiting == 1)
    service.remove_replica("r0")
    gate.release()
    answers = sorted(await asyncio.gather(*asking), key=lambda answer: b"503" in answer)
    assert b"200 OK" in answers[0]
    assert b"503 Service Unavailable" in answers[1]


async def test_a_header_that_no_policy_can_follow_is_a_400(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica], policy="dynamo-kv")
    sent = HEAD + b'X-Dynamo-Select: {"pin": 1}\r\nContent-Length: 2\r\n\r\n{}'
    assert b"400 Bad Request" in await ask(service, sent)
    assert not replica.seen


@pytest.mark.parametrize("policy", ["session-ring", "vllm-consistent-hash", "sticky-least-loaded", "dynamo-kv"])
@pytest.mark.parametrize("name", [b"X-Session-ID", b"X-Request-Id", b"X-User-Id"])
async def test_a_header_in_bytes_that_are_no_utf_8_is_read_and_logged_as_latin_1(
    fleet, router_for, tmp_path, logged, policy, name
):
    (replica,) = await fleet(1)
    log = tmp_path / "log"
    service = await router_for([replica], policy=policy, log_file=log)
    got = await ask(service, HEAD + name + b": caf\xe9\r\nContent-Length: 2\r\n\r\n{}")
    assert got.startswith(b"HTTP/1.1 200")
    assert not logged()
    await service.close()
    (row,) = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    given = {"X-Session-ID": row["session_id"], "X-Request-Id": row["request_id"]}
    assert given.get(name.decode(), "caf\xe9") == "caf\xe9"


async def test_a_prompt_that_is_json_nested_beyond_reason_names_no_session(router_for, fleet):
    (replica,) = await fleet(1)
    service = await router_for([replica], policy="sticky-least-loaded")
    body = msgspec.json.encode({"prompt": '{"a":' * 60_000 + "1" + "}" * 60_000})
    got = await ask(service, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert got.startswith(b"HTTP/1.1 200")
