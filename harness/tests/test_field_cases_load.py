"""What the field read into loads that were other than they seemed: on real simulations, where every instant is exact.

The engines' step cost is a preset of its own here, so that an answer takes as long as the case says, whoever else runs.
"""

from __future__ import annotations

import re

import pytest

from harness.run import run_mode
from harness.scenario import check_scenario
from reports import default_rules, gate
from reports.metrics_table import lookup

PRESET = """
[[preset]]
name = "clockwork"
form = "max"
basis = "user"
tensor_parallel = 1
step_fixed_us = {step_us}
weight_read_us = 0
token_us = 0
prefill_attention_ns = 0
sequence_us = 0
kv_read_ns = 0
request_fixed_us = {request_us}
kv_bytes_per_token = 131072
kv_blocks_16 = 28200
"""


def simulated(folder, name, *, step_us, request_us=0, **tables):
    """A finished run on an engine that takes `step_us` for any step and `request_us` before a request enters."""
    preset = folder / "clockwork.toml"
    preset.write_text(PRESET.format(step_us=step_us, request_us=request_us))
    table = {
        "name": "clockwork",
        "routers": ["round-robin"],
        "seed": 5,
        "fleet": {"replicas": 1},
        "engine": {"preset": str(preset), "max_num_seqs": 1024, "max_num_batched_tokens": 65536},
        **tables,
    }
    return run_mode(check_scenario(table, "clockwork"), "sim", folder / name).result


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A thousand users on answers of 100 ms: with think times of 0.5 to 1 s, and with none."""
    folder = tmp_path_factory.mktemp("thinking")

    def users(think):
        workload = {"kind": "multi-turn", "sessions": 1000, "turns": 5, "first_input_tokens": 16, "input_tokens": 1}
        return simulated(
            folder,
            "think" if think else "rush",
            step_us=10_000,
            workload={**workload, "output_tokens": 10, "think_time_ms": think},
            load={"concurrency": 1000},
        )

    return users({"dist": "uniform", "low": 500, "high": 1000}), users(0)


def test_what_was_in_flight_is_rate_times_latency_however_many_users_were_asked(thinking):
    """Tables in the field said 1,000 users where 130 requests were in flight, and a copy without think time held eight
    times as many."""
    for run, expected in zip(thinking, (118, 1000), strict=True):
        figures = run.routers["round-robin"]
        assert lookup(figures, "e2e_ms.p50") == pytest.approx(100, rel=0.1)
        held = figures["requests_per_s"] * figures["e2e_ms"]["mean"] / 1000
        assert figures["in_flight_mean"] == pytest.approx(held, rel=0.05)
        assert figures["in_flight_mean"] == pytest.approx(expected, rel=0.02)


def test_two_loads_of_as_many_users_are_told_apart_and_not_judged_unless_forced(thinking):
    """'About 118 against 1000 in flight' is the sentence that the customer of that table needed."""
    think, rush = thinking
    result = gate(rush, think, default_rules())
    assert result.exit_code == 3
    assert re.search(r"load differs: about 11\d against 1,000 in flight", result.reason), result.reason
    forced = gate(rush, think, default_rules(), force=True)
    assert forced.outcome in ("pass", "regression")
    assert [complaint.forced for complaint in forced.complaints] == [True]


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """Twenty requests at once for at most four in flight; 0.5 s to a first token and 20 ms for each of 256."""
    return simulated(
        tmp_path_factory.mktemp("capped"),
        "capped",
        step_us=20_000,
        request_us=480_000,
        workload={"kind": "uniform-unique", "requests": 20, "input_tokens": 64, "output_tokens": 256},
        load={"driver": "rate", "arrival": "constant", "rate_per_s": 10_000, "concurrency": 4},
    )


def test_waiting_for_a_place_in_the_client_is_no_time_to_first_token(capped):
    """A report in the field called 33 s of waiting for one of four places TTFT, where the engine took 0.76 s."""
    figures = capped.routers["round-robin"]
    assert figures["ttft_ms"]["count"] == 20
    assert figures["ttft_ms"]["p50"] == pytest.approx(500, rel=0.05)
    assert figures["ttft_ms"]["max"] == pytest.approx(500, rel=0.05)
    service_ms = figures["e2e_ms"]["mean"]
    assert service_ms == pytest.approx(500 + 255 * 20, rel=0.05)
    assert figures["sched_lag_ms"]["max"] == pytest.approx(4 * service_ms, rel=0.05)
    for after in ("ttft", "e2e"):
        waited = figures[f"{after}_from_schedule_ms"]["mean"] - figures[f"{after}_ms"]["mean"]
        assert waited == pytest.approx(figures["sched_lag_ms"]["mean"], rel=0.01)
    assert "latency" not in figures


def test_every_request_of_a_capped_open_loop_counts_once(capped):
    rows = capped.requests
    assert len(rows) == 20
    assert sorted(rows["status"].unique()) == ["ok"]
    assert capped.routers["round-robin"]["in_flight_peak"] == 4
