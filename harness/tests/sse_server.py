"""A scripted HTTP server for tests of the load generator: every byte and pause of an answer is chosen by the test.

It runs in a thread on a loopback port of its own. A script takes the request and returns parts of a raw answer; a
number is a pause in milliseconds, bytes leave as one write, None closes the connection there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from workloads import token_ids

Part = bytes | float | int | None
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def completion(text: str = " a", **choice: Any) -> dict[str, Any]:
    """A chunk of `/v1/completions` as vLLM sends it."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "token_ids": None,
                **choice,
            }
        ],
        "kv_transfer_params": None,
    }


def chat(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """A chunk of `/v1/chat/completions`."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}],
    }


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": counts}


@dataclass
class Request:
    """One received request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int
    """Counts from 0 over all requests of the server."""


Script = Callable[[Request], Sequence[Part] | Iterator[Part]]


def honest(request: Request) -> Iterator[Part]:
    """Answers as one of our replicas would: the tokens that the seed stands for, one a chunk, without pauses."""
    body = request.body
    tokens = body["max_tokens"]
    prompt = body.get("prompt") or body.get("messages")
    ids = token_ids(body["seed"], 0, tokens).tolist()
    wanted = body.get("return_token_ids", False)
    yield HEAD
    for k in range(tokens):
        finish = "length" if k == tokens - 1 else None
        if "messages" in body:
            yield http_chunk(event(chat({"content": f" w{ids[k]}"}, finish_reason=finish)))
        else:
            yield http_chunk(
                event(completion(f" w{ids[k]}", finish_reason=finish, token_ids=[ids[k]] if wanted else None))
            )
    yield http_chunk(event(usage(len(prompt or ""), tokens, cached=0)))
    yield http_chunk(DONE) + END


@dataclass
class SseServer:
    """Handle of a running server."""

    url: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def serve(script: Script) -> Iterator[SseServer]:
    """Runs a server until the block ends; connections still open are cut."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        handle = SseServer("")
        connections: set[asyncio.Task[None]] = set()

        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                while await _exchange(reader, writer, handle, script):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        handle.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        state.update(handle=handle, stop=asyncio.Event(), loop=asyncio.get_running_loop())
        ready.set()
        await state["stop"].wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield state["handle"]
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(10)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: SseServer, script: Script
) -> bool:
    """One request and its answer; False when the connection is over."""
    head = await reader.readuntil(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {}
    for text in fields:
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    request = Request(line.split(" ")[1], headers, msgspec.json.decode(body or b"{}"), len(handle.requests))
    handle.requests.append(request)
    for part in script(request):
        if part is None:
            return False
        if isinstance(part, bytes):
            writer.write(part)
            await writer.drain()
        else:
            await asyncio.sleep(part / 1000)
    return True
