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
    assert sum(r["cached_tokens"] for r in rows.requests) <= rows.ceiling_cached_tokens
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
