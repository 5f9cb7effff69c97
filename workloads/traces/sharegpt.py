"""ShareGPT: conversations as text, in one JSON array or one a line.

Every turn of the person is a request, every answer of the model its answer; lengths are estimated from characters.
What the model says first, before anybody asked, is left out, and a question that nobody answered ends nothing: it is
joined with the next. There are no times, so slots take the sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from workloads.spans import Span, prompt_tokens
from workloads.traces.forms import DocumentForm, Reading, convert
from workloads.traces.rows import Row, text_spans

MODEL = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard", "model"})


class _Message(msgspec.Struct):
    sender: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: tuple[_Message, ...]
    id: str | int | None = None


class ShareGpt(DocumentForm):
    """`sharegpt`."""

    name = "sharegpt"

    def conversations(self, document: Any, line: int, reading: Reading) -> Iterator[list[Row]]:
        read = convert(document, _Conversation, line, reading)
        rows: list[Row] = []
        asked: tuple[Span, ...] = ()
        tokens = 0
        for message in read.conversations:
            spans = text_spans(message.value, reading.chars_per_token)
            if message.sender not in MODEL:
                asked += spans
                continue
            if not asked or not message.value:
                continue
            answer_tokens = max(1, math.ceil(len(message.value) / reading.chars_per_token))
            tokens += prompt_tokens(asked)
            rows.append(
                Row(
                    path=reading.path,
                    line=line,
                    session=f"line{line}" if read.id is None else str(read.id),
                    input_tokens=tokens,
                    output_tokens=answer_tokens,
                    text=asked,
                )
            )
            tokens += answer_tokens
            asked = ()
        if rows:
            yield rows
        else:
            reading.skip("conversation without a question that was answered")
