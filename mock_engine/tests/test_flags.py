"""Flags become options: vLLM's names, one home for each default, and the mend for what cannot work."""

from __future__ import annotations

import json

import pytest

from mock_engine import ConfigError, EngineConfig, load_preset
from mock_engine.flags import parse_flags
from mock_engine.options import DEFAULT_PRESET


def test_without_flags_the_engine_has_its_own_defaults_and_the_presets_blocks() -> None:
    options, config = parse_flags([], {})
    assert config == EngineConfig(num_gpu_blocks=load_preset(DEFAULT_PRESET).num_gpu_blocks)
    assert (options.port, options.kv_events.enable_kv_cache_events) == (8000, False)


def test_a_larger_block_size_leaves_the_same_memory_in_fewer_blocks() -> None:
    _, config = parse_flags(["--block-size", "32"], {})
    assert config.num_gpu_blocks == load_preset(DEFAULT_PRESET).num_gpu_blocks // 2
    _, config = parse_flags(["--block-size", "32", "--num-gpu-blocks-override", "77"], {})
    assert config.num_gpu_blocks == 77


def test_a_memory_for_kv_blocks_is_counted_in_the_presets_bytes() -> None:
    preset = load_preset(DEFAULT_PRESET)
    _, config = parse_flags(["--kv-cache-memory-bytes", str(100 * 16 * preset.kv_bytes_per_token + 5)], {})
    assert config.num_gpu_blocks == 100
    _, config = parse_flags(["--kv-cache-memory-bytes", "1g", "--num-gpu-blocks-override", "7"], {})
    assert config.num_gpu_blocks == 7


def test_the_environment_says_how_long_idle_connections_live() -> None:
    assert parse_flags([], {})[0].keep_alive_s == 5
    assert parse_flags([], {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"})[0].keep_alive_s == 60
    with pytest.raises(ConfigError, match="whole seconds"):
        parse_flags([], {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "soon"})


def test_batch_limits_bound_each_other_as_in_vllm() -> None:
    _, config = parse_flags(["--max-model-len", "100", "--max-num-seqs", "4", "--max-num-batched-tokens", "8192"], {})
    assert config.max_num_batched_tokens == 400
    _, config = parse_flags(["--max-num-batched-tokens", "64"], {})
    assert config.max_num_seqs == 64


@pytest.mark.parametrize(("text", "number"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("77", 77)])
def test_counts_may_have_suffixes(text: str, number: int) -> None:
    assert parse_flags(["--max-model-len", text], {})[1].max_model_len == number


def test_switches_have_a_no_form_where_vllm_has_one() -> None:
    _, config = parse_flags(["--no-enable-prefix-caching", "--no-enable-chunked-prefill"], {})
    assert not config.enable_prefix_caching
    assert not config.enable_chunked_prefill


def test_the_publisher_is_zmq_once_events_are_enabled() -> None:
    options, _ = parse_flags(["--kv-events-config", json.dumps({"enable_kv_cache_events": True})], {})
    assert (options.kv_events.publisher, options.kv_events.endpoint) == ("zmq", "tcp://*:5557")
    assert (options.kv_events.buffer_steps, options.kv_events.hwm) == (10_000, 100_000)


def test_the_environment_opens_what_it_opens_in_vllm() -> None:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_API_KEY": "k",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "PYTHONHASHSEED": "0",
    }
    options, _ = parse_flags([], env)
    assert options.dev_mode
    assert options.allow_runtime_lora
    assert options.api_keys == ("k",)
    assert not options.int_block_hashes
    assert options.hash_seed == "0"
    closed, _ = parse_flags([], {})
    assert (closed.dev_mode, closed.allow_runtime_lora, closed.api_keys, closed.hash_seed) == (False, False, (), None)
    assert closed.int_block_hashes


def test_adapters_are_named_in_either_form() -> None:
    flags = ["--lora-modules", "a=/x", '{"name": "b", "path": "/y"}']
    assert parse_flags(flags, {})[0].lora_modules == (("a", "/x"), ("b", "/y"))


def test_flags_that_only_vllm_needs_are_accepted() -> None:
    parse_flags(["some/model", "--dtype", "bfloat16", "--trust-remote-code", "-tp", "2", "--no-async-scheduling"], {})


@pytest.mark.parametrize(
    ("flags", "mend"),
    [
        (["--stream-interval", "0"], "--stream-interval 0: give at least 1"),
        (["--mock-speedup", "0"], "--mock-speedup"),
        (["--mock-jitter", "1"], "--mock-jitter"),
        (["--max-model-len", "lots"], "--max-model-len"),
        (["--kv-events-config", '{"publisher": "kafka"}'], "zmq or null"),
        (["--mock-pres", "x"], "--help"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--ssl-cert-reqs", "5"], "0 .none."),
        (["--mock-fault", "stall=7"], "a number from 0 to 1"),
        (["--mock-report-top-k", "0"], "--mock-report-top-k 0: give at least 1"),
        (["--mock-first-chunk-tokens", "0"], "--mock-first-chunk-tokens 0: give at least 1"),
        *((["--mock-speedup", value], "from 0.001 to 1000000") for value in ("nan", "inf", "1e-9", "1e9")),
        *((["--watermark", value], "share of the blocks") for value in ("nan", "inf", "1")),
        *((["--mock-jitter", value], "share of a step") for value in ("nan", "inf")),
        *((["--gpu-memory-utilization", value], "a share above 0, up to 1") for value in ("nan", "inf", "0", "2")),
        (["--num-gpu-blocks-override", "0"], "give at least 2"),
        (["--num-gpu-blocks-override", "9" * 20], "give at most"),
        (["--kv-cache-memory-bytes", "5"], "holds no two blocks of llama-3.1-8b-h100: give 4194304"),
        (["--kv-cache-memory-bytes=-1"], "holds no two blocks"),
        (["--kv-cache-memory-bytes", "infG"], "invalid count value: 'infG'"),
        (["--max-model-len", "9" * 30], "max_model_len=9* is beyond all use: give at most"),
        (["--mock-seed", "9" * 30], "--mock-seed 9* is beyond all use: give at most"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: give at least 1"),
        (["--max-num-queued-reqs=-1"], "--max-num-queued-reqs -1: give at least 0"),
        (["--mock-epoch-ns=-1"], "--mock-epoch-ns -1: give at least 0"),
        (["--kv-events-config", '{"hwm": -1}'], "hwm=-1: give 0 to"),
        (["--kv-events-config", '{"buffer_steps": -1}'], "buffer_steps=-1: give 0 to"),
        (["--mock-fault", "event_delay_ms=99999999999"], "is beyond all use: give at most"),
        (["--mock-fault", "http_500=nan"], "give a number from 0 to 1"),
    ],
)
def test_what_cannot_work_is_named_with_its_mend(flags: list[str], mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        parse_flags(flags, {})
