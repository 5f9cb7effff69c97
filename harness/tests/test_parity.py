"""The probe before a live run: what a router believes of a prompt is what a replica serves, or the cause is named."""

import psutil
import pytest

from harness.parity import Probe, check_parity, holds_beliefs, mismatch
from harness.scenario import check_scenario

SERVED = Probe("r0", 512, 0)


def scenario(routers=("dynamo-kv",), **tables):
    table = {
        "name": "parity",
        "routers": list(routers),
        "fleet": {"replicas": 3},
        "engine": {"preset": "llama-3.1-8b-h100", "num_gpu_blocks": 600},
        "workload": {"kind": "multi-turn", "sessions": 4, "first_input_tokens": 100, "output_tokens": 8},
    }
    return check_scenario({**table, **tables}, "a test")


def events(**changes):
    stream = {"batches": 2, "undecodable": 0, "skipped": {"block_size": 0}}
    return {"events": {"r0": {**stream, **changes}}}


def test_a_router_that_hashes_as_its_engines_do_agrees_and_nothing_is_left_running(tmp_path):
    (found,) = check_parity(scenario(["round-robin", "dynamo-kv"]), tmp_path)
    assert (found.router, found.agrees) == ("dynamo-kv", True), found.said
    assert found.probes[-1].believed_tokens == found.probes[-1].cached_tokens == 512
    assert found.probes[0].cached_tokens == 0
    assert "as the router believed" in found.said
    started = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not started


def test_another_template_is_named_before_the_run(tmp_path):
    asked = scenario(load={"api": "chat"}, faults={"router_template_mismatch": True})
    (found,) = check_parity(asked, tmp_path)
    assert found.agrees is False
    assert found.probes[-1].cached_tokens
    assert found.probes[-1].believed_tokens == 0
    assert "template" in found.said


def test_routers_without_beliefs_are_not_probed(tmp_path):
    asked = scenario(["round-robin", "session-ring", "least-requests"])
    assert check_parity(asked, tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_router_that_already_runs_is_left_alone():
    asked = scenario([{"name": "mine", "url": "http://127.0.0.1:1"}, {"name": "ours", "policy": "pure-kv-affinity"}])
    assert [holds_beliefs(entry, asked) for entry in asked.routers] == [False, True]


@pytest.mark.parametrize(
    ("state", "api", "says"),
    [
        (events(skipped={"block_size": 3}), "completions-ids", "block size: 3 events"),
        (events(undecodable=1), "completions-ids", "event format"),
        ({"events": {}, "needs": ["kv_events", "tokens"]}, "completions-ids", "knows no address"),
        (events(batches=0), "completions-ids", "none reached the router"),
        (events() | {"tokens": {"failed": 2}}, "chat", "/tokenize"),
        (events(), "chat", "template"),
        (events(), "completions-ids", "seed, salt or adapter"),
        ({"prefix_poll": {"failed": 2, "last_error": "replica r0: 500"}}, "completions-ids", "replica r0: 500"),
    ],
)
def test_the_likeliest_cause_is_named(state, api, says):
    assert says in mismatch(state, scenario(load={"api": api}), SERVED)


def test_belief_in_part_and_belief_in_what_is_gone_are_told_apart():
    assert "beginning" in mismatch(events(), scenario(), Probe("r0", 512, 64))
    assert "removals" in mismatch(events(), scenario(), Probe("r0", 64, 512))
