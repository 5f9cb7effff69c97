"""Faults of a scenario: read, handed to the processes, and what virtual time makes of those that it knows."""

import random

import pytest

from harness.errors import UsageError
from harness.faults import EventTrouble, read_faults
from harness.fleet import replica_command
from harness.mode_check import require_live, require_simulable
from harness.scenario import check_scenario
from harness.sim import Simulation
from harness.tests.arms import arm, small
from mock_engine import Faults

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
