"""A replica started like the recorded server answers every recorded request alike.

`ROUTEBENCH_GOLDEN_HTTP` may name another folder of recordings; an empty one fails.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mock_engine.tests.http import probes
from mock_engine.tests.replica_process import Replica, free_ports, replica

OWN = Path(__file__).parent / "http"
OWN_NAMES = ("default.json", "full.json")
FOLDER = Path(os.environ.get("ROUTEBENCH_GOLDEN_HTTP") or OWN)
MODEL = FOLDER / "model" if (FOLDER / "model").is_dir() else OWN / "model"
FLAGS = (
    "--model", "/models/mymodel", "--served-model-name", "mymodel", "alias2", "--max-model-len", "256",
    "--block-size", "16", "--tokenizer", str(MODEL / "tokenizer.json"),
    "--chat-template", str(MODEL / "chat_template.jinja"), "--mock-preset", "llama-3.1-8b-h100",
)  # fmt: skip
FULL_FLAGS = ("--enable-prompt-tokens-details", "--enable-scale-out", "--enable-request-id-headers")
FULL_ENV = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def full() -> Iterator[Replica]:
    events, replay = free_ports(2)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv@127.0.0.1:8152@mymodel",
    }
    with replica(*FLAGS, *FULL_FLAGS, "--kv-events-config", json.dumps(config), env=FULL_ENV) as running:
        yield running


@pytest.fixture(scope="module")
def default() -> Iterator[Replica]:
    with replica(*FLAGS) as running:
        yield running


def recordings() -> list[str]:
    found = sorted(path.name for path in FOLDER.glob("*.json"))
    assert found, f"no recording in {FOLDER}"
    return found


@pytest.mark.parametrize("name", recordings())
def test_every_recorded_request_is_answered_alike(
    name: str, full: Replica, default: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((FOLDER / name).read_text())
    running = full if "full" in name else default
    different = probes.compare(running.url, recorded)
    assert not different, capsys.readouterr().out


@pytest.mark.parametrize("name", OWN_NAMES)
def test_recorded_error_messages_are_word_for_word_the_same(name: str, full: Replica, default: Replica) -> None:
    running = full if "full" in name else default
    for probe in json.loads((OWN / name).read_text()):
        wanted = probe["answer"].get("json")
        if not isinstance(wanted, dict) or "error" not in wanted:
            continue
        got = probes.ask(running.url, probe["method"], probe["path"], probe["body"], probe["headers"])
        assert got["json"] == wanted, probe["name"]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_every_object_of_an_answer_has_the_recorded_key_order(name: str, full: Replica, default: Replica) -> None:
    running = full if "full" in name else default
    for probe in json.loads((OWN / name).read_text()):
        wanted = probe["answer"]
        if probe["name"] in ("server info",) or wanted["status"] != 200:
            continue
        got = probes.ask(running.url, probe["method"], probe["path"], probe["body"], probe["headers"])
        for part in ("json", "events"):
            assert _keys(got.get(part)) == _keys(wanted.get(part)), probe["name"]


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _keys(entry)) for key, entry in value.items()]
    if isinstance(value, list):
        return [_keys(entry) for entry in value]
    return None


def _series(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Type and help lines, and vLLM's series without what depends on the machine."""
    heads = [line for line in text.splitlines() if line.startswith("# ")]
    rows = re.findall(r"^(vllm:[a-z_]+)(\{.*\}) ", text, re.MULTILINE)
    sizes = r'(num_gpu_blocks|kv_cache_size_tokens|kv_cache_max_concurrency)="[^"]*"'
    return heads, [(name, re.sub(sizes, r"\1", labels)) for name, labels in rows]


def test_metrics_have_the_recorded_names_types_labels_and_buckets(full: Replica) -> None:
    full.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
    wanted = _series((OWN / "metrics.txt").read_text())
    got = _series(full.get("/metrics"))
    assert got[0] == wanted[0]
    assert got[1] == wanted[1]
