"""The command line of `python -m mock_engine`: vLLM's flag names where vLLM has one, `--mock-*` for the rest.

Engine defaults come from EngineConfig and the preset, never from here. A flag that cannot work is a ConfigError of
one line that says what to change; only `main` turns it into an exit code.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from mock_engine.config import HASH_ALGORITHMS, SCHEDULING_POLICIES, EngineConfig
from mock_engine.errors import ConfigError
from mock_engine.faults import Faults, parse_faults
from mock_engine.options import CLEAR_EVENTS, DEFAULT_PRESET, EVENT_FORMATS, KvEventsConfig, ServerOptions
from mock_engine.presets import load_preset, preset_names

LIMITS = (
    "limits: Steps are scheduled in lockstep, as with --no-async-scheduling. vLLM's default is asynchronous "
    "scheduling, where an arrival can wait one step more and a stop string or id wastes one token slot; what else it "
    "changes is not known well enough to be imitated, so --async-scheduling is accepted and says so. There is one "
    "full-attention KV group; no multimodal input, speculative decoding, beam search, tool calls, repetition detection "
    "or KV connectors."
)
ASYNC_NOTE = (
    "note: --async-scheduling is accepted, but this replica schedules in lockstep: of vLLM's asynchronous scheduling "
    "too little is known to be imitated faithfully (there, an arrival can wait up to one step more)"
)


class _Help(argparse.HelpFormatter):
    """Keeps the paragraphs of the epilog apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m mock_engine --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mock_engine",
        usage="%(prog)s [flags] [MODEL]",
        description=(
            "A mock vLLM replica: an OpenAI-compatible server with vLLM's scheduler, KV cache, KV events and metrics, "
            "which takes as long as a real engine would and needs no GPU. Flags have vLLM's names; what only a mock "
            "has is in the last group."
        ),
        formatter_class=_Help,
        epilog=(
            f"{LIMITS}\n\n"
            "example: python -m mock_engine --port 8000 --mock-preset llama-3.1-8b-h100 --kv-events-config "
            '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\''
        ),
        allow_abbrev=False,
    )
    _server_flags(parser)
    _engine_flags(parser)
    _event_flags(parser)
    _mock_flags(parser)
    _ignored_flags(parser)
    return parser


def _server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group.add_argument("--host", help="address to listen on (default: all)")
    group.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 8000)")
    group.add_argument("--model", help="model path that /v1/models shows as root (default: mock-model)")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may use, first one in answers"
    )
    group.add_argument("--api-key", nargs="+", metavar="KEY", help="ask for one of these as Bearer token under /v1")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="and this key (default: in the certificate's file)")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="check clients' certificates against these")
    group.add_argument(
        "--ssl-cert-reqs", type=int, metavar="N", help="ask clients for a certificate: 0 no (default), 1 maybe, 2 must"
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH|bundled",
        help="a tokenizer.json or its folder; bundled: a real BPE vocabulary of 8192 that comes along (default: one "
        "word per generated id, built in)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="jinja template for chat (default: the tokenizer's, else built in)"
    )
    switches = {
        "--trust-request-chat-template": "let a request bring its own chat template",
        "--enable-prompt-tokens-details": "tell cached tokens in usage",
        "--enable-force-include-usage": "send usage in every stream",
        "--enable-per-request-metrics": "send timings in answers",
        "--enable-request-id-headers": "send X-Request-Id back",
        "--enable-server-load-tracking": "count in-flight requests in /load",
        "--enable-scale-out": "open the render routes and /inference/v1/generate",
        "--enable-tokenizer-info-endpoint": "open /tokenizer_info",
        "--enable-lora": "accept LoRA adapters",
    }
    for flag, text in switches.items():
        group.add_argument(flag, action="store_true", default=None, help=text)
    group.add_argument("--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters that are served from the start")
    group.add_argument(
        "--max-loras", type=int, metavar="N", help="adapters in one batch, as metrics show it (default: 1)"
    )
    group.add_argument("--stream-interval", type=int, metavar="N", help="tokens per streamed chunk (default: 1)")
    group.add_argument(
        "--max-num-queued-reqs", type=int, metavar="N", help="answer 503 beyond this many waiting requests"
    )
    group.add_argument(
        "--max-num-queued-tokens", type=int, metavar="N", help="answer 503 beyond this many waiting prompt tokens"
    )
    group.add_argument(
        "--legacy-metrics",
        action="store_true",
        default=None,
        help="also serve names that vLLM dropped and older routers read",
    )
    group.add_argument(
        "--metrics-staleness-ms", type=int, metavar="MS", help="serve /metrics up to this old (default: 0)"
    )


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def count(text: str) -> int:
    """A whole number, or one with vLLM's suffixes: 8k is 8000, 8K is 8192."""
    scale = _SUFFIXES.get(text[-1:])
    if scale is None:
        return int(text)
    number = float(text[:-1]) * scale
    if not math.isfinite(number) or not number.is_integer():
        raise ValueError(text)
    return int(number)


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    defaults = EngineConfig()
    counts = {
        "block_size": "tokens in one KV block",
        "max_num_seqs": "requests in one batch at most",
        "max_num_batched_tokens": "tokens that one step computes at most, prompts and answers together",
        "max_model_len": "tokens of prompt and answer together",
        "long_prefill_token_threshold": "tokens of one prompt in a step that others wait for; 0: no limit",
    }
    for name, text in counts.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=count, metavar="N", help=f"{text} (default: {getattr(defaults, name)})")
    group.add_argument(
        "--num-gpu-blocks-override",
        type=int,
        metavar="N",
        help="KV blocks, the null block included (default: the preset's)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=count,
        metavar="N",
        help="memory for KV blocks instead, counted in the preset's bytes per token",
    )
    switches = {
        "enable_chunked_prefill": "spread a long prompt over several steps",
        "enable_prefix_caching": "reuse the KV blocks of known prefixes",
    }
    for name, text in switches.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=f"{text} (default: {'on' if getattr(defaults, name) else 'off'})",
        )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="accepted, and answered with a note: steps are scheduled in lockstep (see limits)",
    )
    group.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASH_ALGORITHMS,
        help=f"how blocks are named in events (default: {defaults.prefix_caching_hash_algo})",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        help=f"who waits for whom (default: {defaults.scheduling_policy})",
    )
    group.add_argument(
        "--watermark",
        type=float,
        metavar="X",
        help=f"share of blocks an admission leaves free (default: {defaults.watermark})",
    )
    group.add_argument(
        "--data-parallel-size", "-dp", type=int, metavar="N", help="engine ranks behind this server (default: 1)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="shown in the fingerprint; the preset decides the speed",
    )
    group.add_argument("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="shown in the fingerprint")
    group.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X", help="shown in metrics; the preset decides the capacity"
    )


def _event_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV events")
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="vLLM's object: enable_kv_cache_events, endpoint, replay_endpoint, topic, ...",
    )
    group.add_argument(
        "--kv-event-format",
        choices=EVENT_FORMATS,
        help="events as maps (vLLM 0.33) or as the arrays of older releases (default: maps)",
    )


def _mock_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mock only")
    group.add_argument(
        "--mock-preset",
        metavar="NAME|FILE",
        help=f"step times and KV size: {', '.join(preset_names())}; or a TOML file (default: {DEFAULT_PRESET})",
    )
    group.add_argument(
        "--mock-name",
        metavar="NAME",
        help="name in logs, numbered from 0 if there are several replicas (default: r<port>)",
    )
    group.add_argument("--mock-log-dir", metavar="DIR", help="append request and fleet samples as JSON lines there")
    group.add_argument(
        "--mock-epoch-ns",
        type=int,
        metavar="NS",
        help="time.monotonic_ns() that is instant 0 of the logs (default: start)",
    )
    group.add_argument("--mock-sample-ms", type=int, metavar="MS", help="period of fleet samples (default: 500)")
    group.add_argument("--mock-seed", type=int, metavar="N", help="seed of everything random (default: 0)")
    group.add_argument(
        "--mock-speedup", type=float, metavar="X", help="run the model's time X times faster than the wall (default: 1)"
    )
    group.add_argument(
        "--mock-jitter", type=float, metavar="X", help="vary step times by up to this share, seeded (default: 0)"
    )
    group.add_argument(
        "--mock-clear-event",
        choices=CLEAR_EVENTS,
        help="when AllBlocksCleared is sent after a reset (default: next-step, as vLLM)",
    )
    group.add_argument(
        "--mock-fault",
        action="append",
        metavar="NAME=VALUE",
        help=f"spoil requests, connections or events, also at run time by POST /mock/faults; may be repeated: "
        f"{', '.join(Faults.__struct_fields__)}",
    )
    group.add_argument(
        "--mock-report-top-k", type=int, metavar="K", help="prefixes that GET /prefix_cache_state lists (default: 100)"
    )
    group.add_argument(
        "--mock-first-chunk-tokens",
        type=int,
        metavar="N",
        help="hold a stream's first N tokens back and send them as one chunk (default: 1)",
    )
    group.add_argument(
        "--mock-reasoning-tokens",
        type=int,
        metavar="N",
        help="the first N tokens of a chat answer come as reasoning, as with a --reasoning-parser (default: 0)",
    )
    group.add_argument(
        "--replicas-per-process",
        type=int,
        metavar="N",
        help="serve N replicas on consecutive ports from one process (default: 1)",
    )


_IGNORED_VALUES = (
    "--dtype", "--quantization", "--load-format", "--revision", "--kv-cache-dtype", "--seed", "--uvicorn-log-level",
    "--attention-backend", "--max-logprobs", "--reasoning-parser", "--tool-call-parser", "--api-server-count",
    "--tokenizer-mode", "--generation-config", "--compilation-config", "--distributed-executor-backend",
)  # fmt: skip
_IGNORED_SWITCHES = (
    "--trust-remote-code", "--enforce-eager", "--disable-log-requests", "--disable-log-stats", "--enable-log-requests",
    "--no-enable-log-requests", "--disable-uvicorn-access-log", "--enable-auto-tool-choice", "--enable-sleep-mode",
    "--enable-expert-parallel",
)  # fmt: skip


def _ignored_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "accepted for vLLM's sake, without effect here", " ".join((*_IGNORED_VALUES, *_IGNORED_SWITCHES))
    )
    for flag in _IGNORED_VALUES:
        group.add_argument(flag, help=argparse.SUPPRESS)
    for flag in _IGNORED_SWITCHES:
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def _kv_events(text: str | None) -> KvEventsConfig:
    if text is None:
        return KvEventsConfig()
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        keys = ", ".join(KvEventsConfig.__struct_fields__)
        raise ConfigError(f"--kv-events-config {text}: {error}; give a JSON object with keys from {keys}") from error
    publisher = config.publisher or ("zmq" if config.enable_kv_cache_events else "null")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"--kv-events-config: no publisher named {publisher!r}; choose zmq or null")
    return msgspec.structs.replace(config, publisher=publisher)


def _lora_modules(entries: Sequence[str]) -> tuple[tuple[str, str], ...]:
    modules = []
    for entry in entries:
        name, equals, path = entry.partition("=")
        if entry.startswith("{"):
            try:
                given = msgspec.json.decode(entry, type=dict[str, Any])
                name, equals, path = str(given["name"]), "=", str(given["path"])
            except (msgspec.DecodeError, KeyError) as error:
                raise ConfigError(f"--lora-modules {entry}: give an object with name and path, or NAME=PATH") from error
        if not (name and equals and path):
            raise ConfigError(f"--lora-modules {entry}: give NAME=PATH")
        modules.append((name, path))
    return tuple(modules)


def parse_flags(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> tuple[ServerOptions, EngineConfig]:
    """The server's and the engine's options; the preset gives the block count unless a flag does."""
    given = vars(_parser().parse_args(argv))
    options = _server_options(given, env)
    preset = load_preset(options.preset)
    engine_fields = set(EngineConfig.__struct_fields__)
    engine = {name: value for name, value in given.items() if name in engine_fields and value is not None}
    block_size = engine.get("block_size", EngineConfig().block_size)
    if block_size < 1:
        raise ConfigError(f"--block-size {block_size}: give at least 1")
    blocks = preset.blocks_of(block_size)
    memory = given["kv_cache_memory_bytes"]
    if memory is not None:
        blocks = memory // (preset.kv_bytes_per_token * block_size)
        if blocks < 2:
            least = 2 * preset.kv_bytes_per_token * block_size
            raise ConfigError(f"--kv-cache-memory-bytes {memory} holds no two blocks of {preset.name}: give {least}")
    override = options.num_gpu_blocks_override
    engine["num_gpu_blocks"] = max(2, blocks) if override is None else override
    config = EngineConfig(**engine)
    batched = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    return options, msgspec.structs.replace(
        config, max_num_batched_tokens=batched, max_num_seqs=min(config.max_num_seqs, batched)
    )


def _seconds(name: str, env: Mapping[str, str]) -> float | None:
    text = env.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text}: give whole seconds, at least 1, or unset it")
    return float(text)


def _server_options(given: Mapping[str, Any], env: Mapping[str, str]) -> ServerOptions:
    renamed = {
        "mock_preset": "preset", "mock_name": "name", "mock_log_dir": "log_dir", "mock_epoch_ns": "epoch_ns",
        "mock_sample_ms": "sample_ms", "mock_seed": "seed", "mock_speedup": "speedup", "mock_jitter": "jitter",
        "mock_clear_event": "clear_event", "mock_report_top_k": "report_top_k",
        "mock_first_chunk_tokens": "first_chunk_tokens", "mock_reasoning_tokens": "reasoning_tokens",
    }  # fmt: skip
    fields = set(ServerOptions.__struct_fields__) - {"seed", "name", "preset"}
    chosen = {renamed.get(name, name): value for name, value in given.items() if name in renamed or name in fields}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    chosen["model"] = given["model"] or given["model_tag"] or ServerOptions().model
    chosen["served_model_name"] = tuple(given["served_model_name"] or ())
    key = env.get("VLLM_API_KEY")
    chosen["api_keys"] = tuple(given["api_key"] or ((key,) if key else ()))
    chosen["lora_modules"] = _lora_modules(given["lora_modules"] or ())
    chosen["faults"] = parse_faults(given["mock_fault"] or ())
    chosen["kv_events"] = _kv_events(given["kv_events_config"])
    chosen["block_size_given"] = given["block_size"] is not None
    chosen["dev_mode"] = env.get("VLLM_SERVER_DEV_MODE", "0") == "1"
    chosen["keep_alive_s"] = _seconds("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", env)
    chosen["allow_runtime_lora"] = env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() in ("1", "true")
    chosen["int_block_hashes"] = env.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "1"
    chosen["hash_seed"] = env.get("PYTHONHASHSEED") or None
    return ServerOptions(**{name: value for name, value in chosen.items() if value is not None})
