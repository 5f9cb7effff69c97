"""Presets: the numbers are where they say, of the form they say, and as near to the measurements as they say."""

import csv
import dataclasses
from pathlib import Path
from statistics import median

import pytest

from mock_engine import Batch, ConfigError, Preset, load_preset, preset_names

GRID = Path(__file__).parent / "data" / "kernel_step_grid.csv"
KERNEL = [name for name in preset_names() if load_preset(name).basis == "kernel"]

MINE = """
[[preset]]
name = "mine"
step_fixed_us = 100
weight_read_us = 50
token_us = 1.5
prefill_attention_ns = 0.1
sequence_us = 2
kv_read_ns = 3
kv_bytes_per_token = 1000
kv_blocks_16 = 500
"""


def grid_errors(name: str) -> list[float]:
    preset = load_preset(name)
    with GRID.open(encoding="utf-8") as lines:
        rows = [
            row for row in csv.DictReader(line for line in lines if not line.startswith("#")) if row["preset"] == name
        ]
    errors = []
    for row in rows:
        chunks = [(int(row["new_tokens"]), int(row["cached_ctx"]))] * int(row["n_prefill"])
        decodes = [int(row["decode_ctx"])] * int(row["n_decode"])
        model_ms = preset.cost.step_ps(Batch.of(chunks, decodes)) / 1e9
        errors.append(abs(model_ms / float(row["t_ms"]) - 1) * 100)
    return sorted(errors)


@pytest.mark.parametrize("name", KERNEL)
def test_a_kernel_preset_follows_the_operator_grid(name: str) -> None:
    errors = grid_errors(name)
    evidence = load_preset(name).evidence
    assert len(errors) > 300
    assert median(errors) <= 6
    assert errors[int(0.95 * len(errors))] <= 16
    assert median(errors) == pytest.approx(evidence.kernel_fit_median_pct, abs=0.2)
    assert errors[-1] == pytest.approx(evidence.kernel_fit_max_pct, abs=1)


def test_there_are_twenty_two_presets_nine_of_them_kernel_fits() -> None:
    assert len(preset_names()) == 22
    assert len(KERNEL) == 9


def test_a_preset_knows_its_memory() -> None:
    preset = load_preset("llama-3.1-70b-fp8-h100-tp2")
    assert (preset.num_gpu_blocks, preset.blocks_of(32), preset.kv_bytes_per_token) == (14823, 7411, 327_680)
    assert preset.cost.request_fixed_us == 17_000


def test_a_mixture_of_experts_is_one() -> None:
    cost = load_preset("gpt-oss-120b-h100-tp2").cost
    assert (cost.experts, cost.top_k) == (128, 4)
    assert load_preset("llama-3.1-8b-h100").cost.experts == 0


def test_a_users_file_has_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    preset = load_preset(path)
    assert isinstance(preset, Preset)
    assert preset.cost.step_ps(Batch(1, 1, 0, 10)) == 152_030_000
    assert dataclasses.replace(preset.cost, jitter=0.1).jitter == 0.1
    path.write_text(MINE + MINE.replace("mine", "other"), encoding="utf-8")
    assert load_preset(f"{path}:other").name == "other"
    with pytest.raises(ConfigError, match="holds mine, other"):
        load_preset(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "preset"),
        ("[[preset]\n", "no preset file"),
        (MINE + "colour = 1\n", "colour"),
        (MINE.replace("token_us = 1.5", 'token_us = "fast"'), "token_us"),
        (MINE.replace("token_us = 1.5", "token_us = -1"), "token_us=-1"),
        (MINE.replace("sequence_us = 2\n", ""), "sequence_us"),
        (MINE + "experts = 8\ntop_k = 2\n", "moe-sum"),
        (MINE + MINE, "two of one name"),
        (MINE.replace("= 500", "= 1"), "kv_blocks_16"),
    ],
)
def test_a_file_that_is_no_preset_is_refused_with_the_reason(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        load_preset(path)


def test_an_unknown_preset_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3-14b-h100"):
        load_preset("llama-9")
    with pytest.raises(ConfigError, match="cannot read"):
        load_preset(tmp_path / "none.toml")
