"""Mooncake rows, our native form, with what Dynamo adds: sessions, delays and a graph of what waits for what; and a
`cache_salt`, which keeps the blocks of tenants apart.

`timestamp` and `delay` are milliseconds; ids are global; a partial block at the end has an id. Rows without
`session_id` are requests of their own. In a session, later rows wait for the answer before: then `delay` and
`tool_wait_ms` pass, or without any of them the row's own `timestamp` comes. `wait_for` names rows by `request_id`.
In `mooncake-delta`, rows after a session's first hold only what is new; the form cannot be told from its rows, so it
must be asked for.
"""

from __future__ import annotations

import msgspec

from workloads.traces.forms import LineForm, Reading, decode
from workloads.traces.index import Member
from workloads.traces.rows import Row, digest, us

BLOCK_SIZE = 512


class _Line(msgspec.Struct):
    """The fields that matter here, with the names that other writers use for them."""

    timestamp: float | None = None
    created_time: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    session_id: str | int | None = None
    delay: float | None = None
    delay_ms: float | None = None
    request_id: str | int | None = None
    wait_for: tuple[str | int, ...] = ()
    prefix_reset: bool | None = None
    tool_wait_ms: float | None = None
    cache_salt: str | None = None


class _Head(msgspec.Struct):
    """What the index needs of a line."""

    timestamp: float | None = None
    created_time: float | None = None
    session_id: str | int | None = None
    request_id: str | int | None = None
    wait_for: tuple[str | int, ...] = ()


class Mooncake(LineForm):
    """`mooncake` and `dynamo`; `mooncake-delta` with `delta`."""

    def __init__(self, name: str = "mooncake", *, delta: bool = False) -> None:
        self.name = name
        self._delta = delta

    def member(self, line: bytes, number: int, reading: Reading) -> Member | None:
        head = decode(line, _Head, number, reading)
        if head.session_id is None and not head.wait_for and head.request_id is None:
            return None
        at = head.timestamp if head.timestamp is not None else head.created_time
        return Member(
            session=digest(_session(head.session_id, head.request_id, number)),
            at_us=None if at is None else us(at, 1000),
            name=None if head.request_id is None else digest(str(head.request_id)),
        )

    def rows(self, session: list[tuple[int, bytes]], reading: Reading) -> list[Row]:
        rows = [self._row(number, line, i, reading) for i, (number, line) in enumerate(session)]
        for row in rows:
            if row.cache_salt != rows[0].cache_salt:
                raise row.fault(
                    f"cache_salt = {row.cache_salt!r} in a session that began with {rows[0].cache_salt!r}: its history "
                    "would be another tenant's; give all rows of a session one salt"
                )
        return rows

    def _row(self, number: int, line: bytes, i: int, reading: Reading) -> Row:
        read = decode(line, _Line, number, reading)
        inputs = read.input_length if read.input_length is not None else read.input_tokens
        outputs = read.output_length if read.output_length is not None else read.output_tokens
        at = read.timestamp if read.timestamp is not None else read.created_time
        delays = [d for d in (read.delay, read.delay_ms, read.tool_wait_ms) if d is not None]
        row = Row(
            path=reading.path,
            line=number,
            session=_session(read.session_id, read.request_id, number),
            input_tokens=inputs or 0,
            output_tokens=outputs or 0,
            hash_ids=read.hash_ids,
            block_size=reading.block_size or BLOCK_SIZE,
            only_new=self._delta and i > 0,
            restart=bool(read.prefix_reset),
            at_us=None if at is None else us(at, 1000),
            pause_us=us(sum(delays), 1000) if delays else None,
            name=None if read.request_id is None else str(read.request_id),
            wait_for=tuple(map(str, read.wait_for)),
            cache_salt=read.cache_salt,
        )
        if inputs is None or outputs is None:
            missing = "input_length" if inputs is None else "output_length"
            raise row.fault(f"has no {missing}: rows of this form need input_length and output_length (tokens)")
        if inputs < (0 if row.only_new else 1) or outputs < 1:
            raise row.fault(
                f"input_length = {inputs} and output_length = {outputs}: a request has at least 1 token of each"
            )
        if read.cache_salt == "":
            raise row.fault("cache_salt is empty, which engines refuse: leave it out for none")
        if any(delay < 0 for delay in delays):
            raise row.fault(f"a wait of {min(delays):g} ms: times go forward, give 0 or more")
        return row


def _session(session_id: str | int | None, request_id: str | int | None, number: int) -> str:
    if session_id is not None:
        return str(session_id)
    return f"row{number}" if request_id is None else f"request-{request_id}"
