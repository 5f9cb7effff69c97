"""Engine options: vLLM's names, one home for a default, errors that tell the mend; and the package's face."""

import subprocess
import sys

import pytest

import mock_engine
from mock_engine import ConfigError, EngineConfig


def test_defaults_are_vllms_on_an_h100() -> None:
    config = EngineConfig()
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 1024, 8192)
    assert (config.enable_prefix_caching, config.enable_chunked_prefill) == (True, True)
    assert (config.prefix_caching_hash_algo, config.scheduling_policy) == ("sha256", "fcfs")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("num_gpu_blocks", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("long_prefill_token_threshold", -1),
        ("prefix_caching_hash_algo", "md5"),
        ("scheduling_policy", "lifo"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name_with_the_mend(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{option}=.*(give|choose)"):
        EngineConfig(**{option: value})
    with pytest.raises(ConfigError, match=option):
        EngineConfig.from_mapping({option: value})


def test_an_unknown_or_mistyped_option_of_a_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no engine option named 'blocksize'.*block_size"):
        EngineConfig.from_mapping({"blocksize": 16})
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig.from_mapping({"block_size": "16"})


def test_one_block_is_the_null_block() -> None:
    config = EngineConfig(num_gpu_blocks=100, watermark=0.019)
    assert (config.usable_blocks, config.watermark_blocks) == (99, 1)


def test_importing_the_package_opens_nothing_and_loads_no_shell() -> None:
    heavy = ["aiohttp", "asyncio", "zmq", "numpy", "prometheus_client", "tokenizers", "mock_engine.server"]
    code = f"import mock_engine, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_all_that_the_package_promises_is_there() -> None:
    assert all(hasattr(mock_engine, name) for name in mock_engine.__all__)
    assert mock_engine.__all__ == sorted(set(mock_engine.__all__), key=lambda name: (not name.isupper(), name))
