"""Presets that were calibrated on served points, served by our own engine, lie as near to the measurements as told.

The suite serves a sample, one light and one loaded concurrency of every shape; `python benchmarks/presets.py` serves
all of them. The gates are those of the timing model: mean TTFT error 8 %, mean TPOT error 6 %.
"""

from functools import cache
from random import Random

import pytest

from mock_engine import Batch, EngineConfig, load_preset
from mock_engine.served import ClosedLoop, serve_closed_loop
from mock_engine.tests.served_table import Compared, compare, mean_pct, rows

TTFT_PCT_MAX = 8.0
TPOT_PCT_MAX = 6.0
SAMPLE = {"8", "32"}  # clients
PRESETS = sorted({row["preset"] for row in rows("serving_closed.csv")})
TPOT_ONLY = {"qwen3-32b-h100-tp2", "qwen3-32b-h100-tp4"}


@cache
def sample(preset: str) -> list[Compared]:
    return compare(lambda row: row["preset"] == preset and row["concurrency"] in SAMPLE)


def test_every_served_calibration_is_in_the_table() -> None:
    assert len(PRESETS) == 12
    assert len(rows("serving_closed.csv")) == 197
    assert {load_preset(name).basis for name in PRESETS} == {"calibrated", "calibrated-tpot"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_calibrated_preset_reproduces_measured_serving(preset: str) -> None:
    assert mean_pct([point.tpot_ms for point in sample(preset)], 0) <= TPOT_PCT_MAX
    if preset not in TPOT_ONLY:
        assert mean_pct([point.ttft_ms for point in sample(preset)], 0) <= TTFT_PCT_MAX


@pytest.mark.parametrize("preset", PRESETS)
def test_our_engine_foretells_what_an_independent_model_foretells(preset: str) -> None:
    """Same coefficients, another discrete-event model: lengths are drawn differently, which shows in the TTFT of few
    requests with short answers (Qwen3-32B at 8 clients: single points to 10 %), hardly in TPOT."""
    points = sample(preset)
    assert mean_pct([point.tpot_ms for point in points], 1) <= 0.6
    assert mean_pct([point.ttft_ms for point in points], 1) <= (4.5 if preset in TPOT_ONLY else 2.5)


SWEEP = "llama-3.1-8b-fp8-h200"


def test_the_sweep_preset_reproduces_measured_prefills() -> None:
    preset = load_preset(SWEEP)
    config = EngineConfig(num_gpu_blocks=preset.num_gpu_blocks)
    errors = []
    for row in rows("h200_llama31_8b_fp8_sweep.csv"):
        if row["phase"] != "prefill":
            continue
        prompt = int(row["isl"])
        alone = ClosedLoop(concurrency=1, input_tokens=(prompt, prompt), output_tokens=(1, 1), requests=1)
        served = serve_closed_loop(config, preset.cost, alone, Random(0))
        errors.append(abs(served.ttft_us / 1e3 / float(row["ttft_ms"]) - 1) * 100)
    assert len(errors) == 17
    assert sum(errors) / len(errors) == pytest.approx(preset.evidence.ttft_mean_abs_pct, abs=0.3)
    assert max(errors) <= TTFT_PCT_MAX + 2
    assert sum(errors) / len(errors) <= TTFT_PCT_MAX


def test_the_sweep_preset_reproduces_measured_decodes() -> None:
    preset = load_preset(SWEEP)
    errors = []
    for row in rows("h200_llama31_8b_fp8_sweep.csv"):
        if row["phase"] != "decode" or int(row["decode_seqs"]) > 1024:  # capped there by the engine's own limit
            continue
        batch = Batch.of(decode_contexts=[int(row["context_tokens"])] * int(row["decode_seqs"]))
        errors.append(abs(preset.cost.step_ps(batch) / 1e9 / float(row["itl_ms"]) - 1) * 100)
    assert sum(errors) / len(errors) == pytest.approx(preset.evidence.tpot_mean_abs_pct, abs=0.3)
    assert sum(errors) / len(errors) <= TPOT_PCT_MAX
    assert max(errors) <= 18
