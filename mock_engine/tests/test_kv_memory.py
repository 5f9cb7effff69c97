"""KV blocks by the memory formula, beside the capacities that vLLM reported."""

import pytest

from mock_engine import ConfigError, load_preset
from mock_engine.kv_memory import kv_blocks, kv_bytes_per_token
from mock_engine.tests.served_table import rows

HBM_GIB = {"H100-80GB": 79.6, "H200": 139.8}


@pytest.mark.parametrize("row", rows("kv_capacity.csv"), ids=lambda row: f"{row['model']}-tp{row['tensor_parallel']}")
def test_reported_capacities_are_met_within_one_and_a_half_percent(row: dict[str, str]) -> None:
    blocks = kv_blocks(
        hbm_gib=HBM_GIB[row["gpu"]],
        weights_gib=float(row["weights_gib"]),
        bytes_per_token=int(row["kv_bytes_per_token"]),
        tensor_parallel=int(row["tensor_parallel"]),
    )
    assert blocks == pytest.approx(int(row["blocks_formula"]), abs=12)  # weights are given in hundredths of a GiB
    assert blocks == pytest.approx(int(row["blocks_measured"]), rel=0.015)


def test_bytes_per_token_are_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token(32, 8, 128) == load_preset("llama-3.1-8b-h100").kv_bytes_per_token
    assert kv_bytes_per_token(80, 8, 128) == load_preset("llama-3.1-70b-h100-tp4").kv_bytes_per_token
    assert kv_bytes_per_token(80, 8, 128, value_bytes=1) == 163_840


def test_kv_heads_bound_how_often_the_cache_is_split() -> None:
    model = {"hbm_gib": 79.6, "weights_gib": 15.0, "bytes_per_token": 131_072, "tensor_parallel": 8}
    assert kv_blocks(**model, kv_heads=4) == pytest.approx(kv_blocks(**model) / 2, rel=1e-4)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="more GPUs"):
        kv_blocks(hbm_gib=79.6, weights_gib=131.4, bytes_per_token=327_680)
