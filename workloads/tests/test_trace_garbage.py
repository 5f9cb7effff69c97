"""Files that are no trace, cut, of bytes that are no text or without an end: each is refused with its file and line."""

import json

import pytest

from workloads import Streams, TraceError, make_workload
from workloads.traces import files
from workloads.traces.files import lines
from workloads.traces.index import Index, Member

CHAT = {"id": "c", "conversations": [{"from": "human", "value": "hello " * 40}, {"from": "gpt", "value": "hi"}]}
ROW = {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}
ARRAY = json.dumps([CHAT] * 3_000).encode()
CHATS = (json.dumps(CHAT).encode() + b"\n") * 3_000
ROWS = (json.dumps(ROW).encode() + b"\n") * 3
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "line", "why"),
    [
        ("a.json", ARRAY[: len(ARRAY) // 2] + b"\xff\xfe" + ARRAY[len(ARRAY) // 2 :], 1, "not UTF-8"),
        ("a.json", json.dumps(CHAT).encode().replace(b"hello", b"he\xffo", 1), 1, "not UTF-8"),
        ("a.jsonl", CHATS + b"\xff\xfe\n", 3_001, "not UTF-8"),
        ("a.jsonl", CHATS.replace(b"hello", b"he\xffo", 1), 1, "not UTF-8"),
        ("a.json", DEEP, 1, "nesting"),
        ("a.json", b'{"conversations": ' + DEEP, 1, "nesting"),
        ("a.jsonl", ROWS + b'{"hash_ids": ' + DEEP, 4, "nesting"),
        ("a.json", b'{"conversations": ' + b"9" * 6_000 + b"}", 1, "digits"),
        ("a.json", b'{"trace_id": "t", "spans": [{"span_id": "a", "start_time": 1, "end_time": 2, "attributes": '
         b'{"gen_ai.input.messages": "' + DEEP + b'"}}]}', 1, "JSON list"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_its_line(tmp_path, name, content, line, why):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=why) as told:
        list(make_workload({"kind": "trace", "path": str(path)}).sessions(Streams(1)))
    assert str(told.value).startswith(f"{path}:{line}: ")


def test_a_line_without_an_end_is_refused_when_it_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_BYTES_MAX", 1_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" + b"y" * 5_000)
    with pytest.raises(TraceError, match=r"a\.jsonl:2: a line of more than"):
        list(lines(path))


def test_a_line_that_grew_between_two_readings_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("workloads.traces.index.LINE_BYTES_MAX", 1_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"y" * 5_000)
    index = Index(path)
    index.add(0, 1, Member(session=1))
    assert len(index.read([0])[0][1]) == 1_000
