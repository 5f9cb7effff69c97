"""Rules that look sound and are not, as the field met them: the rule and a sound one before the same engines."""

from __future__ import annotations

import json

import pytest

from harness.sim import Simulation
from harness.tests.arms import arm, small
from reports.latency import nearest_rank

STUCK = '''
from routers import Decision
from routers.registry import find_policy


def after_the_long_ones(name):
    class Policy(find_policy(name)[0]):
        """The long generations are on r0 already; everything else is the rule's to place."""

        def choose(self, turn, fleet):
            if turn.max_tokens > 1000:
                return Decision("r0", "a long generation", "long")
            return super().choose(turn, fleet)

    return Policy


CompletedQps = after_the_long_ones("lowest-completed-qps")
InFlight = after_the_long_ones("least-requests")
'''


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """Rows of forty short sessions that start while r0, which seats eight, is busy with eight very long answers."""
    folder = tmp_path_factory.mktemp("stuck")
    (folder / "stuck.py").write_text(STUCK)
    long = [{"timestamp": 0, "input_length": 64, "output_length": 6000, "hash_ids": [n]} for n in range(8)]
    short = [
        {"timestamp": 2000 + 500 * n, "input_length": 64, "output_length": 40, "hash_ids": [100 + n]} for n in range(40)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long + short))
    scenario = small(
        routers=[f"{folder}/stuck.py:CompletedQps", f"{folder}/stuck.py:InFlight"],
        fleet={"replicas": 2},
        engine={"num_gpu_blocks": 20_000, "max_num_seqs": 8},
        workload={"kind": "trace", "path": str(folder / "trace.jsonl")},
        load={"driver": "rate", "arrival": "trace", "concurrency": None, "ramp_s": 0.0},
    )
    found = []
    for number in range(2):
        rows = Simulation(arm(scenario, number)).run().requests
        found.append([row for row in rows if row["output_tokens"] == 40])
    return found


def ttft_p90(rows) -> int:
    values = sorted(row["first_token_us"] - row["sent_us"] for row in rows)
    return values[nearest_rank(len(values), 90)]


def test_whoever_completes_least_is_not_idle_but_stuck(stuck):
    """Completed requests a second are fewest on the replica that is stuck with long answers, so a router that takes
    the lowest sends it everything new, and everything new waits there."""
    by_completions, by_flight = stuck
    assert len(by_completions) == len(by_flight) == 40
    share = [sum(row["replica"] == "r0" for row in rows) / 40 for rows in stuck]
    assert share[0] > 0.8
    assert share[1] < 0.2
    assert ttft_p90(by_completions) >= 3 * ttft_p90(by_flight)


def wave_figures(interval_ms: int | None, seed: int) -> tuple[int, float]:
    """(p90 TTFT, mean over time of the busiest replica's share of the mean) of equal requests that come in waves, for
    the least busy replica by gauges polled every so often, or by the router's own counts."""
    by_gauges = {
        "name": "by-gauges",
        "policy": "affinity-load-score",
        "options": {"w_cache": 0.0, "load": "kv-usage", "ties": "random"},
        "metrics_interval_ms": interval_ms,
    }
    scenario = small(
        routers=["least-requests" if interval_ms is None else by_gauges],
        seed=seed,
        fleet={"replicas": 8},
        engine={"num_gpu_blocks": 28_200},
        workload={"kind": "waves", "waves": 3, "wave_size": 96, "input_tokens": 1000, "output_tokens": 60},
        load={"concurrency": 96, "ramp_s": 0.0},
    )
    rows = Simulation(arm(scenario)).run()
    moments: dict[int, list[int]] = {}
    for sample in rows.fleet:
        moments.setdefault(sample["t_us"], []).append(sample["running"] + sample["waiting"])
    peaks = [max(held) * len(held) / sum(held) for held in moments.values() if sum(held)]
    return ttft_p90(rows.requests), sum(peaks) / len(peaks)


def test_a_wave_lands_where_the_last_scrape_saw_nobody_unless_the_router_counts_for_itself():
    """Five seeds, and no interval meets another: the busiest replica holds several times the mean and the first token
    comes late while gauges are a second old; fresher gauges help, own counts are even."""
    seeds = range(5)
    stale, fresher, own = ([wave_figures(interval, seed) for seed in seeds] for interval in (1000, 50, None))
    for figure in (0, 1):
        assert min(run[figure] for run in stale) > max(run[figure] for run in fresher)
        assert min(run[figure] for run in fresher) > max(run[figure] for run in own)
    assert max(peak for _, peak in own) < 1.1
