"""Engines that already run: what they tell of their KV events reaches the router, and what they do not is said."""

import json

import pytest

from harness.event_sources import ReplicaAddress, deaf_note, seen_from_here
from harness.fleet import start_replicas
from harness.live import run_live_arm
from harness.load_health import load_notes
from harness.processes import PYTHON, Children, free_ports, wait_ready
from harness.signals import Interruption
from harness.tests.arms import arm, small

READY_S = 60.0
"""A slow machine starts a Python process well within this."""
WORKLOAD = {
    "kind": "multi-turn",
    "sessions": 3,
    "turns": 3,
    "first_input_tokens": 200,
    "input_tokens": 40,
    "output_tokens": 8,
}


@pytest.mark.parametrize(
    ("endpoint", "url", "seen"),
    [
        ("tcp://*:5557", "http://127.0.0.1:8000", "tcp://127.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "http://node-7.cluster:8000", "tcp://node-7.cluster:5557"),
        ("tcp://[::]:5557", "http://[fd00::7]:8000", "tcp://[fd00::7]:5557"),
        ("tcp://10.0.0.7:5557", "http://127.0.0.1:8000", "tcp://10.0.0.7:5557"),
        ("ipc:///run/kv", "http://127.0.0.1:8000", "ipc:///run/kv"),
        ("inproc://kv", "http://127.0.0.1:8000", None),
        (None, "http://127.0.0.1:8000", None),
    ],
)
def test_an_address_of_every_interface_is_reached_at_the_engines_own(endpoint, url, seen):
    assert seen_from_here(endpoint, url) == seen


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two mock replicas as their users start them: `r0` publishes its events, `r1` does not."""
    http, deaf, events, replay = free_ports(4)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    with Children(tmp_path_factory.mktemp("alone")) as children:
        for name, port, more in (("r0", http, ["--kv-events-config", json.dumps(config)]), ("r1", deaf, [])):
            common = ["--port", str(port), "--served-model-name", "mock-model", "--enable-prompt-tokens-details"]
            child = children.start(name, [*PYTHON, "-m", "mock_engine", *common, *more])
            wait_ready(child, f"http://127.0.0.1:{port}/health", READY_S)
        yield (
            ReplicaAddress("r0", f"http://127.0.0.1:{http}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"),
            ReplicaAddress("r1", f"http://127.0.0.1:{deaf}"),
        )


def before(*replicas):
    urls = [replica.url for replica in replicas]
    return small(routers=["dynamo-kv"], fleet={"replicas": 1, "urls": urls}, workload=WORKLOAD, load={"ramp_s": 0.0})


def test_what_an_engine_tells_of_its_events_is_found(alone, tmp_path):
    with Children(tmp_path) as children:
        found = start_replicas(children, before(*alone), epoch_ns=0, seed_for=None, log_dir=tmp_path)
    assert tuple(found) == alone


def test_a_router_before_an_engine_that_runs_knows_what_is_cached(alone, tmp_path):
    scenario = before(alone[0])
    rows = run(scenario, tmp_path)
    later = [row for row in rows.requests if row["turn"] > 0]
    assert len(later) == 6
    assert all(row["status"] == "ok" for row in later)
    assert all(row["believed_hit_tokens"] > 0 for row in later)
    assert not any("hears none" in note for note in load_notes(arm(scenario), rows.requests, rows.facts))


def test_a_router_that_hears_nothing_of_an_engine_is_said_to_be_deaf(alone, tmp_path):
    scenario = before(*alone)
    rows = run(scenario, tmp_path)
    (note,) = (n for n in load_notes(arm(scenario), rows.requests, rows.facts) if "hears none" in n)
    assert note.startswith("dynamo-kv routes by KV events and hears none of r1: start these engines with")


def run(scenario, folder):
    return run_live_arm(
        arm(scenario),
        folder,
        interruption=Interruption(),
        on_phase=lambda _: None,
        on_done=lambda _: None,
        on_warn=lambda _: None,
    )


def test_a_router_without_need_of_events_is_never_deaf():
    assert not small(routers=["round-robin"]).routers[0].hears_events(16)
    assert small(routers=["dynamo-kv"]).routers[0].hears_events(16)


def test_a_fleet_that_tells_everything_is_no_reason():
    assert deaf_note("dynamo-kv", [ReplicaAddress("r0", "http://x", "tcp://x:1")]) is None
