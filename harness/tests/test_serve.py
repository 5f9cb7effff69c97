"""`routebench serve`: prints every address, answers there, and leaves nothing behind."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.processes import get_json
from harness.tests.test_live import WAIT_S, command, environment

SMALL = ["--set", "fleet.replicas=2", "--router", "dynamo-kv"]


@pytest.fixture
def served(tmp_path):
    process = subprocess.Popen(
        command("serve", "quickstart", *SMALL),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if "Ctrl-C" in line:
            break
    try:
        yield process, "".join(said)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def addresses(said: str) -> list[str]:
    return re.findall(r"(?:router|replica) +\S+ (http://[\d.:]+)", said)


def silent(url: str) -> bool:
    """Nobody answers there any more; loose, because a killed process may take a moment to go."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            get_json(f"{url}/health")
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_every_address_answers_until_it_is_stopped(served, number):
    process, said = served
    found = addresses(said)
    assert len(found) == 3, said
    assert said.count(", KV events tcp://127.0.0.1:") == 2
    assert f"backends  {found[1]},{found[2]}" in said
    assert re.search(r"^events    tcp://127\.0\.0\.1:\d+,tcp://127\.0\.0\.1:\d+$", said, re.MULTILINE)
    assert get_json(f"{found[0]}/router/state")["policy"]
    for url in found:
        assert get_json(f"{url}/v1/models")["data"][0]["id"] == "mock-model"
    process.send_signal(number)
    assert process.wait(WAIT_S) == 0
    assert all(silent(url) for url in found)


def test_a_replica_that_dies_ends_the_service_with_its_name(served):
    import psutil

    process, said = served
    victim = next(p for p in psutil.Process(process.pid).children() if "r1" in p.cmdline())
    victim.kill()
    assert process.wait(WAIT_S) == 2
    assert process.stdout is not None
    assert "replica-r1 was ended by signal 9" in process.stdout.read()
    assert all(silent(url) for url in addresses(said))


@pytest.mark.parametrize("module", ["mock_engine", "routers"])
def test_a_part_alone_explains_itself(module):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=root, check=True
    )
    assert "--port" in done.stdout
    assert len(done.stdout.splitlines()) > 15
