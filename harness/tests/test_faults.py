"""Faults of a scenario: read, handed to the processes, and what virtual time makes of those that it knows."""

import random
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.faults import EventTrouble, read_faults
from harness.fleet import replica_command, router_command
from harness.mode_check import require_live, require_simulable
from harness.scenario import check_scenario
from harness.sim import Simulation
from harness.tests.arms import arm, small
from mock_engine import Engine, Faults, RequestError

NAMES = ("r0", "r1", "r2")


def hits(**tables) -> int:
    rows = Simulation(arm(small(routers=["pure-kv-affinity"], **tables))).run().requests
    return sum(row["believed_hit_tokens"] for row in rows)


def test_a_table_is_checked_and_comes_back_as_it_was_given():
    given = {"event_drop": 0.5, "http_503": 0.1, "router_body_truncate_bytes": 4096, "replicas": ["r1"]}
    assert read_faults(given, NAMES).to_table() == given
    assert not read_faults({}, NAMES)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"event_dorp": 0.5}, "did you mean 'event_drop'"),
        ({"event_drop": 2.0}, "from 0 to 1"),
        ({"router_nonsense": 1}, "choose one of"),
        ({"router_body_truncate_bytes": 0}, "at least 1"),
        ({"replicas": ["r9"]}, "out of r0, r1, r2"),
        ({"replicas": []}, "leaves nobody to have the faults"),
        ({"replicas": ["r1", "r2", "r1"]}, "'r1' twice"),
        ({"stall": "often"}, "faults:"),
    ],
)
def test_a_wrong_table_names_the_key_and_the_mend(table, said):
    with pytest.raises(UsageError, match=said):
        read_faults(table, NAMES)


def test_processes_are_told_their_faults_and_only_the_named_replicas(tmp_path):
    scenario = small(faults={"http_503": 0.25, "replicas": ["r1"]})

    def command(name: str) -> list[str]:
        return replica_command(scenario, name, 1, 2, epoch_ns=0, seed=0, log_dir=tmp_path)

    assert "http_503=0.25" in command("r1")
    assert "http_503=0.25" not in command("r0")


def test_a_mode_that_cannot_do_a_fault_refuses_it():
    with pytest.raises(UsageError, match="--mode live"):
        require_simulable(small(faults={"stall": 0.1}))
    require_simulable(small(faults={"event_drop": 0.1}))
    require_simulable(small(faults={"router_breaker_on_client_errors": 3}))
    template = {"router_template_mismatch": True}
    require_simulable(small(faults=template))
    require_live(small(faults=template, load={"api": "chat"}))
    with pytest.raises(UsageError, match=r"load\.api=chat"):
        require_live(small(faults=template))
    foreign = check_scenario(
        {**small().resolved(), "fleet": {"urls": ["http://127.0.0.1:1"]}, "faults": {"stall": 0.1}}, "f"
    )
    with pytest.raises(UsageError, match=r"fleet\.urls"):
        require_live(foreign)


def test_a_dropped_batch_is_noticed_with_the_next_one_that_comes():
    trouble = EventTrouble(Faults(event_drop=0.5), random.Random(3))
    seen = [trouble.take() for _ in range(200)]
    for before, (arrives, hole) in zip([(True, False), *seen], seen, strict=False):
        assert not (hole and not arrives)
        assert hole == (arrives and not before[0])
    assert 60 < sum(arrives for arrives, _ in seen) < 140


def test_lost_events_cost_a_router_its_belief_and_silence_all_of_it():
    sound = hits()
    assert 0 < hits(faults={"event_drop": 0.3}) < sound
    assert hits(faults={"event_drop": 1.0}) == 0


def test_late_events_cost_a_router_what_it_does_not_know_yet():
    assert hits(faults={"event_delay_ms": 3_600_000}) == 0


def test_a_truncated_body_is_scored_on_what_is_left():
    rows = (
        Simulation(arm(small(routers=["pure-kv-affinity"], faults={"router_body_truncate_bytes": 256}))).run().requests
    )
    sound = hits()
    assert 0 < sum(row["believed_hit_tokens"] for row in rows) < sound


def test_a_router_may_have_faults_of_its_own_on_top_of_those_of_all():
    blind = {"name": "blind", "policy": "pure-kv-affinity", "faults": {"ignore_extra_keys": True}}
    scenario = small(routers=["round-robin", blind], faults={"router_untracked_load": True})
    plain, own = (scenario.router_faults(entry) for entry in scenario.routers)
    assert (plain.untracked_load, plain.ignore_extra_keys) == (True, False)
    assert (own.untracked_load, own.ignore_extra_keys) == (True, True)
    assert scenario.resolved()["routers"][1]["faults"] == {"ignore_extra_keys": True}
    command = router_command(scenario.routers[1], scenario, [], 1, epoch_ns=0, seed=0, log_file=Path("log"))
    assert [command[i + 1] for i, word in enumerate(command) if word == "--fault"] == own.names()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "a", "policy": "random", "faults": {"ignore_extra": True}}, "did you mean 'ignore_extra_keys'"),
        ({"name": "a", "policy": "random", "faults": {"body_truncate_bytes": 0}}, "at least 1"),
        ({"name": "a", "command": ["x", "{port}"], "faults": {"untracked_load": True}}, "routers of ours commit"),
    ],
)
def test_a_routers_own_fault_that_cannot_be_names_the_mend(entry, said):
    with pytest.raises(UsageError, match=said):
        small(routers=[entry])


def test_salted_blocks_are_believed_in_by_their_tenants_alone_unless_salts_are_overlooked():
    workload = {"kind": "multi-turn", "sessions": 8, "turns": 1, "tenants": 8, "think_time_ms": 0}
    workload |= {"shared_system_prompts": 1, "system_prompt_tokens": 320, "first_input_tokens": 10, "output_tokens": 4}
    blind = {"name": "blind", "policy": "pure-kv-affinity", "faults": {"ignore_extra_keys": True}}
    scenario = small(routers=["pure-kv-affinity", blind], workload=workload, load={"concurrency": 1, "ramp_s": 0.0})
    sound, overlooked = (Simulation(arm(scenario, number)).run().requests for number in (0, 1))
    assert [row["believed_hit_tokens"] for row in sound] == [0] * 8
    assert [row["believed_hit_tokens"] for row in overlooked] == [0, *[320] * 7]
    dynamo = small(routers=["dynamo-kv"], workload=workload, load={"concurrency": 1, "ramp_s": 0.0})
    imitated = Simulation(arm(dynamo)).run().requests  # the real one hashes tokens alone
    assert [row["believed_hit_tokens"] for row in imitated] == [0, *[320] * 7]
    assert {row["cached_tokens"] for row in (*sound, *overlooked, *imitated)} == {0}


class RefusesLongOnes(Engine):
    """An engine whose model ends at 300 prompt tokens."""

    def submit(self, request, now_us):
        if request.sequence.prompt_tokens > 300:
            raise RequestError(400, "this model's maximum context length is 300 tokens")
        super().submit(request, now_us)


def classes(faults) -> dict[str, int]:
    """Error classes of a run in which some clients ask for too much."""
    rows = Simulation(arm(small(faults=faults)), make_engine=RefusesLongOnes).run().requests
    found = [row["error_class"] for row in rows if row["status"] == "error"]
    return {kind: found.count(kind) for kind in sorted(set(found))}


def test_in_virtual_time_too_a_breaker_on_client_errors_turns_right_requests_away_and_a_sound_router_none():
    sound = classes({})
    assert set(sound) == {"engine_4xx"}
    broken = classes({"router_breaker_on_client_errors": 1})
    assert set(broken) == {"engine_4xx", "router"}
    assert broken["engine_4xx"] < sound["engine_4xx"]


def placement(router: str, **faults) -> list[str]:
    """Where the requests of one popular prompt went; the second comes when the first one's is known to be cached."""
    one_prompt = {
        "kind": "multi-turn",
        "sessions": 96,
        "turns": 1,
        "shared_system_prompts": 1,
        "system_prompt_tokens": 2000,
        "first_input_tokens": {"dist": "uniform", "low": 20, "high": 200},
        "output_tokens": 400,
    }
    scenario = small(routers=[router], workload=one_prompt, faults=faults, load={"concurrency": 48, "ramp_s": 6.0})
    rows = Simulation(arm(scenario)).run().requests
    return [row["replica"] for row in rows if row["replica"] is not None]


@pytest.mark.parametrize("router", ["dynamo-kv", "vllm-kv-aware"])
def test_a_router_that_counts_no_load_herds_although_its_policy_books_its_own(router):
    """Field case BL-04: placed by the policy, never added to its load and never removed."""
    sound, herding = placement(router), placement(router, router_untracked_load=True)
    assert sound != herding

    def share(placed: list[str]) -> float:
        return max(placed.count(name) for name in placed) / len(placed)

    assert share(herding) > 0.9
    assert share(sound) < 0.5
