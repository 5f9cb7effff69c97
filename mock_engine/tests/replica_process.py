"""Starts a replica as a process of its own for a test, on free loopback ports, and sees that it ends cleanly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S_MAX = 20
STOP_S_MAX = 10


def free_ports(count: int = 1) -> list[int]:
    """Consecutive ports that were free just now."""
    while True:
        sockets = [socket.create_server(("", 0))]
        first = sockets[0].getsockname()[1]
        try:
            sockets += [socket.create_server(("", first + at)) for at in range(1, count)]
            return [sock.getsockname()[1] for sock in sockets]
        except (OSError, OverflowError):
            continue  # a neighbour is taken
        finally:
            for sock in sockets:
                sock.close()


class Replica:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def state(self) -> dict[str, Any]:
        return dict(self.get("/mock/state"))

    def wait(self, done: Any, what: str, seconds: float = 10) -> dict[str, Any]:
        """Polls the state until `done` accepts it."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state()
            if done(state):
                return state
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s, the state is {state}"
            time.sleep(0.01)


def start(*flags: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHONHASHSEED"))}
    return subprocess.Popen(
        [sys.executable, "-m", "mock_engine", *flags],
        cwd=ROOT,
        env={**clean, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def replica(*flags: str, env: dict[str, str] | None = None) -> Iterator[Replica]:
    port = free_ports()[0]
    process = start("--host", "127.0.0.1", "--port", str(port), *flags, env=env)
    running = Replica(process, port)
    try:
        _wait_healthy(running)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            _, errors = process.communicate(timeout=STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
    assert process.returncode == 0, errors
    assert not errors, errors


def _wait_healthy(running: Replica) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            running.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the replica did not start: {running.process.communicate()}") from None
            time.sleep(0.02)
