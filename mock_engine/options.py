"""What a replica's process can be told: the values behind its flags, checked, each default written here once.

Engine options are not here: they are EngineConfig's.
"""

from __future__ import annotations

import msgspec

from mock_engine.errors import ConfigError
from mock_engine.faults import OFF, Faults

VERSION = "0.33.0"  # the vLLM release that this replica passes for
DEFAULT_PRESET = "llama-3.1-8b-h100"
CLEAR_EVENTS = ("next-step", "eager", "never")
EVENT_FORMATS = ("maps", "arrays")
WHOLE_MAX = 2**63 - 1  # no count, instant or seed means anything beyond
SPEEDUP_MIN, SPEEDUP_MAX = 0.001, 1_000_000.0
HWM_MAX = 2**31 - 1  # ZeroMQ's


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

    def __post_init__(self) -> None:
        for name, most in (("buffer_steps", WHOLE_MAX), ("hwm", HWM_MAX)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"--kv-events-config {name}={getattr(self, name)}: give 0 to {most}")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str | None = None  # all interfaces
    port: int = 8000
    model: str = "mock-model"
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # ssl.CERT_NONE; 1 optional, 2 required
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
    keep_alive_s: float = 5.0  # idle connections
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
    faults: Faults = OFF
    report_top_k: int = 100  # prefixes in one answer of /prefix_cache_state
    first_chunk_tokens: int = 1
    reasoning_tokens: int = 0  # of each chat answer
    async_scheduling: bool = False  # asked for; steps are lockstep all the same

    def __post_init__(self) -> None:
        smallest: dict[str, float] = {
            "port": 1,
            "stream_interval": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "max_num_queued_reqs": 0,
            "max_num_queued_tokens": 0,
            "epoch_ns": 0,
            "num_gpu_blocks_override": 2,
            "replicas_per_process": 1,
            "max_loras": 1,
            "sample_ms": 10,
            "metrics_staleness_ms": 0,
            "report_top_k": 1,
            "first_chunk_tokens": 1,
            "reasoning_tokens": 0,
        }
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int:
                continue
            least = smallest.get(name)
            if least is not None and value < least:
                raise ConfigError(f"{flag_of(name)} {value}: give at least {least}")
            if abs(value) > WHOLE_MAX:
                raise ConfigError(f"{flag_of(name)} {value} is beyond all use: give at most {WHOLE_MAX}")
        if self.port + self.replicas_per_process - 1 > 65535:
            raise ConfigError(f"--port {self.port}: ports end at 65535; give a lower one")
        if not SPEEDUP_MIN <= self.speedup <= SPEEDUP_MAX:
            raise ConfigError(f"--mock-speedup {self.speedup}: give a number from {SPEEDUP_MIN} to {SPEEDUP_MAX:.0f}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: give a share above 0, up to 1")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"--mock-jitter {self.jitter}: give a share of a step's time from 0 to below 1")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile without --ssl-certfile serves nothing: name the certificate too")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs}: give 0 (none), 1 (optional) or 2 (required)")
        if self.ssl_cert_reqs and not (self.ssl_certfile and self.ssl_ca_certs):
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} asks clients for certificates that nothing can check: add "
                f"--ssl-certfile and --ssl-ca-certs"
            )


_MOCK_ONLY = frozenset(
    {
        "sample_ms", "seed", "speedup", "jitter", "name", "preset", "log_dir", "epoch_ns", "clear_event",
        "report_top_k", "first_chunk_tokens", "reasoning_tokens",
    }
)  # fmt: skip


def flag_of(option: str) -> str:
    return ("--mock-" if option in _MOCK_ONLY else "--") + option.replace("_", "-")
