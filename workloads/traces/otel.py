"""OpenTelemetry traces as inference-perf replays them: one JSON document a trace, a call tree of spans.

Only spans with `gen_ai.input.messages` are requests. What caused what is found in the text: a call whose messages
begin with an earlier call's messages and its answer goes on from it. The first one that does stays in the session; any
other opens a session that begins with the same text and waits for the answer which it quotes. Answers of further
calls that it quotes are waited for too, and are text of the trace, not of the live answer. Prompt lengths are
estimated from characters; answers have `gen_ai.usage.output_tokens` where it stands there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from workloads.spans import Span, prompt_tokens
from workloads.traces.forms import DocumentForm, Reading, convert
from workloads.traces.rows import Row, digest, text_spans, us


class _Span(msgspec.Struct):
    span_id: str
    start_time: str | int | float
    end_time: str | int | float
    attributes: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    trace_id: str
    spans: tuple[_Span, ...]


@dataclass(slots=True)
class _Call:
    """One request of the tree."""

    row: Row
    messages: tuple[str, ...]
    spoken: str
    start_us: int
    end_us: int
    prompt: tuple[Span, ...] = ()
    continued: bool = False


class Otel(DocumentForm):
    """`otel`."""

    name = "otel"

    def conversations(self, document: Any, line: int, reading: Reading) -> Iterator[list[Row]]:
        read = convert(document, _Trace, line, reading)
        calls = [call for span in read.spans if (call := _call(read, span, line, reading)) is not None]
        calls.sort(key=lambda call: call.start_us)
        sessions: list[list[Row]] = []
        place: dict[int, int] = {}
        for number, call in enumerate(calls):
            cause = _cause(calls[:number], call)
            if cause is None:
                call.prompt = _spans(call.messages, reading)
                row = replace(call.row, text=call.prompt, at_us=call.start_us)
            else:
                answer = cause.row.answer
                assert answer is not None
                heard = (*cause.prompt, answer)
                new = _spans(call.messages[len(cause.messages) + 1 :], reading)
                call.prompt = (*heard, *new)
                row = replace(call.row, text=new, pause_us=max(0, call.start_us - cause.end_us))
                row = replace(row, wait_for=_quoted(calls[:number], call, cause))
            row = replace(row, input_tokens=prompt_tokens(call.prompt))
            index = None if cause is None or cause.continued else place[id(cause)]
            if cause is not None:
                if cause.continued:
                    row = replace(row, context=heard, wait_for=(cause.row.name or "", *row.wait_for))
                cause.continued = True
            if index is None:
                index = len(sessions)
                sessions.append([])
            name = f"{read.trace_id}/{index}" if index else read.trace_id
            sessions[index].append(replace(row, session=name))
            place[id(call)] = index
        yield from sessions


def _cause(earlier: list[_Call], call: _Call) -> _Call | None:
    """The earlier call whose messages and answer this one quotes, the longest."""
    best: _Call | None = None
    for other in earlier:
        count = len(other.messages)
        if other.end_us > call.start_us or len(call.messages) <= count or not other.spoken:
            continue
        quoted = call.messages[:count] == other.messages and _text_of(call.messages[count]) == other.spoken
        if quoted and (best is None or count >= len(best.messages)):
            best = other
    return best


def _quoted(earlier: list[_Call], call: _Call, cause: _Call) -> tuple[str, ...]:
    """Names of the other calls whose answers this one quotes behind what it goes on from: they had to end first."""
    said = {_text_of(message) for message in call.messages[len(cause.messages) + 1 :]}
    return tuple(
        other.row.name or ""
        for other in earlier
        if other is not cause and other.spoken in said and other.end_us <= call.start_us
    )


def _call(read: _Trace, span: _Span, line: int, reading: Reading) -> _Call | None:
    """A span as a request; None for spans of other work."""
    attributes = span.attributes
    messages = attributes.get("gen_ai.input.messages")
    if messages is None:
        return None
    row = Row(
        path=reading.path,
        line=line,
        session=read.trace_id,
        input_tokens=0,
        output_tokens=1,
        name=f"{read.trace_id}/{span.span_id}",
        group=str(attributes.get("gen_ai.request.model", "")) or None,
    )
    try:
        parsed = json.loads(messages) if isinstance(messages, str) else messages
        said = tuple(json.dumps([str(m.get("role", "")), _plain(m)], ensure_ascii=False) for m in parsed)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise row.fault(f"gen_ai.input.messages of span {span.span_id} is not a JSON list of messages") from error
    spoken = _spoken(attributes)
    output = attributes.get("gen_ai.usage.output_tokens")
    if not isinstance(output, int) or output < 1:
        output = max(1, math.ceil(len(spoken) / reading.chars_per_token))
    if not said:
        reading.skip("call without messages")
        return None
    answer = (digest("otel answer", read.trace_id, span.span_id), output)
    row = replace(row, output_tokens=output, answer=answer)
    return _Call(row, said, spoken, _instant_us(span.start_time, row), _instant_us(span.end_time, row))


def _spoken(attributes: dict[str, Any]) -> str:
    text = attributes.get("gen_ai.output.text")
    if isinstance(text, str):
        return text
    messages = attributes.get("gen_ai.output.messages")
    try:
        parsed = json.loads(messages) if isinstance(messages, str) else messages
        return "".join(_plain(m) for m in parsed) if isinstance(parsed, list) else ""
    except (ValueError, AttributeError, RecursionError):
        return ""


def _plain(message: dict[str, Any]) -> str:
    """The text of a message; anything else in it counts as its JSON."""
    content = message.get("content", message.get("parts", ""))
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, sort_keys=True, ensure_ascii=False)
    pieces = []
    for part in content:
        text = part.get("text", part.get("content")) if isinstance(part, dict) else part
        pieces.append(text if isinstance(text, str) else json.dumps(part, sort_keys=True, ensure_ascii=False))
    return "".join(pieces)


def _text_of(said: str) -> str:
    text: str = json.loads(said)[1]
    return text


def _spans(said: tuple[str, ...], reading: Reading) -> tuple[Span, ...]:
    return tuple(span for message in said for span in text_spans(_text_of(message), reading.chars_per_token))


def _instant_us(value: str | float, row: Row) -> int:
    """ISO 8601, or nanoseconds since 1970."""
    if isinstance(value, str) and not value.isdigit():
        try:
            whole = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError as error:
            raise row.fault(f"time {value!r}: give ISO 8601, or nanoseconds since 1970") from error
        since = whole.timestamp() if whole.tzinfo else whole.replace(tzinfo=UTC).timestamp()
        return round(since * 1_000_000)
    return int(value) // 1000 if isinstance(value, str | int) else us(value, 1e-3)
