"""Reading a streamed answer: bytes in, events out, and the token instants that follow from them.

Locust's own line iterator waits for 1 KiB blocks, so that a first token at 200 ms reads as one at 400; here every
event carries the instant at which its last byte was received. `EventParser` and `TokenMeter` are pure and know no
socket; `read_stream` is the thin loop that feeds them. A role chunk, a usage chunk or a keep-alive never counts as a
token; a chunk of empty text does, because the engine made a token for it.
"""

from __future__ import annotations

import time
from http.client import HTTPException
from typing import Any, NamedTuple

import msgspec

DONE = b"[DONE]"
RECEIVE_BYTES = 65_536
"""Most bytes taken from the socket at once; a token chunk has a few hundred."""

OK, ERROR, INCOMPLETE, CANCELLED = "ok", "error", "incomplete", "cancelled"
"""How a request ended. incomplete: an answer had been accepted (200) and did not come to its end."""

ERROR_CLASSES = {
    "engine_4xx": "an engine refused the request",
    "engine_5xx": "an engine failed before its answer began",
    "engine": "an engine gave up inside its answer (an error object, or finish_reason abort)",
    "router": "the address under test refused the request, could not be reached or hung up before it answered",
    "truncated": "the answer stopped without a finish_reason or [DONE]",
    "protocol": "the answer is no event stream that can be read (encoded, another type, broken chunks)",
    "answer": "the tokens are not the ones that the request's seed stands for",
    "timeout": "no end within the request's time limit",
    "client": "the load generator itself failed",
    "cut": "the run or the session ended first",
}
"""Every `error_class` of a row, by origin."""


class Event(NamedTuple):
    """One server-sent event."""

    data: bytes
    name: str = ""
    """`event:` field; empty when the server gave none."""


class EventParser:
    """Splits a body into events wherever its bytes were cut; LF, CRLF and CR end lines, comments are dropped."""

    __slots__ = ("_data", "_name", "_rest", "_skip_lf", "_started")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._name = ""
        self._skip_lf = False
        self._started = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that `chunk` completes."""
        # The usual case, one whole event in one piece, without looking at lines.
        if (
            not self._rest
            and not self._data
            and not self._skip_lf
            and self._started
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n") == len(chunk) - 2
            and b"\r" not in chunk
        ):
            return [Event(chunk[6:-2])]
        return self._feed_lines(chunk)

    def close(self) -> list[Event]:
        """The body ended. An event without its empty line is dropped, as the standard says, except a last `[DONE]`,
        which some servers send bare."""
        if self._rest.rstrip(b"\r\n"):
            self._line(self._rest)
        self._rest = b""
        return [Event(DONE)] if self._data == [DONE] else []

    def _feed_lines(self, chunk: bytes) -> list[Event]:
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        text = self._rest + chunk
        if not self._started:
            if b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(b"\xef\xbb\xbf")
            self._started = True
        if text.endswith(b"\r"):
            self._skip_lf = True
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        events = []
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                events.append(Event(b"\n".join(self._data), self._name))
                self._data = []
                self._name = ""
            else:
                self._name = ""
        return events

    def _line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
"""Only the fields that count are built, at about a microsecond a chunk."""


class TokenMeter:
    """Everything a row says about one answer, from its events in order.

    Instants are those of one monotonic clock, nanoseconds. `keep_ids` and `keep_text` hold on to the answer itself.
    """

    __slots__ = (
        "_text",
        "bytes",
        "cached_tokens",
        "chunks",
        "content_ns",
        "done",
        "error",
        "finish_reason",
        "first_ids",
        "first_ns",
        "first_usage",
        "gaps_ns",
        "keep_ids",
        "keep_text",
        "last_ns",
        "prompt_tokens",
        "response_id",
        "second_ns",
        "token_ids",
        "usage_tokens",
    )

    def __init__(self, *, keep_ids: bool = False, keep_text: bool = False) -> None:
        self.keep_ids = keep_ids
        self.keep_text = keep_text
        self.response_id: str | None = None
        self.first_ns: int | None = None
        self.second_ns: int | None = None
        self.content_ns: int | None = None
        """First token of the answer itself, reasoning left out."""
        self.first_ids: int | None = None
        """Ids in the first token chunk, and the count that came with it, if the server gave them."""
        self.first_usage: int | None = None
        self.last_ns: int | None = None
        self.gaps_ns: list[int] = []
        self.chunks = 0
        """Chunks that brought tokens."""
        self.bytes = 0
        self.usage_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        """None when the engine does not say; 0 when it says none."""
        self.finish_reason: str | None = None
        self.done = False
        self.error: tuple[str, str] | None = None
        """(error class, message) of what the stream itself reported."""
        self.token_ids: list[int] | None = None
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def output_tokens(self) -> int:
        """Best count there is; `token_source` tells which."""
        if self.usage_tokens is not None:
            return self.usage_tokens
        return len(self.token_ids) if self.token_ids is not None else self.chunks

    @property
    def first_chunk_tokens(self) -> int | None:
        """By its ids, by the count that came with it, or 1 where there are as many chunks as tokens."""
        if self.first_ids is not None or self.first_usage is not None:
            return self.first_ids if self.first_ids is not None else self.first_usage
        return 1 if self.chunks and self.usage_tokens == self.chunks else None

    @property
    def token_source(self) -> str | None:
        """`usage`: the engine's own count. `token_ids`: counted from ids. `chunks`: one a chunk, may be too few."""
        if self.usage_tokens is not None:
            return "usage"
        if self.token_ids is not None:
            return "token_ids"
        return "chunks" if self.chunks else None

    def event(self, event: Event, at_ns: int) -> None:
        """Takes one event that was complete at `at_ns`."""
        if self.done or self.error:
            return
        if event.data == DONE:
            self.done = True
            return
        try:
            chunk = _decode(event.data)
        except msgspec.MsgspecError as broken:
            self.error = ("protocol", f"a chunk is no completion's JSON: {broken}; it reads {_head(event.data)}")
            return
        if chunk.error is not None or event.name == "error":
            self.error = ("engine", f"error inside the answer: {error_text(event.data)}")
            return
        if self.response_id is None:
            self.response_id = chunk.id
        usage, before = chunk.usage, self.usage_tokens
        if usage is not None:
            self._take_usage(usage)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if usage is not None and usage.completion_tokens is not None and usage.completion_tokens <= (before or 0):
            return
        if _brings_token(choice):
            self._token(choice, at_ns)

    def _take_usage(self, usage: _Usage) -> None:
        # Cumulative, so the last one that says something wins.
        if usage.completion_tokens is not None:
            self.usage_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _token(self, choice: _Choice, at_ns: int) -> None:
        self.chunks += 1
        delta = choice.delta
        if self.content_ns is None and (delta is None or not (delta.reasoning or delta.reasoning_content)):
            self.content_ns = at_ns
        if self.last_ns is None:
            self.first_ns, self.first_usage = at_ns, self.usage_tokens
            self.first_ids = len(choice.token_ids) if choice.token_ids else None
        else:
            if self.second_ns is None:
                self.second_ns = at_ns
            self.gaps_ns.append(at_ns - self.last_ns)
        self.last_ns = at_ns
        if self.keep_ids and choice.token_ids:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids.extend(choice.token_ids)
        if self.keep_text:
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._text.append(text)

    def verdict(self) -> tuple[str, str | None, str | None]:
        """(status, error class, message) of an answer whose stream ended by itself.

        Success takes all of: a finish_reason or [DONE], no error object, at least one token.
        """
        if self.error:
            return INCOMPLETE, *self.error
        if self.finish_reason == "abort":
            return INCOMPLETE, "engine", f"the engine aborted the request after {self.output_tokens} tokens"
        if not self.done and self.finish_reason is None:
            return (
                INCOMPLETE,
                "truncated",
                (f"the stream ended after {self.chunks} token chunks without a finish_reason or [DONE]"),
            )
        if not self.chunks:
            return INCOMPLETE, "truncated", "the stream ended properly but brought no token"
        return OK, None, None


def _brings_token(choice: _Choice) -> bool:
    if choice.token_ids is not None:
        return bool(choice.token_ids)
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or (choice.text is not None and choice.finish_reason != "abort")
    if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
        return True
    empty = delta.content is not None or delta.reasoning is not None or delta.reasoning_content is not None
    return empty and delta.role is None and choice.finish_reason != "abort"


def error_text(body: bytes) -> str:
    """The message of an OpenAI-style error body, or the beginning of whatever it is."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return _head(body)
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:500]
    return _head(body)


def is_engine_error(body: bytes) -> bool:
    """Whether an HTTP error body has the engine's form: an `error` object with message, type and code."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return False
    error = found.get("error") if isinstance(found, dict) else None
    return isinstance(error, dict) and {"message", "type", "code"} <= error.keys()


def _head(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


class BrokenStreamError(Exception):
    """The connection ended inside an answer."""


def read_stream(raw: Any, meter: TokenMeter) -> int:
    """Reads a geventhttpclient response to its end into `meter`; returns the instant of the end, nanoseconds.

    Takes whatever the socket has as soon as it has something. Raises BrokenStreamError when the connection ends before
    the body does, and what the socket raises otherwise; `meter` then holds what came before.
    """
    parser = EventParser()
    feed, event, clock = parser.feed, meter.event, time.monotonic_ns
    body, sock = raw._body_buffer, raw._sock
    now = clock()
    try:
        while True:
            if body:
                data = bytes(body)
                body.clear()
                meter.bytes += len(data)
                for found in feed(data):
                    event(found, now)
            if raw.message_complete:
                break
            received = sock.recv(RECEIVE_BYTES)
            now = clock()
            _into(raw, received)
    finally:
        raw.release()
    for found in parser.close():
        event(found, now)
    return now


def _into(raw: Any, received: bytes) -> None:
    """Through the HTTP parser; an end of the connection that is not the end of the body is an error."""
    try:
        raw.feed(received)
    except HTTPException as broken:
        raise BrokenStreamError(str(broken) or "the HTTP framing is broken") from broken
    if not received and not raw.message_complete:
        raise BrokenStreamError("the connection was closed inside the answer")
