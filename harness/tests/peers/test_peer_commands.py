"""Presets of real routers, checked without any of them."""

import sys
from dataclasses import dataclass

import pytest

from harness.errors import UsageError
from harness.peers import PEERS, PLACEHOLDERS, all_healthy, expand_command, find_peer, peer_command, require_installed


@dataclass(frozen=True)
class Address:
    name: str
    url: str
    kv_events: str | None = None


REPLICAS = [Address(f"r{k}", f"http://127.0.0.1:800{k}", f"tcp://127.0.0.1:555{k}") for k in range(2)]
DEAF = [Address("r0", "http://127.0.0.1:8000")]


def pairs(command, flag):
    return [command[i + 1] for i, word in enumerate(command) if word == flag]


@pytest.mark.parametrize("name", PEERS)
def test_every_preset_fills_its_template_and_knows_every_replica(name):
    command = peer_command(name, None, [], 9000, REPLICAS, metrics_port=9001)
    text = " ".join(command)
    assert command[0] == sys.executable
    assert pairs(command, "--port") == ["9000"]
    assert "{" not in text
    assert all(replica.url in text for replica in REPLICAS)


def test_a_policy_on_events_is_told_where_each_replica_publishes():
    for variant, args in (("kv_aware", []), (None, ["--policy", "kv_aware"]), (None, ["--policy=kv_aware"])):
        command = peer_command("vllm-router", variant, args, 9000, REPLICAS, block_size=32, model="m", metrics_port=1)
        assert pairs(command, "--kv-event-source") == [f"{r.url}={r.kv_events}" for r in REPLICAS]
        assert pairs(command, "--kv-event-block-size") == ["32"]
        assert pairs(command, "--kv-event-model") == ["m"]


def test_a_policy_that_needs_no_events_is_told_nothing_of_them():
    assert "--kv-event-source" not in peer_command("vllm-router", "round_robin", [], 9000, REPLICAS, metrics_port=1)


def test_a_policy_on_events_without_events_is_an_error_that_names_the_replica():
    with pytest.raises(UsageError, match="r0 publishes none"):
        peer_command("vllm-router", "kv_aware", [], 9000, DEAF, metrics_port=1)


def test_the_scenarios_own_arguments_come_last_and_may_hold_placeholders():
    args = ["--log-level", "debug", "--mark", "port-{port}"]
    command = peer_command("sglang-router", "cache_aware", args, 9000, REPLICAS, metrics_port=1)
    assert command[-4:] == ["--log-level", "debug", "--mark", "port-9000"]
    assert pairs(command, "--policy") == ["cache_aware"]


def test_a_log_is_asked_only_of_a_router_that_keeps_one(tmp_path):
    log = tmp_path / "router.jsonl"
    for name, preset in PEERS.items():
        command = peer_command(name, None, [], 9000, REPLICAS, metrics_port=1, log_file=log, epoch_ns=5)
        assert (pairs(command, "--log-file"), pairs(command, "--epoch-ns")) == (
            ([str(log)], ["5"]) if preset.keeps_log else ([], [])
        )


def test_a_list_is_one_argument_with_commas_unless_each_is_asked_for():
    words = ["--backends", "{worker_urls}", "--all={worker_urls}", "{worker_urls_each}", "{kv_event_endpoints_each}"]
    command = expand_command([*words, '{"json": {}}'], REPLICAS, {})
    urls = [replica.url for replica in REPLICAS]
    events = [replica.kv_events for replica in REPLICAS]
    joined = ",".join(urls)
    assert command == ["--backends", joined, f"--all={joined}", *urls, *events, '{"json": {}}']


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: find_peer("vllm-rooter"), "did you mean 'vllm-router'"),
        (lambda: peer_command("vllm-router", "kv-aware", [], 1, REPLICAS), "did you mean 'kv_aware'"),
        (lambda: peer_command("vllm-router", "random", ["--policy", "kv_aware"], 1, REPLICAS), "name the policy once"),
        (lambda: expand_command(["{prt}"], REPLICAS, dict.fromkeys(PLACEHOLDERS, "x")), "did you mean 'port'"),
        (lambda: expand_command(["--all={worker_urls_each}"], REPLICAS, {}), "a word of its own: write {worker_urls}"),
    ],
)
def test_what_cannot_work_is_an_error_that_names_the_mend(call, says):
    with pytest.raises(UsageError, match=says):
        call()


def test_a_missing_router_gives_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_router", None)
    with pytest.raises(UsageError, match=r"pip install 'routebench\[peers\]'.*vllm-router==0\.1\.17"):
        require_installed(find_peer("vllm-router"))


def test_ready_means_that_every_replica_was_found():
    assert all_healthy({"healthy_workers": 2}, REPLICAS)
    assert not all_healthy({"healthy_workers": 1}, REPLICAS)
    assert all_healthy({}, REPLICAS)
