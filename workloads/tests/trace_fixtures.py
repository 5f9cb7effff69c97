"""Fixtures of every trace form, and how tests write and read a trace."""

import json
from pathlib import Path

from workloads import Streams, make_workload, prompt_tokens

DATA = Path(__file__).parent / "data"
MOON = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def load(path, seed=1, **options):
    return list(make_workload({"kind": "trace", "path": str(path), **options}).sessions(Streams(seed)))


def written(folder, text, name="trace.jsonl"):
    path = folder / name
    if not isinstance(text, str):
        text = "".join(json.dumps(row) + "\n" for row in text)
    path.write_text(text, encoding="utf-8")
    return path


def lengths(sessions):
    return [[(prompt_tokens(prompt), turn.output[1]) for turn, prompt in s.prompts()] for s in sessions]


FIXTURES = {
    "azure.csv": ("azure", [[(820, 35)], [(96, 210)]], [0, 350_000]),
    "azure-2024.csv": ("azure", [[(2162, 5)], [(2399, 6)]], [0, 20_070]),
    "burstgpt-old.csv": ("burstgpt", [[(400, 90)]], [0]),
    "burstgpt-new.csv": ("burstgpt", [[(400, 90), (520, 30)]], [0]),
    "dynamo.jsonl": ("dynamo", [[(600, 30), (700, 9)]], [0]),
    "dynamo-request-trace.jsonl": ("dynamo-request-trace", [[(600, 30)]], [0]),
    "mooncake.jsonl": ("mooncake", [[(1100, 40)], [(1600, 12)]], [0, 850_000]),
    "mooncake-delta.jsonl": ("mooncake-delta", [[(600, 30), (700, 9)]], [0]),
    "otel.json": ("otel", [[(7, 3), (12, 4)]], [0]),
    "qwen-bailian.jsonl": ("qwen-bailian", [[(32, 8), (64, 9)]], [0]),
    "sharegpt.json": ("sharegpt", [[(1, 2)], [(1, 1)]], [None, None]),
    "weka.json": ("weka", [[(150, 20)]], [None]),
}
