"""`dynamo.request.trace.v1`: what a Dynamo frontend recorded, request by request at their ends, with tool events.

Arrival is `request_received_ms`, or the end less `total_time_ms`; what lies between an answer's end and the next
arrival of a session is its pause, and where arrivals are unknown the tools' own durations are. Ids come from
`request.replay`; without it prompts are text of their own per session, so only history is shared. Recordings with and
without `agent_context` may not be mixed, as nobody could say what their rows have in common.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from workloads.errors import TraceError
from workloads.traces.forms import LineForm, Reading, decode
from workloads.traces.index import Member
from workloads.traces.rows import Row, digest, us

SCHEMA = "dynamo.request.trace.v1"


class _Agent(msgspec.Struct):
    session_id: str
    parent_session_id: str | None = None


class _Replay(msgspec.Struct):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: tuple[int, ...]


class _Request(msgspec.Struct):
    request_id: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    request_received_ms: float | None = None
    total_time_ms: float | None = None
    replay: _Replay | None = None


class _Tool(msgspec.Struct):
    duration_ms: float | None = None


class _Event(msgspec.Struct):
    schema: str
    event_type: str
    event_time_unix_ms: float
    agent_context: _Agent | None = None
    request: _Request | None = None
    tool: _Tool | None = None


class _Wrapped(msgspec.Struct):
    """Some sinks put the event into an envelope."""

    event: _Event | None = None


class Recorded(LineForm):
    """`dynamo-request-trace`."""

    name = "dynamo-request-trace"

    def __init__(self) -> None:
        self._contextual: bool | None = None

    def begin(self, first_line: bytes, reading: Reading) -> bool:
        self._contextual = None
        return False

    def member(self, line: bytes, number: int, reading: Reading) -> Member | None:
        event = self._event(line, number, reading)
        request = event.request
        if event.event_type == "request_end":
            contextual = event.agent_context is not None
            if self._contextual not in (None, contextual):
                raise TraceError(
                    f"{reading.path}:{number}",
                    "requests with and without agent_context are mixed: split the recording into one file of each",
                )
            self._contextual = contextual
        return Member(
            session=digest(_session(event, number)),
            at_us=None if event.event_type != "request_end" or request is None else us(_arrival(event, request), 1000),
        )

    def rows(self, session: list[tuple[int, bytes]], reading: Reading) -> list[Row]:
        rows: list[Row] = []
        ended_ms: float | None = None
        tools_ms = 0.0
        for number, line in session:
            event = self._event(line, number, reading)
            request = event.request
            if event.event_type in ("tool_end", "tool_error") and event.tool is not None:
                tools_ms += event.tool.duration_ms or 0.0
            if event.event_type != "request_end":
                continue
            if request is None:
                raise TraceError(f"{reading.path}:{number}", "request_end has no request: its lengths are needed")
            row = self._row(event, request, number, reading)
            if row is None:
                continue
            if ended_ms is not None:
                known = request.request_received_ms is not None or request.total_time_ms is not None
                pause_ms = _arrival(event, request) - ended_ms if known else tools_ms
                row = replace(row, pause_us=max(0, us(pause_ms, 1000)))
            rows.append(row)
            ended_ms, tools_ms = event.event_time_unix_ms, 0.0
        return rows

    def _row(self, event: _Event, request: _Request, number: int, reading: Reading) -> Row | None:
        replay = request.replay
        inputs = replay.input_length if replay is not None else request.input_tokens
        if not inputs or not request.output_tokens:
            reading.skip("request without input or output tokens")
            return None
        return Row(
            path=reading.path,
            line=number,
            session=_session(event, number),
            input_tokens=inputs,
            output_tokens=request.output_tokens,
            hash_ids=None if replay is None else replay.input_sequence_hashes,
            block_size=0 if replay is None else replay.trace_block_size,
            at_us=us(_arrival(event, request), 1000),
            group=None if event.agent_context is None else event.agent_context.parent_session_id,
        )

    def _event(self, line: bytes, number: int, reading: Reading) -> _Event:
        wrapped = decode(line, _Wrapped, number, reading).event if line.startswith(b'{"event"') else None
        event = wrapped or decode(line, _Event, number, reading)
        if event.schema != SCHEMA:
            raise TraceError(f"{reading.path}:{number}", f"schema is {event.schema!r}: only {SCHEMA} is read")
        return event


def _session(event: _Event, number: int) -> str:
    if event.agent_context is not None:
        return event.agent_context.session_id
    return f"request-{event.request.request_id}" if event.request is not None else f"row{number}"


def _arrival(event: _Event, request: _Request) -> float:
    """Milliseconds."""
    if request.request_received_ms is not None:
        return request.request_received_ms
    return event.event_time_unix_ms - (request.total_time_ms or 0.0)
