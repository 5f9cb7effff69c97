"""Real peers in front of real mock replicas, every one a process; all end with the block that started them."""

import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from harness.fleet import start_replicas
from harness.json_lines import read_json_lines
from harness.peers import all_healthy, find_peer, peer_command
from harness.processes import Children, free_ports, get_json, wait_ready
from harness.scenario import check_scenario

MODEL = "mock-model"
BLOCK = 16
READY_S = 60
SYNC_S = 10


def require(name: str):
    """The preset, or a skip that says how to get the router."""
    preset = find_peer(name)
    if not preset.installed:
        pytest.skip(f"{name} is not installed in this environment: {preset.install_line}")
    return preset


def program(name: str, package: str) -> str:
    """Path of a client program: beside this interpreter, in a folder of ROUTEBENCH_PEERS_BIN, or on the path."""
    folders = [str(Path(sys.executable).parent), *os.environ.get("ROUTEBENCH_PEERS_BIN", "").split(os.pathsep)]
    found = shutil.which(name, path=os.pathsep.join(f for f in folders if f)) or shutil.which(name)
    if found is None:
        pytest.skip(
            f"{name} is not installed: pip install {package} in a venv of its own and name its bin folder in "
            "ROUTEBENCH_PEERS_BIN"
        )
    return found


class Answer:
    def __init__(self, body, headers):
        self.body, self.headers = body, headers
        self.id = body["id"]
        usage = body["usage"]
        self.prompt_tokens = usage["prompt_tokens"]
        self.cached_tokens = (usage["prompt_tokens_details"] or {}).get("cached_tokens")


class Fleet:
    """Replicas that run, and a peer in front once `start_peer` was called."""

    def __init__(self, children: Children, replicas, folder: Path):
        self.children, self.replicas, self.folder = children, replicas, folder
        self.url = replicas[0].url
        self.peer_log = folder / "peer.log"

    @property
    def names(self):
        return {replica.url: replica.name for replica in self.replicas}

    def start_peer(self, name: str, variant: str | None = None, *args: str) -> str:
        preset = require(name)
        port = free_ports(1)[0]
        command = peer_command(
            name, variant, args, port, self.replicas, log_file=self.folder / "peer.jsonl", epoch_ns=time.monotonic_ns()
        )
        child = self.children.start("peer", command)
        self.url = f"http://127.0.0.1:{port}"
        wait_ready(child, f"{self.url}{preset.ready_path}", READY_S, lambda body: all_healthy(body, self.replicas))
        return self.url

    def ask(
        self, prompt, *, url: str | None = None, path="/v1/completions", max_tokens=2, headers=None, **fields
    ) -> Answer:
        body = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        body["messages" if path.endswith("chat/completions") else "prompt"] = prompt
        request = urllib.request.Request(
            (url or self.url) + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(json.load(answer), answer.headers)

    def placed(self, answer: Answer) -> str:
        """The replica whose engine logged the answer's id."""
        for _ in range(50):
            for row in read_json_lines(self.folder.glob("engine-*.requests.jsonl")):
                if row["response_id"] == answer.id:
                    return row["replica"]
            time.sleep(0.02)
        raise AssertionError(f"no engine logged {answer.id}")

    def wait_log(self, text: str, count: int = 1) -> None:
        """Waits until the peer's own log says something that often: it has seen what we sent."""
        deadline = time.monotonic() + SYNC_S
        while self.peer_log.read_text("utf-8", "replace").count(text) < count:
            assert time.monotonic() < deadline, f"the peer never logged {text!r} {count} times"
            time.sleep(0.02)

    def decisions(self):
        return read_json_lines([self.folder / "peer.jsonl"])

    def wait_busy(self) -> None:
        """Waits until some replica runs a request."""
        deadline = time.monotonic() + SYNC_S
        while not any(self.state(replica.name)["running"] for replica in self.replicas):
            assert time.monotonic() < deadline, "no replica ever ran the request"
            time.sleep(0.005)

    def state(self, replica: str):
        return get_json(f"{next(r.url for r in self.replicas if r.name == replica)}/mock/state")


@contextmanager
def fleet(folder: Path, replicas: int = 3, **engine) -> Iterator[Fleet]:
    scenario = check_scenario(
        {
            "name": "peers",
            "routers": ["round-robin"],
            "fleet": {"replicas": replicas},
            "engine": {"block_size": BLOCK, "num_gpu_blocks": 2000, **engine},
            "workload": {"kind": "multi-turn", "turns": 1, "first_input_tokens": 16, "output_tokens": 2},
        },
        "peers",
    )
    seeds = Random(1)
    with Children(folder) as children:
        started = start_replicas(
            children,
            scenario,
            epoch_ns=time.monotonic_ns(),
            seed_for=lambda _: seeds.randrange(2**31),
            log_dir=folder,
        )
        yield Fleet(children, started, folder)


def token_ids(seed: int, count: int) -> list[int]:
    return [Random(f"{seed}/{k}").randrange(1000, 31000) for k in range(count)]


def leading_blocks(tokens: int) -> int:
    """Tokens of a prompt that a cache may serve: full blocks, and never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


def plain(log: Path) -> str:
    """A log without its terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", "replace"))
