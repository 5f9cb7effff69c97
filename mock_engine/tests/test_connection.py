"""What clients break: each gets what uvicorn would give, the connection is closed, and the log stays quiet."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import struct

import pytest

from mock_engine.tests.serving import Client, listening, serving

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASK = json.dumps({"prompt": "hi", "max_tokens": 1})
NO_HTTP = b"Invalid HTTP request received."


async def raw(client: Client, *parts: bytes) -> bytes:
    """Everything that comes back until the other end closes, each part sent after the one before has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.replica.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def one_answer(request: str, body: bytes = b"") -> bytes:
    return f"{request}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "parts",
    [
        (b"garbage\r\n\r\n",),
        (bytes(range(256)),),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 50,),
        (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
        (b"GET /version HTTP/1.1\r\nHost x\r\n\r\n",),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: a\x00b\r\n\r\n",),
        (HEAD.encode() + b"Content-Length: abc\r\n\r\n{}",),
        (HEAD.encode() + b"Content-Length: -5\r\n\r\n{}",),
        (HEAD.encode() + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",),
        (HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",),
        (HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"ZZ\r\n{}\r\n"),
    ],
)
async def test_what_is_no_http_gets_a_plain_400_and_nothing_in_the_log(
    parts: tuple[bytes, ...], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with listening() as client:
        answer = await raw(client, *parts)
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *headers = head.split(b"\r\n")
        assert (first, body) == (b"HTTP/1.1 400 Bad Request", NO_HTTP)
        names = [header.partition(b":")[0] for header in headers]
        assert names == [b"date", b"server", b"content-type", b"content-length", b"connection"]
        assert (await client.get("/version"))["version"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capsys.readouterr().err == ""


async def test_a_client_that_breaks_the_rest_of_a_refused_body_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with listening() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.replica.port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404 ")
        writer.write(b"ZZ\r\n")
        await writer.drain()
        writer.close()
        await client.get("/version")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("leaves_after", [0, 1])
async def test_a_client_that_resets_its_connection_leaves_nothing_but_free_blocks(
    leaves_after: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with listening() as client:
        body = json.dumps({"prompt": [5] * 400, "max_tokens": 2000, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", client.replica.port)
        writer.write(one_answer(HEAD, body.encode()))
        if leaves_after:
            await reader.readuntil(b"data: ")
        else:
            while not client.replica.drivers[0].choices:
                await asyncio.sleep(0.002)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        while client.replica.drivers[0].snapshot().used_blocks:
            await asyncio.sleep(0.002)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
async def test_a_packed_body_is_not_unpacked(coding: str) -> None:
    async with listening() as client:
        packed = gzip.compress(ASK.encode())
        answer = await raw(client, one_answer(f"{HEAD}Content-Encoding: {coding}\r\n", packed))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"There was an error parsing the body","type":"Bad Request"' in answer
        answer = await raw(client, one_answer(f"{HEAD}Content-Encoding: {coding}\r\n", b"abcd"))
        assert b'"param":"body.0"' in answer
        answer = await raw(client, one_answer(f"{HEAD}Content-Encoding: {coding}\r\n", ASK.encode()))
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_long_and_many_headers_are_taken() -> None:
    async with listening() as client:
        many = "".join(f"X-{at}: 1\r\n" for at in range(300))
        for extra in ("X-A: " + "a" * 100_000 + "\r\n", many):
            answer = await raw(client, one_answer(f"GET /version HTTP/1.1\r\nHost: x\r\n{extra}"))
            assert answer.startswith(b"HTTP/1.1 200 ")
        answer = await raw(client, one_answer(f"GET /version?{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_page_of_another_origin_may_ask_for_everything() -> None:
    async with serving("--api-key", "k") as client:
        asked = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
        wanted = {**asked, "Access-Control-Request-Headers": "authorization"}
        status, text, answer = await client.ask("OPTIONS", "/v1/completions", **wanted)
        assert (status, text) == (200, "OK")
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        _, _, answer = await client.ask("GET", "/metrics", Origin="http://a")
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        _, _, answer = await client.ask("GET", "/metrics")
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert (await client.ask("OPTIONS", "/v1/completions"))[0] == 401


async def test_a_path_with_one_slash_too_many_sends_the_client_on() -> None:
    async with serving() as client:
        async with client.session.get(f"{client.base}/version/?a=1", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, f"{client.base}/version?a=1")
        assert (await client.get("/metrics/")).startswith("# HELP")
        assert (await client.ask("GET", "/nowhere/"))[0] == 404
