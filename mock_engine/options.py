"""What a replica's process can be told: the values behind its flags, checked, each default written here once.

Engine options are not here: they are EngineConfig's.
"""

from __future__ import annotations

import msgspec

from mock_engine.errors import ConfigError

VERSION = "0.33.0"  # the vLLM release that this replica passes for
DEFAULT_PRESET = "llama-3.1-8b-h100"
CLEAR_EVENTS = ("next-step", "eager", "never")
EVENT_FORMATS = ("maps", "arrays")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, with its defaults."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # zmq when events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str | None = None  # all interfaces
    port: int = 8000
    model: str = "mock-model"
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = False
    enable_scale_out: bool = False
    enable_tokenizer_info_endpoint: bool = False
    stream_interval: int = 1
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()  # (name, path)
    max_loras: int = 1
    num_gpu_blocks_override: int | None = None
    block_size_given: bool = False
    gpu_memory_utilization: float = 0.92
    kv_events: KvEventsConfig = KvEventsConfig()
    kv_event_format: str = EVENT_FORMATS[0]
    legacy_metrics: bool = False
    metrics_staleness_ms: int = 0
    dev_mode: bool = False
    allow_runtime_lora: bool = False
    int_block_hashes: bool = True
    hash_seed: str | None = None
    replicas_per_process: int = 1
    preset: str = DEFAULT_PRESET
    name: str | None = None
    log_dir: str | None = None
    epoch_ns: int | None = None
    sample_ms: int = 500
    seed: int = 0
    speedup: float = 1.0
    jitter: float = 0.0
    clear_event: str = CLEAR_EVENTS[0]

    def __post_init__(self) -> None:
        smallest: dict[str, float] = {
            "port": 1,
            "stream_interval": 1,
            "data_parallel_size": 1,
            "replicas_per_process": 1,
            "max_loras": 1,
            "sample_ms": 10,
            "metrics_staleness_ms": 0,
        }
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: give at least {least}")
        if self.port + self.replicas_per_process - 1 > 65535:
            raise ConfigError(f"--port {self.port}: ports end at 65535; give a lower one")
        if self.speedup <= 0:
            raise ConfigError(f"--mock-speedup {self.speedup}: model time must advance; give a number above 0")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"--mock-jitter {self.jitter}: give a share of a step's time from 0 to below 1")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("TLS needs --ssl-certfile and --ssl-keyfile together: give both or neither")


def _flag(name: str) -> str:
    mock_only = {"sample_ms", "seed", "speedup", "jitter", "name", "preset", "log_dir", "epoch_ns", "clear_event"}
    return ("--mock-" if name in mock_only else "--") + name.replace("_", "-")
