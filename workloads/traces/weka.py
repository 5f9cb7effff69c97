"""Weka/AgentX coding traces: one JSON document a conversation, with nested sub-agents.

Blocks have 64 tokens unless the file says otherwise, and only full ones have an id: the partial block at the end is
text of its own. With `hash_id_scope` "local" (or none, as first published) ids mean nothing in another conversation.
Times are seconds since the conversation began and say nothing about when it came, so slots take the conversations.
A pause is `think_time`, or the gap since the answer before, as `t` and `api_time` tell. A sub-agent starts when the
request before it was answered; the caller's next request waits for it. Inside one, `t` counts from its own start in
the specification and from the conversation's in newer captures; only differences are used, so both read alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from workloads.traces.forms import DocumentForm, Reading, convert
from workloads.traces.rows import Row, us

BLOCK_SIZE = 64


class _Request(msgspec.Struct):
    type: str
    t: float = 0.0
    inputs: int = msgspec.field(default=0, name="in")
    outputs: int = msgspec.field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str | None = None
    requests: tuple[_Request, ...] = ()


class _Conversation(msgspec.Struct):
    id: str
    requests: tuple[_Request, ...]
    block_size: int = BLOCK_SIZE
    hash_id_scope: str = "local"


class Weka(DocumentForm):
    """`weka`."""

    name = "weka"

    def conversations(self, document: Any, line: int, reading: Reading) -> Iterator[list[Row]]:
        read = convert(document, _Conversation, line, reading)
        yield from _Walk(read, line, reading).session(read.id, read.requests, ())


class _Walk:
    def __init__(self, read: _Conversation, line: int, reading: Reading) -> None:
        self._line, self._reading = line, reading
        self._scope = "" if read.hash_id_scope == "global" else read.id
        self._block_size = reading.block_size or read.block_size

    def session(self, name: str, requests: tuple[_Request, ...], after: tuple[str, ...]) -> list[list[Row]]:
        """The rows of a conversation, then those of its sub-agents."""
        rows: list[Row] = []
        subs: list[list[Row]] = []
        before: _Request | None = None
        caller = after
        for request in requests:
            if request.type == "subagent":
                label = f"{name}/{request.agent_id or 'sub'}-{len(subs)}"
                nested = self.session(label, request.requests, caller)
                if nested:
                    subs += nested
                    after = (*after, nested[0][-1].name or "")
                continue
            if self._reading.failed(self._line, request.inputs, request.outputs):
                continue
            rows.append(
                Row(
                    path=self._reading.path,
                    line=self._line,
                    session=name,
                    input_tokens=request.inputs,
                    output_tokens=request.outputs,
                    hash_ids=request.hash_ids,
                    block_size=self._block_size,
                    scope=self._scope,
                    pause_us=us(_pause_s(before, request), 1e6),
                    name=f"{name}#{len(rows)}",
                    wait_for=after,
                )
            )
            caller, after, before = (f"{name}#{len(rows) - 1}",), (), request
        return [rows, *subs] if rows else subs


def _pause_s(before: _Request | None, request: _Request) -> float:
    if before is None:
        return 0.0
    if request.think_time is not None:
        return max(0.0, request.think_time)
    return max(0.0, request.t - before.t - (before.api_time or 0.0))
