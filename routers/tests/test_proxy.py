"""The proxy over real sockets: nothing buffered, nothing changed, nothing leaked."""

import asyncio
import inspect
import socket

import aiohttp
import msgspec
import pytest
from aiohttp import web

from routers import BasePolicy, RouterFaults, Signal
from routers.errors import UpstreamError
from routers.proxy import ProxyConfig, generates
from routers.upstream import as_upstream_error


def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def rows(path):
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


async def sse(request, *chunks, gate=None):
    """Stream these chunks; wait at the gate before each one after the first."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for place, chunk in enumerate(chunks):
        if place and gate is not None:
            await gate.acquire()
        await response.write(chunk)
    await response.write_eof()
    return response


async def test_each_chunk_is_passed_on_before_the_next_is_sent(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    gate = asyncio.Semaphore(0)
    chunks = [b"data: {}\n\n", b'data: {"a":1}\n\ndata: {"b":2}\n\n', b"data: [DONE]\n\n"]
    replica.answer = lambda request, body: sse(request, *chunks, gate=gate)
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for chunk in chunks:
            got, _ = await answer.content.readchunk()
            assert got == chunk  # the same piece, though the replica has not sent the next one
            gate.release()
        assert await answer.content.read() == b""


async def test_the_head_is_passed_on_before_the_first_chunk(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    gate = asyncio.Event()

    async def slow(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await gate.wait()
        await response.write_eof(b"x")
        return response

    replica.answer = slow
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
        assert answer.status == 200  # the head came, the body waits at the gate
        gate.set()
        assert await answer.read() == b"x"


async def raw_exchange(port, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_request_arrives_byte_for_byte_but_for_its_hop_headers(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    body = b'{ "prompt" : [1,2,  3], "x": "\xc3\xa9" }'
    await raw_exchange(
        service.port,
        b"POST /v1/completions?a=%%2F%%20b&c HTTP/1.1\r\nhOsT: me\r\nContent-Type: application/json\r\n"
        b"X-ODD-case: One\r\nX-Twice: 1\r\nX-Twice: 2\r\nAuthorization: Bearer k\r\nX-Request-Id: abc\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nProxy-Connection: x\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body,
    )
    ((method, path, headers, seen),) = replica.seen
    assert (method, path, seen) == ("POST", "/v1/completions?a=%2F%20b&c", body)
    sent = [(name, value) for name, value in headers if name not in (b"Host", b"Content-Length")]
    assert sent == [
        (b"Content-Type", b"application/json"),
        (b"X-ODD-case", b"One"),
        (b"X-Twice", b"1"),
        (b"X-Twice", b"2"),
        (b"Authorization", b"Bearer k"),
        (b"X-Request-Id", b"abc"),
    ]


async def test_a_compressed_request_body_stays_as_it_is(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    import gzip

    data = gzip.compress(b'{"prompt":[1]}')
    head = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Encoding: gzip\r\nConnection: close\r\n"
    await raw_exchange(service.port, head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    assert len(replica.seen) == 1
    assert dict(replica.seen[0][2])[b"Content-Encoding"] == b"gzip"


async def raw_replica(answer):
    """A replica of bytes: answers every request with these and closes."""

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        await reader.readexactly(length)
        writer.write(answer)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def through_raw(router_for, answer, request=b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nConnection: close\r\n"):
    server = await raw_replica(answer)
    async with server:
        service = await router_for([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        return service, await raw_exchange(service.port, request + b"Content-Length: 2\r\n\r\n{}")


async def test_an_answer_comes_back_byte_for_byte_but_for_its_hop_headers(router_for):
    body = b"\x1f\x8b not really gzip"
    _, answer = await through_raw(
        router_for,
        b"HTTP/1.1 418 Short And Stout\r\nServer: uvicorn\r\ndate: today\r\nX-ODD: \xc3\xa9\r\nX-Two: a\r\n"
        b"X-Two: b\r\nContent-Encoding: gzip\r\nContent-Type: text/plain\r\nKeep-Alive: 5\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body,
    )
    head, _, got = answer.partition(b"\r\n\r\n")
    assert got == body
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 418 Short And Stout",
        b"Server: uvicorn",
        b"date: today",
        b"X-ODD: \xc3\xa9",
        b"X-Two: a",
        b"X-Two: b",
        b"Content-Encoding: gzip",
        b"Content-Type: text/plain",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    ]


async def test_a_header_that_is_no_utf8_keeps_its_letters_though_not_its_bytes(router_for):
    _, answer = await through_raw(
        router_for,
        b"HTTP/1.1 200 OK\r\nX-Odd: \xe9t\xe9\r\nContent-Length: 0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nX-Odd: \xe9\r\nConnection: close\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert "X-Odd: \u00e9t\u00e9\r\n".encode() in answer


async def test_a_target_in_absolute_form_is_passed_on_by_its_path(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    await raw_exchange(
        service.port, b"GET http://example.org/v1/models?a=%2F HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert replica.seen[0][1] == "/v1/models?a=%2F"


async def test_a_head_request_keeps_its_length_and_has_no_body(router_for):
    server = await raw_replica(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n")
    async with server:
        service = await router_for([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        answer = await raw_exchange(service.port, b"HEAD /v1/models HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")
    assert b"Content-Length: 1000\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_client_that_leaves_mid_answer_frees_the_replica_at_once(fleet, router_for, tmp_path, eventually):
    (replica,) = await fleet(1)
    service = await router_for([replica], log_file=tmp_path / "log.jsonl")
    replica.answer = lambda request, body: sse(request, b"data: 1\n\n", b"never", gate=asyncio.Semaphore(0))
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{service.url}/v1/completions", json={}) as answer:
            await answer.content.readany()
            assert service.router.in_flight == 1
            answer.close()
        await eventually(lambda: replica.left == 1)
        await eventually(lambda: service.router.in_flight == 0)
    assert service.router.counts.failed == 1
    await service.close()
    (row,) = rows(tmp_path / "log.jsonl")
    assert row["status"] == 499
    assert "client left" in row["error"]


async def test_a_client_that_leaves_before_the_head_frees_the_replica_too(fleet, router_for, eventually):
    (replica,) = await fleet(1)
    service = await router_for([replica])

    async def never(request, body):
        await asyncio.Event().wait()

    replica.answer = never
    async with aiohttp.ClientSession() as session:
        with pytest.raises(asyncio.TimeoutError):
            await session.post(f"{service.url}/v1/completions", json={}, timeout=aiohttp.ClientTimeout(total=0.2))
        await eventually(lambda: replica.left == 1 and service.router.in_flight == 0)


async def test_a_replica_that_refuses_costs_one_try_elsewhere(fleet, router_for, tmp_path):
    (replica,) = await fleet(1)
    dead = f"http://127.0.0.1:{closed_port()}"
    service = await router_for([dead, replica], log_file=tmp_path / "log.jsonl")
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
        assert (answer.status, (await answer.json())["served_by"]) == (200, "r0")
    counts = service.router.counts
    assert (counts.routed, counts.failed, counts.finished, service.router.in_flight) == (2, 1, 1, 0)
    await service.close()
    (row,) = rows(tmp_path / "log.jsonl")
    assert (row["replica"], row["attempts"], row["status"]) == ("r1", 2, 200)


@pytest.mark.parametrize(("replicas", "retries", "tries"), [(3, 0, 1), (3, 1, 2), (3, 3, 3), (6, 3, 4)])
async def test_when_nobody_answers_the_client_gets_a_502_of_vllms_shape(router_for, replicas, retries, tries):
    dead = [f"http://127.0.0.1:{closed_port()}" for _ in range(replicas)]
    service = await router_for(dead, proxy=ProxyConfig(retries_max=retries))
    for done in (1, 2):  # with everybody down they are tried all the same
        async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
            assert answer.status == 502
            error = (await answer.json())["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"].startswith("router: replica r")
        assert (error["type"], error["code"]) == ("BadGatewayError", 502)
        assert service.router.counts.routed == service.proxy.refused == done * tries
        assert service.router.in_flight == 0


async def test_a_lone_replica_that_closes_without_an_answer_is_a_502_and_not_tried_again(router_for):
    service, answer = await through_raw(router_for, b"")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"router: replica r0 failed" in answer
    assert service.router.counts.routed == service.router.counts.failed == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
    ],
)
async def test_an_answer_cut_short_reaches_the_client_cut_short(router_for, answer, tmp_path):
    service, got = await through_raw(router_for, answer)
    assert got.startswith(b"HTTP/1.1 200 OK")
    assert b"hello" in got
    assert not got.endswith(b"0\r\n\r\n")
    assert service.router.counts.failed == 1
    assert service.proxy.broken == 1


async def test_no_replica_is_a_503(router_for):
    service = await router_for([])
    async with aiohttp.ClientSession() as session:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
            async with session.request(method, service.url + path) as answer:
                assert answer.status == 503
                assert "add one" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(("status", "failed"), [(400, 0), (404, 0), (429, 0), (500, 1), (503, 1)])
async def test_an_engines_error_passes_through_and_only_its_own_faults_count_as_failures(
    fleet, router_for, status, failed, eventually
):
    """Field case BL-43: a client's 400 is no failure of the replica."""
    (replica,) = await fleet(1)
    service = await router_for([replica])

    async def refuse(request, body):
        return web.json_response({"error": {"code": status}}, status=status)

    replica.answer = refuse
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
        assert answer.status == status
        assert await answer.json() == {"error": {"code": status}}
    await eventually(lambda: service.router.in_flight == 0)
    assert service.router.counts.failed == failed
    assert service.router.counts.finished == 1 - failed


async def test_what_generates_nothing_goes_to_the_replicas_in_turn_and_is_no_load(fleet, router_for):
    replicas = await fleet(3)
    service = await router_for(replicas, policy="session-ring")
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.get(f"{service.url}/v1/models") as answer:
                assert answer.status == 200
            async with session.post(f"{service.url}/tokenize", json={"prompt": "ab"}) as answer:
                assert (await answer.json())["tokens"] == [0, 1]
    assert sum(len(replica.seen) for replica in replicas) == 6
    assert all(replica.seen for replica in replicas)
    assert service.router.counts.routed == 0


async def test_what_generates_nothing_steps_over_a_dead_replica(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([f"http://127.0.0.1:{closed_port()}", replica])
    async with aiohttp.ClientSession() as session:
        for _ in range(4):
            async with session.get(f"{service.url}/health") as answer:
                assert answer.status == 200


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/completions", True),
        ("POST", "/v1/chat/completions", True),
        ("POST", "/inference/v1/generate", True),  # field case BL-04: token-in endpoints are load, too
        ("POST", "/generate", True),
        ("POST", "/v1/completions/render", False),
        ("POST", "/tokenize", False),
        ("POST", "/reset_prefix_cache", False),
        ("POST", "/mock/faults", False),
        ("GET", "/v1/completions", False),
        ("DELETE", "/v1/x", False),
    ],
)
def test_any_post_that_is_no_tool_route_is_load(method, path, expected):
    assert generates(method, path) is expected


async def test_the_session_header_decides_and_the_body_is_second_choice(fleet, router_for, tmp_path):
    replicas = await fleet(4)
    service = await router_for(replicas, policy="session-ring", log_file=tmp_path / "log.jsonl")
    async with aiohttp.ClientSession() as session:
        for _ in range(4):
            await session.post(f"{service.url}/v1/completions", json={}, headers={"x-session-id": "s7"})
            await session.post(f"{service.url}/v1/completions", json={"session_id": "s7"})
    assert [len(replica.seen) for replica in replicas if replica.seen] == [8]
    await service.close()
    assert {row["session_id"] for row in rows(tmp_path / "log.jsonl")} == {"s7"}


async def test_two_requests_may_carry_one_id_at_a_time(fleet, router_for, eventually):
    replicas = await fleet(2)
    service = await router_for(replicas)
    gate = asyncio.Event()

    async def wait(request, body):
        await gate.wait()
        return web.Response(text="ok")

    for replica in replicas:
        replica.answer = wait
    async with aiohttp.ClientSession() as session:
        headers = {"X-Request-Id": "same"}
        both = [asyncio.create_task(session.post(f"{service.url}/v1/completions", headers=headers)) for _ in range(2)]
        await eventually(lambda: service.router.in_flight == 2)
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*both)] == [200, 200]
    assert service.router.counts.finished == 2


async def test_the_log_has_one_line_per_request_with_its_instants_in_order(fleet, router_for, tmp_path):
    (replica,) = await fleet(1)
    log = tmp_path / "deep" / "log.jsonl"
    service = await router_for([replica], policy="dynamo-kv", log_file=log, epoch_ns=0)
    replica.answer = lambda request, body: sse(request, b"data: {}\n\n", b"data: [DONE]\n\n")
    async with aiohttp.ClientSession() as session:
        body = {"prompt": list(range(40))}
        async with session.post(f"{service.url}/v1/completions", json=body, headers={"X-Request-Id": "q-1"}) as answer:
            await answer.read()
        async with session.post(f"{service.url}/v1/completions", json=body) as answer:
            await answer.read()
    await service.close()
    given, made = rows(log)
    assert given["request_id"] == "q-1"
    assert dict(replica.seen[1][2])[b"X-Request-Id"].decode() == made["request_id"]  # both ends write the same id
    assert list(given) == [
        "request_id", "session_id", "replica", "reason", "rule", "believed_hit_tokens", "received_us", "routed_us",
        "sent_us", "first_byte_us", "ended_us", "status", "error", "prompt_tokens", "attempts", "scores",
        "cached_tokens",
    ]  # fmt: skip
    instants = [given[name] for name in ("received_us", "routed_us", "sent_us", "first_byte_us", "ended_us")]
    assert instants == sorted(instants)
    assert (given["prompt_tokens"], given["believed_hit_tokens"], given["status"]) == (40, 0, 200)
    assert "cost" in given["reason"]


async def test_the_log_is_written_while_requests_go_on(fleet, router_for, tmp_path, eventually):
    (replica,) = await fleet(1)
    log = tmp_path / "log.jsonl"
    service = await router_for([replica], log_file=log)
    async with aiohttp.ClientSession() as session:
        await session.post(f"{service.url}/v1/completions", json={})
        await eventually(lambda: log.stat().st_size > 0)


async def test_progress_reaches_a_policy_that_asks_for_it(fleet, router_for, eventually):
    (replica,) = await fleet(1)
    service = await router_for([replica], policy="dynamo-kv", options={"track_output_blocks": True})
    gate = asyncio.Semaphore(0)
    tokens = [b'data: {"choices":[{"text":"a"}]}\n\n'] * 20
    usage = b'data: {"choices":[],"usage":{}}\n\n'
    replica.answer = lambda request, body: sse(request, *tokens, usage, b"data: [DONE]\n\n", gate=gate)
    async with aiohttp.ClientSession() as session:
        body = {"prompt": list(range(16))}
        async with session.post(f"{service.url}/v1/completions", json=body) as answer:
            for _ in range(19):
                await answer.content.readany()
                gate.release()
            await eventually(lambda: service.router.policy._sequences.active_blocks("r0") == 3)
            for _ in range(3):
                gate.release()
            await answer.read()
    await eventually(lambda: service.router.policy._sequences.active_blocks("r0") == 0)


class Clumsy(BasePolicy):
    def choose(self, turn, fleet):
        raise KeyError("lost")


async def test_a_policy_that_fails_is_a_500_that_says_so(fleet, router_for):
    service = await router_for(await fleet(1))
    service.router.policy = Clumsy(rng=None)
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/v1/completions", json={}) as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["message"] == "router: KeyError: 'lost'"


class Reader(BasePolicy):
    """Writes down what it was given."""

    needs = frozenset({Signal.TOKENS})

    def choose(self, turn, fleet):
        from routers import Decision

        self.turn = turn
        return Decision(fleet.replicas[0].name, "", "")


@pytest.mark.parametrize(
    ("path", "body", "tokens", "question"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, [5, 6, 7], None),
        ("/v1/completions", {"prompt": [[5, 6, 7]]}, [5, 6, 7], None),
        ("/v1/completions", {"prompt": [5, 6, 7], "token_ids": [9]}, [5, 6, 7], None),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {}}, [5, 6, 7], None),
        ("/inference/v1/generate", {"token_ids": "5", "sampling_params": {}}, None, None),
        ("/inference/v1/generate", {"sampling_params": 7}, None, None),
        ("/v1/completions", {"prompt": "abc", "model": "m"}, [0, 1, 2], {"prompt": "abc", "model": "m"}),
        ("/v1/completions", {"prompt": ["abcd"]}, [0, 1, 2, 3], {"prompt": "abcd"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False, "temperature": 1},
            list(range(len("[{'role': 'user', 'content': 'hi'}]"))),
            {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
        ),
        ("/v1/completions", {"prompt": ["a", "b"]}, None, None),
        ("/v1/completions", {"prompt": [[1], [2]]}, None, None),
        ("/v1/completions", {"prompt": [-4] * 16}, None, None),
        ("/v1/completions", {"prompt": 7}, None, None),
        ("/v1/completions", {}, None, None),
        ("/v1/completions", [], None, None),
    ],
)
async def test_tokens_come_from_the_body_or_from_a_replica(fleet, router_for, path, body, tokens, question):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    service.router.policy = policy = Reader(rng=None)
    async with aiohttp.ClientSession() as session:
        await session.post(service.url + path, json=body)
    asked = [msgspec.json.decode(seen[3]) for seen in replica.seen if seen[1] == "/tokenize"]
    assert asked == ([question] if question else [])
    assert (list(policy.turn.prompt.token_ids()) if policy.turn.prompt else None) == tokens


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 7}, 7),
        ("/v1/chat/completions", {"messages": [], "max_tokens": 7, "max_completion_tokens": 5}, 5),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 9, "n": 1}}, 9),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": "9"}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": [9]}, None),
    ],
)
async def test_what_a_client_asks_for_at_most_is_read_where_its_route_has_it(fleet, router_for, path, body, limit):
    service = await router_for(await fleet(1))
    service.router.policy = policy = Reader(rng=None)
    async with aiohttp.ClientSession() as session, session.post(service.url + path, json=body) as answer:
        assert answer.status == 200
    assert policy.turn.max_tokens == limit


async def test_token_in_requests_are_placed_by_their_tokens_and_counted_until_they_end(fleet, router_for, eventually):
    """Field case BL-04: were they no load, every replica would look idle and the longest match win for ever."""
    replicas = await fleet(4)
    service = await router_for(replicas, policy="dynamo-approx")
    gate = asyncio.Event()

    async def stream(request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        await gate.wait()
        await response.write(b'data: {"request_id":"q","choices":[{"index":0,"token_ids":[7]}]}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response

    for replica in replicas:
        replica.answer = stream
    shared = list(range(320))
    async with aiohttp.ClientSession() as session:

        async def ask(number):
            body = {"token_ids": [*shared, *[number] * 32], "sampling_params": {"max_tokens": 4}, "stream": True}
            headers = {"X-Session-ID": f"s{number}"}
            async with session.post(f"{service.url}/inference/v1/generate", json=body, headers=headers) as answer:
                return answer.status, await answer.read()

        asked = [asyncio.create_task(ask(number)) for number in range(40)]
        await eventually(lambda: service.router.in_flight == 40)
        loads = [(view.in_flight, view.in_flight_tokens) for view in service.router.replicas()]
        assert [tokens for _, tokens in loads] == [352 * requests for requests, _ in loads]
        assert max(requests for requests, _ in loads) < 36  # no degenerate placement: nobody has 90 % of them
        gate.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    assert service.router.in_flight == 0
    assert {view.in_flight_tokens for view in service.router.replicas()} == {0}


async def test_a_cut_body_ends_a_token_in_prompt_too(fleet, router_for):
    service = await router_for(await fleet(1), proxy=ProxyConfig(faults=RouterFaults(body_truncate_bytes=100)))
    service.router.policy = policy = Reader(rng=None)
    async with aiohttp.ClientSession() as session:
        await session.post(f"{service.url}/inference/v1/generate", json={"token_ids": [11] * 500})
    assert 10 < policy.turn.prompt.tokens < 50


async def test_a_replica_that_cannot_tokenise_costs_the_tokens_and_is_counted(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    service.router.policy = policy = Reader(rng=None)
    replica.tokenizer = lambda question: 1 / 0
    url = f"{service.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json={"prompt": "x"}) as answer:
        assert answer.status == 200
        assert policy.turn.prompt is None
        async with session.get(f"{service.url}/router/state") as state:
            assert (await state.json())["tokens"]["failed"] == 1


async def test_a_body_that_is_no_json_is_the_replicas_to_refuse(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica], policy="dynamo-kv")
    url = f"{service.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, data=b"{nope") as answer:
        assert answer.status == 200
    assert replica.seen[0][3] == b"{nope"


async def test_many_streams_at_once_have_no_limit_of_connections(fleet, router_for, eventually):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    gate = asyncio.Event()

    async def wait(request, body):
        await gate.wait()
        return web.Response(text="ok")

    replica.answer = wait
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(session.post(f"{service.url}/v1/completions", json={})) for _ in range(150)]
        await eventually(lambda: len(replica.seen) == 150)
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}


async def test_curl_style_expect_is_answered(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica])
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await writer.wait_closed()
    assert b"Expect" not in dict(replica.seen[0][2])


async def test_admin_routes_answer_and_others_under_them_do_not_leak(fleet, router_for):
    (replica,) = await fleet(1)
    service = await router_for([replica], policy="dynamo-kv:decay")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{service.url}/router/health") as answer:
            assert await answer.json() == {"status": "ok"}
        async with session.get(f"{service.url}/router/state") as answer:
            state = await answer.json()
        async with session.get(f"{service.url}/router/nothing") as answer:
            assert answer.status == 404
        async with session.post(f"{service.url}/router/state") as answer:
            assert answer.status == 405
    assert state["policy"] == "dynamo-kv:decay"
    assert state["options"]["overlap_score_credit_decay"] == 1.0
    assert state["replicas"][0]["url"] == replica.url
    assert state["needs"] == ["kv_events", "tokens"]
    assert replica.seen == []


def test_no_error_of_the_client_library_is_left_unmapped():
    kinds = [
        kind
        for _, kind in inspect.getmembers(aiohttp, inspect.isclass)
        if issubclass(kind, Exception) and not issubclass(kind, Warning)
    ]
    assert len(kinds) > 15
    for kind in [*kinds, OSError, TimeoutError, ConnectionResetError, ValueError]:
        # Its own constructor wants much; a subclass that prints itself stands for it.
        error = type("Made", (kind,), {"__init__": lambda self: None, "__str__": lambda self: "x"})()
        assert isinstance(as_upstream_error(error), UpstreamError), kind
