"""Requests per second that each of the ten trace forms is read at, beside parsing the same lines and nothing else.

    python benchmarks/trace_loaders.py [--requests 20000] [--turns 5] [--rounds 3]

Every form is written once: conversations of some turns whose prompts repeat what was said, interleaved by their times
where the form has sessions. Reading makes sessions of it, as a run and `analyze` do: the form is recognised, rows are
checked, block ids become spans. The baseline is `json.loads` of every line, or `csv.reader` over the file. Seconds are
those of CPU; rounds take turns and the best of each counts. Memory is the peak that Python allocates in one more round.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from workloads import TRACE_FORMATS, Streams, make_workload

GAP_S, EVERY_S = 30.0, 0.5
"""Between the turns of a conversation, and between the starts of two."""
FIRST, ADDED, ANSWER = 1500, 300, 150


@dataclass(frozen=True)
class Request:
    """One request as every writer tells it: turn `turn` of conversation `talk`."""

    talk: int
    turn: int
    at_s: float
    inputs: int
    output: int

    def ids(self, size: int, *, partial: bool) -> list[int]:
        full = self.inputs // size
        names = [self.talk << 20 | n for n in range(full)]
        if partial and self.inputs % size:  # as long as it is not full, the last block is another one each turn
            names.append(self.talk << 20 | 1 << 19 | self.turn)
        return names


def requests(count: int, turns: int) -> list[Request]:
    """In the order of their times."""
    rng = random.Random(1)
    made = []
    for talk in range(count // turns):
        inputs = rng.randint(FIRST // 2, FIRST * 3 // 2)
        for turn in range(turns):
            output = rng.randint(1, 2 * ANSWER)
            made.append(Request(talk, turn, talk * EVERY_S + turn * GAP_S, inputs, output))
            inputs += output + rng.randint(1, 2 * ADDED)
    return sorted(made, key=lambda request: request.at_s)


Rows = Iterator[dict[str, Any] | str]


def mooncake(made: list[Request]) -> Rows:
    for r in made:
        yield {"timestamp": round(r.at_s * 1000), "input_length": r.inputs, "output_length": r.output,
               "hash_ids": r.ids(512, partial=True)}  # fmt: skip


def dynamo(made: list[Request]) -> Rows:
    for r, row in zip(made, mooncake(made), strict=True):
        assert isinstance(row, dict)
        row |= {"session_id": f"s{r.talk}", "request_id": f"s{r.talk}-{r.turn}", "priority": 0}
        if r.turn:
            del row["timestamp"]
            row |= {"wait_for": [f"s{r.talk}-{r.turn - 1}"], "tool_wait_ms": 400}
        yield row


def mooncake_delta(made: list[Request]) -> Rows:
    before: dict[int, int] = {}
    for r in made:
        new = r.inputs - before.get(r.talk, 0)
        before[r.talk] = r.inputs + r.output
        row = {"session_id": f"s{r.talk}", "input_length": new, "output_length": r.output}
        row |= {"delay": 250} if r.turn else {"timestamp": round(r.at_s * 1000)}
        yield row | {"hash_ids": [r.talk << 20 | r.turn << 10 | n for n in range(-(-new // 512))]}


def recorded(made: list[Request]) -> Rows:
    for r in made:
        yield {
            "schema": "dynamo.request.trace.v1", "event_type": "request_end",
            "event_time_unix_ms": round((r.at_s + 2) * 1000), "agent_context": {"session_id": f"s{r.talk}"},
            "request": {
                "request_id": f"s{r.talk}-{r.turn}", "input_tokens": r.inputs, "output_tokens": r.output,
                "total_time_ms": 2000.0, "ttft_ms": 150.0,
                "replay": {"trace_block_size": 64, "input_length": r.inputs,
                           "input_sequence_hashes": r.ids(64, partial=False)},
            },
        }  # fmt: skip


def bailian(made: list[Request]) -> Rows:
    for r in made:
        chat = r.talk * 100 + r.turn
        yield {"chat_id": chat, "parent_chat_id": chat - 1 if r.turn else -1, "timestamp": r.at_s, "turn": r.turn + 1,
               "input_length": r.inputs, "output_length": r.output, "type": "text",
               "hash_ids": r.ids(16, partial=False)}  # fmt: skip


def azure(made: list[Request]) -> Rows:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    start = datetime(2023, 11, 16, 18, tzinfo=UTC)
    for r in made:
        yield f"{start + timedelta(seconds=r.at_s):%Y-%m-%d %H:%M:%S.%f}0,{r.inputs},{r.output}"


def burstgpt(made: list[Request]) -> Rows:
    yield "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    for r in made:
        yield f"{r.at_s},{r.talk},1.2,ChatGPT,{r.inputs},{r.output},{r.inputs + r.output},Conversation log"


def by_talk(made: list[Request]) -> Iterator[list[Request]]:
    talks: dict[int, list[Request]] = {}
    for r in made:
        talks.setdefault(r.talk, []).append(r)
    yield from talks.values()


def words(r: Request, tokens: int) -> str:
    """Text of about so many tokens, at 4 characters each."""
    return f"{r.talk:06d} {r.turn:03d} " * max(1, tokens * 4 // 11)


def sharegpt(made: list[Request]) -> Rows:
    for talk in by_talk(made):
        said = [{"from": who, "value": words(r, n)} for r in talk for who, n in (("human", ADDED), ("gpt", r.output))]
        yield {"id": f"c{talk[0].talk}", "conversations": said}


def weka(made: list[Request]) -> Rows:
    for talk in by_talk(made):
        asked = [
            {"t": r.at_s - talk[0].at_s, "type": "s", "model": "m", "in": r.inputs, "out": r.output, "api_time": 2.0,
             "think_time": 1.0, "hash_ids": r.ids(64, partial=False)}
            for r in talk
        ]  # fmt: skip
        yield {"id": f"c{talk[0].talk}", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": asked}


def otel(made: list[Request]) -> Rows:
    for talk in by_talk(made):
        messages: list[dict[str, str]] = []
        spans = []
        for r in talk:
            messages.append({"role": "user", "content": words(r, ADDED)})
            answer = words(r, r.output)
            spans.append(
                {"span_id": f"{r.turn}", "parent_span_id": None, "name": "chat",
                 "start_time": round(r.at_s * 1e9), "end_time": round((r.at_s + 2) * 1e9),
                 "attributes": {"gen_ai.request.model": "m", "gen_ai.input.messages": json.dumps(messages),
                                "gen_ai.output.text": answer, "gen_ai.usage.output_tokens": r.output}}
            )  # fmt: skip
            messages.append({"role": "assistant", "content": answer})
        yield {"trace_id": f"t{talk[0].talk}", "spans": spans}


WRITERS: dict[str, Callable[[list[Request]], Rows]] = {
    "azure": azure,
    "burstgpt": burstgpt,
    "dynamo": dynamo,
    "dynamo-request-trace": recorded,
    "mooncake": mooncake,
    "mooncake-delta": mooncake_delta,
    "otel": otel,
    "qwen-bailian": bailian,
    "sharegpt": sharegpt,
    "weka": weka,
}


def parse(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            for _ in csv.reader(file):
                pass
        else:
            for line in file:
                json.loads(line)


def load(path: Path, name: str) -> int:
    """Requests read; the form is recognised where its rows tell."""
    asked = name if name == "mooncake-delta" else "auto"
    workload = make_workload({"kind": "trace", "path": str(path), "format": asked})
    return sum(len(session.turns) for session in workload.sessions(Streams(0)))


def seconds(work: Callable[[], object]) -> float:
    """Of CPU, so that a busy machine makes no difference."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    assert set(WRITERS) == set(TRACE_FORMATS)
    made = requests(args.requests, args.turns)
    print(f"{len(made):,} requests in conversations of {args.turns}")
    print(f"{'':22}{'MB':>7}{'requests/s':>12}{'parsed/s':>12}{'ratio':>7}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, writer in sorted(WRITERS.items()):
            path = Path(folder) / (f"{name}.csv" if name in ("azure", "burstgpt") else f"{name}.jsonl")
            rows = (row if isinstance(row, str) else json.dumps(row) for row in writer(made))
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
            found = load(path, name)
            if found != len(made):
                raise SystemExit(f"{name}: {found} requests were read of {len(made)}")
            ours = parsed = float("inf")
            for _ in range(args.rounds):
                parsed = min(parsed, seconds(lambda path=path: parse(path)))
                ours = min(ours, seconds(lambda path=path, name=name: load(path, name)))
            tracemalloc.start()
            load(path, name)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            size = path.stat().st_size / 1e6
            rates = f"{found / ours:12,.0f}{found / parsed:12,.0f}{parsed / ours:7.2f}"
            print(f"{name:22}{size:7.1f}{rates}{peak / 1e6:9.1f}", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
