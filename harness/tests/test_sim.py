"""The simulation: nothing is lost, nothing depends on chance that was not handed in, and jumping changes nothing."""

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.sim import SAMPLE_US, Simulation
from harness.tests.arms import arm, small
from mock_engine import Engine
from routers import POLICIES, BasePolicy, Decision, Metrics, Signal
from workloads import Streams

ROUTERS = ["random", "round-robin", "least-requests", "power-of-two", "session-ring", "pure-kv-affinity", "dynamo-kv"]
ROOT = Path(__file__).resolve().parents[2]


def plain(rows):
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_turn_of_every_session_is_answered_once_and_in_order(router):
    a = arm(small(routers=[router]))
    rows = Simulation(a).run().requests
    expected = {
        (s.session_id, t.index, t.output[1]) for s in a.scenario.make_workload().sessions(Streams(3)) for t in s.turns
    }
    assert {(r["session"], r["turn"], r["output_tokens"]) for r in rows} == expected
    assert len(rows) == len(expected)
    assert all(r["status"] == "ok" for r in rows)
    by_session: dict[str, list] = {}
    for row in sorted(rows, key=lambda r: (r["session"], r["turn"])):
        by_session.setdefault(row["session"], []).append(row)
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert after["sent_us"] == before["end_us"] + 40_000


@pytest.mark.parametrize("router", ROUTERS)
def test_instants_of_a_request_follow_causality(router):
    for row in Simulation(arm(small(routers=[router]))).run().requests:
        assert (
            row["scheduled_us"]
            <= row["sent_us"]
            <= row["admitted_us"]
            < row["first_token_us"]
            <= row["last_token_us"]
            == row["end_us"]
        )
        assert row["first_token_us"] + int(np.sum(row["chunk_gaps_us"])) == row["last_token_us"]
        assert len(row["chunk_gaps_us"]) == row["output_tokens"] - 1
        assert 0 <= row["cached_tokens"] < row["prompt_tokens"]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("blocks", [90, 400])
def test_jumping_and_stepping_give_the_same_rows(router, blocks):
    scenario = small(routers=[router], engine={"num_gpu_blocks": blocks})
    jumped, stepped = (
        Simulation(arm(scenario)).run(),
        Simulation(arm(scenario), make_engine=partial(Engine, jumping=False)).run(),
    )
    assert plain(jumped.requests) == plain(stepped.requests)
    assert jumped.fleet == stepped.fleet


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(router):
    scenario = small(routers=[router])
    once, again = Simulation(arm(scenario)).run(), Simulation(arm(scenario)).run()
    assert plain(once.requests) == plain(again.requests)
    assert once.fleet == again.fleet
    other = Simulation(arm(scenario, repeat=1)).run()
    assert plain(other.requests) != plain(once.requests)


def test_every_router_meets_the_same_prompts():
    scenario = small(routers=ROUTERS)
    met = [
        sorted(
            (r["session"], r["turn"], r["prompt_tokens"], r["output_tokens"])
            for r in Simulation(arm(scenario, i)).run().requests
        )
        for i in range(len(ROUTERS))
    ]
    assert all(m == met[0] for m in met)


@pytest.mark.parametrize("router", ROUTERS)
def test_no_router_passes_the_ceiling_of_one_infinite_cache(router):
    rows = Simulation(arm(small(routers=[router]))).run()
    measured = [r for r in rows.requests if r["phase"] == "steady"]
    assert sum(r["cached_tokens"] for r in measured) <= rows.ceiling_cached_tokens
    assert rows.ceiling_cached_tokens > 0


def test_one_replica_with_room_for_all_reaches_the_ceiling():
    scenario = small(fleet={"replicas": 1}, engine={"num_gpu_blocks": 20_000}, load={"concurrency": 1})
    rows = Simulation(arm(scenario)).run()
    assert sum(r["cached_tokens"] for r in rows.requests) == rows.ceiling_cached_tokens


def test_a_router_that_hears_events_believes_what_the_engine_serves():
    """With one request at a time and no lag between engine and router, belief and truth are the same."""
    scenario = small(routers=["pure-kv-affinity"], load={"concurrency": 1}, engine={"num_gpu_blocks": 90})
    for row in Simulation(arm(scenario)).run().requests:
        assert row["believed_hit_tokens"] // 16 * 16 >= row["cached_tokens"]
        assert row["believed_hit_tokens"] - row["cached_tokens"] <= 16  # a prompt's last token is always computed


def test_samples_lie_on_the_grid_and_the_last_one_has_counted_everything():
    rows = Simulation(arm(small())).run()
    assert all(s["t_us"] % SAMPLE_US == 0 for s in rows.fleet)
    last = [s for s in rows.fleet if s["t_us"] == max(s["t_us"] for s in rows.fleet)]
    assert len(last) == 3
    assert sum(s["query_tokens"] for s in last) == sum(r["prompt_tokens"] for r in rows.requests)
    assert sum(s["hit_tokens"] for s in last) == sum(r["cached_tokens"] for r in rows.requests)
    assert all(s["running"] == s["waiting"] == 0 for s in last)


def test_a_barrier_starts_no_rollout_before_the_step_before_has_ended():
    workload = {
        "kind": "rl-rollout",
        "steps": 3,
        "rollouts_per_step": 4,
        "turns": 2,
        "stragglers": 1,
        "barrier": True,
        "first_input_tokens": 64,
        "output_tokens": 32,
        "straggler_last_output_tokens": 200,
    }
    rows = Simulation(arm(small(workload=workload))).run().requests
    for step in (1, 2):
        begins = min(r["sent_us"] for r in rows if r["rollout_step"] == step)
        assert begins >= max(r["end_us"] for r in rows if r["rollout_step"] == step - 1)


def test_a_prompt_that_the_engine_refuses_is_an_error_of_the_engine_and_ends_its_session():
    scenario = small(engine={"max_model_len": 100_000})
    import msgspec

    tight = msgspec.structs.replace(scenario, engine=msgspec.structs.replace(scenario.engine, num_gpu_blocks=14))
    rows = Simulation(arm(tight)).run().requests
    refused = [r for r in rows if r["status"] == "error"]
    assert refused
    assert all(r["error_class"] == "engine_4xx" and "block" in r["error"] for r in refused)
    for row in refused:
        assert not [
            r for r in rows if r["session"] == row["session"] and r["turn"] > row["turn"] and r["status"] == "ok"
        ]


def test_rows_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib; from harness.tests.arms import arm, small; from harness.sim import Simulation\n"
        "s = small(routers=['dynamo-kv', 'session-ring', 'power-of-two'])\n"
        "done = [r for i in range(3) for r in Simulation(arm(s, i)).run().requests]\n"
        "rows = [sorted((k, str(v)) for k, v in r.items()) for r in done]\n"
        "print(hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(seen) == 1


DRIVERS = {
    "requests": {"driver": "requests", "concurrency": 5, "ramp_s": 0.0},
    "rate": {"driver": "rate", "concurrency": None, "rate_per_s": 30.0},
    "gamma": {"driver": "rate", "concurrency": None, "rate_per_s": 30.0, "burstiness": 0.3},
    "capped": {"driver": "rate", "concurrency": 4, "rate_per_s": 100.0},
    "drained": {"driver": "rate", "concurrency": None, "rate_per_s": 60.0, "drain_s": 0.2},
    "timed out": {"driver": "requests", "concurrency": 6, "request_timeout_s": 0.5},
}


@pytest.mark.parametrize("load", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize("router", ["round-robin", "pure-kv-affinity", "power-of-two"])
def test_every_driver_accounts_for_every_turn_and_jumping_changes_nothing(load, router):
    scenario = small(routers=[router], load=load)
    jumped = Simulation(arm(scenario)).run()
    stepped = Simulation(arm(scenario), make_engine=partial(Engine, jumping=False)).run()
    assert plain(jumped.requests) == plain(stepped.requests)
    assert jumped.fleet == stepped.fleet
    expected = sorted(
        f"{s.session_id}-{t.index}" for s in scenario.make_workload().sessions(Streams(3)) for t in s.turns
    )
    assert sorted(r["request_id"] for r in jumped.requests) == expected


def test_a_drain_cancels_what_is_in_flight_and_keeps_its_tokens():
    rows = Simulation(arm(small(load=DRIVERS["drained"]))).run().requests
    last_start = max(r["scheduled_us"] for r in rows if r["turn"] == 0)
    cut = [r for r in rows if r["status"] == "cancelled" and r.get("sent_us") is not None]
    assert cut
    assert {r["end_us"] for r in cut} == {last_start + 200_000}
    assert any(r["output_tokens"] for r in cut)
    for row in cut:
        assert len(row["chunk_gaps_us"]) == max(0, row["output_tokens"] - 1)
        assert row["last_token_us"] is None or row["last_token_us"] <= row["end_us"]
    assert max(r["end_us"] for r in rows if r.get("end_us") is not None) == last_start + 200_000


def test_an_answer_without_an_end_in_time_is_incomplete_and_frees_its_engine():
    rows = Simulation(arm(small(load=DRIVERS["timed out"])))
    found = rows.run()
    late = [r for r in found.requests if r["error_class"] == "timeout"]
    assert late
    assert {(r["status"], r["end_us"] - r["sent_us"]) for r in late} == {("incomplete", 500_000)}
    assert [(s["running"], s["waiting"]) for s in found.fleet[-3:]] == [(0, 0)] * 3


def test_an_open_loop_sends_on_its_own_instants_whatever_the_router():
    scenario = small(routers=["round-robin", "session-ring"], load=DRIVERS["rate"])
    first = [
        {r["session"]: r["sent_us"] for r in Simulation(arm(scenario, i)).run().requests if r["turn"] == 0}
        for i in range(2)
    ]
    assert first[0] == first[1]


def test_new_weights_empty_every_cache_between_steps():
    workload = {
        "kind": "rl-rollout",
        "steps": 3,
        "rollouts_per_step": 6,
        "samples_per_prompt": 6,
        "turns": 1,
        "stragglers": 0,
        "first_input_tokens": 320,
        "output_tokens": 40,
        "weight_sync_every_steps": 1,
    }
    synced = Simulation(arm(small(workload=workload, load={"ramp_s": 0.0}))).run()
    assert synced.facts["weight_syncs"] == {"done": 2 * 3, "refused": 0}
    ends = [max(r["end_us"] for r in synced.requests if r["rollout_step"] == s) for s in range(3)]
    starts = [min(r["sent_us"] for r in synced.requests if r["rollout_step"] == s) for s in range(3)]
    assert starts[1:] == ends[:-1]


def test_new_weights_at_once_are_refused_by_engines_that_work():
    workload = {
        "kind": "rl-rollout",
        "steps": 4,
        "rollouts_per_step": 4,
        "turns": 1,
        "stragglers": 1,
        "straggler_last_output_tokens": 60,
        "first_input_tokens": 320,
        "output_tokens": 40,
        "weight_sync_every_steps": 1,
    }
    facts = Simulation(arm(small(workload=workload, load={"weight_sync": "at-once"}))).run().facts
    assert facts["weight_syncs"]["refused"] > 0
    assert sum(facts["weight_syncs"].values()) == 3 * 3


class GaugeReader(BasePolicy):
    """Sends every turn to the first replica and notes what it was told of the fleet."""

    about = "reads gauges"
    needs = frozenset({Signal.ENGINE_METRICS})

    def __init__(self, options=None, *, rng, block_size=16):
        super().__init__(options, rng=rng, block_size=block_size)
        self.told = []

    def choose(self, turn, fleet):
        return Decision(next(iter(fleet)).name, "always the first", "first")

    def observe(self, event):
        if isinstance(event, Metrics):
            self.told.append(event)


def test_a_policy_that_reads_gauges_gets_them_as_often_as_a_router_process_polls(tmp_path):
    file = tmp_path / "gauges.py"
    file.write_text("from harness.tests.test_sim import GaugeReader\n")
    simulation = Simulation(arm(small(routers=[f"{file}:GaugeReader"], engine={"num_gpu_blocks": 101})))
    rows = simulation.run()
    told = simulation.routers[0].policy.told
    assert {m.at_us % 200_000 for m in told} == {0}
    assert [m.replica for m in told[:3]] == ["r0", "r1", "r2"]
    assert any(m.metrics.running and m.metrics.kv_usage > 0 for m in told if m.replica == "r0")
    assert all(m.metrics.running == 0 for m in told if m.replica != "r0")
    last = max(r["end_us"] for r in rows.requests)
    assert last - 200_000 < max(m.at_us for m in told) <= last + 200_000


@pytest.mark.parametrize("router", sorted(POLICIES))
def test_every_policy_gets_what_it_needs_and_jumping_changes_nothing_for_it(router):
    scenario = small(routers=[router], engine={"num_gpu_blocks": 120})
    jumped = Simulation(arm(scenario)).run()
    stepped = Simulation(arm(scenario), make_engine=partial(Engine, jumping=False)).run()
    assert plain(jumped.requests) == plain(stepped.requests)
    assert {r["status"] for r in jumped.requests} == {"ok"}


@pytest.mark.parametrize("blocks", [90, 400])
def test_a_clairvoyant_believes_what_the_engine_then_serves(blocks):
    """One request at a time: nothing can be evicted between the decision and the admission."""
    scenario = small(routers=["clairvoyant"], load={"concurrency": 1}, engine={"num_gpu_blocks": blocks})
    rows = Simulation(arm(scenario)).run().requests
    assert [r["believed_hit_tokens"] for r in rows] == [r["cached_tokens"] for r in rows]
    assert sum(r["cached_tokens"] for r in rows)


@pytest.mark.parametrize("form", ["top-k", "bloom"])
def test_reports_of_prefixes_lead_turns_back_to_their_cache(form):
    """Think times are longer than the time between two reports, so each turn's context has been reported."""
    options = {"report": form, "min_prefix_tokens": 16}
    workload = {
        "kind": "multi-turn",
        "sessions": 6,
        "turns": 3,
        "think_time_ms": 2500,
        "first_input_tokens": 320,
        "input_tokens": 32,
        "output_tokens": 64,
    }
    router = {"name": "told", "policy": "reported-prefixes", "options": options}
    rows = Simulation(arm(small(routers=[router], workload=workload))).run().requests
    later = [r for r in rows if r["turn"]]
    homes = {(r["session"], r["turn"]): r["replica"] for r in rows}
    assert all(r["replica"] == homes[r["session"], r["turn"] - 1] for r in later)
    assert all(r["cached_tokens"] >= 320 for r in later)


def test_a_changing_token_in_front_leaves_nothing_to_reuse():
    workload = {"kind": "multi-turn", "sessions": 8, "turns": 3, "output_tokens": 20}
    for prefix in (False, True):
        rows = Simulation(arm(small(workload=workload | {"timestamp_prefix": prefix}))).run()
        assert (sum(r["cached_tokens"] for r in rows.requests) == 0) == prefix
        assert (rows.ceiling_cached_tokens == 0) == prefix
