"""Readers are streams: what they hold does not grow with the text of a trace."""

import json
import tracemalloc
from itertools import count, islice

import pytest

from workloads import Streams, make_workload

MEGABYTES = 20
HELD_MAX = 8 << 20
"""Generous: chunks, one conversation and the index. A reader that keeps lines, rows or sessions needs more."""
FILLER = "x" * 4000
"""A field that nobody reads: it makes the file large without making the test slow."""


def grow(path, rows):
    """Writes rows until the file is large enough."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            size += file.write(row)
            if size > MEGABYTES << 20:
                return


def mooncake(sessions):
    for number in count():
        ids = list(range(number * 50, (number + 1) * 50))
        row = {"timestamp": number, "input_length": 512 * 50, "output_length": 5, "hash_ids": ids, "extra": FILLER}
        if sessions:
            row["session_id"] = f"s{number % sessions}"
        yield json.dumps(row) + "\n"


def sharegpt():
    yield "["
    for number in count():
        said = [{"from": who, "value": f"{number} " * 20, "extra": FILLER} for who in ("human", "gpt") * 4]
        yield json.dumps({"id": str(number), "conversations": said}) + ",\n"


def weka():
    for number in count():
        requests = [
            {"t": float(n), "type": "s", "in": 64 * (n + 1), "out": 4, "hash_ids": list(range(n + 1)), "extra": FILLER}
            for n in range(10)
        ]
        yield json.dumps({"id": f"c{number}", "block_size": 64, "requests": requests}, indent=1) + "\n"


FORMS = {
    "alone": lambda: mooncake(0),
    "interleaved": lambda: mooncake(400),
    "array": sharegpt,
    "documents": weka,
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_large_trace_is_not_held_in_memory(tmp_path, form):
    path = tmp_path / ("trace.json" if form in ("array", "documents") else "trace.jsonl")
    grow(path, FORMS[form]())
    if form == "array":
        with path.open("rb+") as file:
            file.seek(-2, 2)
            file.write(b"]\n")
    sessions = make_workload({"kind": "trace", "path": str(path)}).sessions(Streams(0))
    tracemalloc.start()
    try:
        found = sum(1 for _ in sessions)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found >= 400
    assert peak < HELD_MAX


ROWS = 200_000
LINE_BYTES_MAX = 100
"""The index holds 60 bytes a line, 90 for a moment."""


def test_the_index_of_two_hundred_thousand_interleaved_rows_is_small_whatever_their_text(tmp_path):
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            row = f'"timestamp":{number},"input_length":600,"output_length":5,"hash_ids":[{number},1]'
            file.write(f'{{"session_id":"s{number % 20_000}",{row},"extra":"{"x" * 100}"}}\n')
    sessions = make_workload({"kind": "trace", "path": str(path)}).sessions(Streams(0))
    tracemalloc.start()
    try:
        taken = list(islice(sessions, 500))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(len(session.turns) == 10 for session in taken)
    assert peak < ROWS * LINE_BYTES_MAX + HELD_MAX
