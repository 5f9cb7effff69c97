"""Qwen-Bailian rows: a tree of chats, blocks of 16 tokens.

`parent_chat_id` names the chat that a row goes on from, -1 begins one. The first row that goes on from a chat stays in
its session; any other opens a session that begins with the same text. Its publishers salt-hash each block of 16
tokens; whether a partial block at the end counts is not stated, so both are taken.
"""

from __future__ import annotations

import msgspec

from workloads.traces.forms import LineForm, Reading, decode
from workloads.traces.index import Member
from workloads.traces.rows import Row, us

BLOCK_SIZE = 16


class _Line(msgspec.Struct):
    chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    parent_chat_id: int = -1
    type: str | None = None


class _Head(msgspec.Struct):
    chat_id: int
    timestamp: float
    parent_chat_id: int = -1


class Bailian(LineForm):
    """`qwen-bailian`."""

    name = "qwen-bailian"

    def member(self, line: bytes, number: int, reading: Reading) -> Member | None:
        head = decode(line, _Head, number, reading)
        return Member(session=head.chat_id, parent=head.parent_chat_id, at_us=us(head.timestamp, 1e6))

    def rows(self, session: list[tuple[int, bytes]], reading: Reading) -> list[Row]:
        rows: list[Row] = []
        name = ""
        for number, line in session:
            read = decode(line, _Line, number, reading)
            name = name or f"chat{read.chat_id}"
            if reading.failed(number, read.input_length, read.output_length):
                continue
            rows.append(
                Row(
                    path=reading.path,
                    line=number,
                    session=name,
                    input_tokens=read.input_length,
                    output_tokens=read.output_length,
                    hash_ids=read.hash_ids,
                    block_size=reading.block_size or BLOCK_SIZE,
                    at_us=us(read.timestamp, 1e6),
                    group=read.type,
                )
            )
        return rows
