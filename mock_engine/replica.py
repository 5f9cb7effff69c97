"""One replica: its engine ranks with their drivers and publishers, its models, its switches and its logs.

The HTTP routes read and turn this; it knows no HTTP. Several replicas can live in one process, each with its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from mock_engine.chat import load_template
from mock_engine.clock import Clock
from mock_engine.config import EngineConfig
from mock_engine.driver import Driver, Publish
from mock_engine.engine import Engine
from mock_engine.errors import ConfigError, RequestError
from mock_engine.events import KvEvent
from mock_engine.hashing import BlockHasher
from mock_engine.log import ReplicaLog
from mock_engine.metrics import EngineMetrics, ReplicaMetrics
from mock_engine.models import Models
from mock_engine.options import VERSION, ServerOptions
from mock_engine.presets import load_preset
from mock_engine.publisher import REPLAY_POLL_S, Publisher
from mock_engine.streams import Choice
from mock_engine.tokenizer import load_tokenizer
from mock_engine.wire import encode_batch

WAITING_WEIGHT = 4  # vLLM weighs a waiting request four times a running one when it chooses a rank


class Replica:
    def __init__(self, options: ServerOptions, config: EngineConfig, *, port: int, clock: Clock) -> None:
        self.options = options
        self.config = config
        self.port = port
        self.clock = clock
        self.name = options.name or f"r{port}"
        self.preset = load_preset(options.preset)
        self.rng = Random(f"{options.seed}/{self.name}/answers")
        self.tokenizer = load_tokenizer(options.tokenizer)
        self.template = load_template(options.chat_template, self.tokenizer.chat_template)
        self.models = Models(options.model, options.served_model_name, config.max_model_len, options.lora_modules)
        self.fingerprint = _fingerprint(options, config)
        self.hasher = BlockHasher(
            config.prefix_caching_hash_algo, seed=options.hash_seed, rng=Random(f"{options.seed}/none-hash")
        )
        self.started_at = time.time()
        self.in_flight = 0  # generation requests whose answer has not ended
        self.paused: str | None = None  # how: abort, wait or keep
        self.sleep_level: int | None = None
        self.log = ReplicaLog(options.log_dir, self.name)
        self._sample_timer: asyncio.TimerHandle | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self.publishers: list[Publisher] = []
        engines = range(options.data_parallel_size)
        self._metrics = [EngineMetrics(rank, config.max_model_len) for rank in engines]
        self.metrics = ReplicaMetrics(self.models.first, self._metrics, options.legacy_metrics)
        for rank_metrics in self._metrics:
            rank_metrics.cache_config = _cache_config(options, config)
        if options.enable_lora or options.lora_modules:
            self.metrics.lora = (options.max_loras, {})
        self.drivers: list[Driver] = []
        try:
            self.drivers += [self._make_driver(rank) for rank in engines]
        except ConfigError:  # one rank's endpoint is taken: let go of the others'
            self.close()
            raise

    def _make_driver(self, rank: int) -> Driver:
        events = self.options.kv_events
        publish: Publish = _discard
        if events.enable_kv_cache_events and events.publisher == "zmq":
            publisher = Publisher(events, rank + (self.port - self.options.port) * self.options.data_parallel_size)
            self.publishers.append(publisher)
            publish = _Encoder(publisher, rank, self.options)
        cost = replace(self.preset.cost, jitter=self.options.jitter)
        engine = Engine(self.config, cost=cost, rng=Random(f"{self.options.seed}/{self.name}/{rank}"))
        return Driver(engine, self.clock, self._metrics[rank], publish, self.log.ended, self.options.clear_event)

    def start(self) -> None:
        """Starts the periodic work: fleet samples and the replay socket."""
        if self.log.samples:
            self._sample_at(self._next_sample_us())
        if any(publisher.answers_replays for publisher in self.publishers):
            self._poll_replays()

    def close(self) -> None:
        for timer in (self._sample_timer, self._replay_timer):
            if timer is not None:
                timer.cancel()
        for driver in self.drivers:
            driver.close()
        for publisher in self.publishers:
            publisher.close()
        self.log.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def rank_for(self, asked: int | None) -> Driver:
        """The rank that was asked for, else the least loaded one."""
        if asked is not None:
            if not 0 <= asked < len(self.drivers):
                raise RequestError(400, f"data_parallel_rank {asked} is out of range [0, {len(self.drivers)}).")
            return self.drivers[asked]
        if len(self.drivers) == 1:
            return self.drivers[0]
        return min(self.drivers, key=_weighted_load)

    def check_queue(self, prompt_tokens: int) -> None:
        """Refuses a request that the queue limits keep out."""
        if self.options.max_num_queued_reqs is None and self.options.max_num_queued_tokens is None:
            return
        waiting = [choice for driver in self.drivers for choice in driver.choices if choice.admitted_us is None]
        reqs_max, tokens_max = self.options.max_num_queued_reqs, self.options.max_num_queued_tokens
        queued_tokens = sum(choice.request.sequence.prompt_tokens for choice in waiting)
        if reqs_max is not None and len(waiting) >= reqs_max:
            self._reject("max_num_queued_reqs", f"{len(waiting)} requests are queued, the limit is {reqs_max}")
        if tokens_max is not None and queued_tokens + prompt_tokens > tokens_max:
            self._reject(
                "max_num_queued_tokens", f"{queued_tokens} prompt tokens are queued, the limit is {tokens_max}"
            )

    def _reject(self, reason: str, what: str) -> None:
        self.metrics.rejections[reason] += 1
        raise RequestError(503, f"The server is overloaded: {what}. Please retry later.", "Service Unavailable")

    def dropped(self, choice: Choice) -> None:
        """A client left before its answer ended."""
        in_engine = any(driver.drop(choice) for driver in self.drivers)
        if in_engine or choice.finish_reason is None:
            self.log.ended(choice, "abort")

    def note_loras(self) -> None:
        """Adapters with running and waiting requests, as lora_requests_info tells them."""
        if self.metrics.lora is None:
            return
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for driver in self.drivers:
            for choice in driver.choices:
                lora = getattr(choice.request.sequence, "lora", None)
                if lora is not None:
                    names[choice.admitted_us is not None].add(lora.name)
        key = (",".join(sorted(names[True])), ",".join(sorted(names[False])))
        self.metrics.lora[1][key] = time.time()

    # -- switches --------------------------------------------------------------------------------------------------

    def abort_all(self, *, counted: bool, only: Sequence[str] | None = None) -> int:
        """Ends in-flight answers with finish reason abort; `only` names response or client ids."""
        return sum(
            driver.abort([choice for choice in driver.choices if _named(choice, only)], counted=counted)
            for driver in self.drivers
        )

    def reset_prefix_cache(self) -> bool:
        done = [driver.reset_prefix_cache() for driver in self.drivers]  # every rank, whatever the first one says
        return all(done)

    async def pause(self, mode: str, clear_cache: bool = True) -> None:
        self.paused = mode
        if mode == "keep":
            for driver in self.drivers:
                driver.freeze()
            return
        if mode == "abort":
            self.abort_all(counted=True)
        else:
            while any(driver.choices for driver in self.drivers):
                await asyncio.sleep(0.005)
        if clear_cache:
            self.reset_prefix_cache()

    def resume(self) -> None:
        self.paused = None
        if self.sleep_level is None:
            for driver in self.drivers:
                driver.thaw()

    def sleep(self, level: int) -> None:
        self.abort_all(counted=True)
        self.reset_prefix_cache()
        self.sleep_level = level
        for driver, metrics in zip(self.drivers, self._metrics, strict=True):
            driver.freeze()
            metrics.sleep_level = level or None

    def wake_up(self) -> None:
        self.sleep_level = None
        for driver, metrics in zip(self.drivers, self._metrics, strict=True):
            metrics.sleep_level = None
            if self.paused is None:
                driver.thaw()

    # -- periodic --------------------------------------------------------------------------------------------------

    def _next_sample_us(self) -> int:
        period_us = self.options.sample_ms * 1000
        return max(0, self.clock.now_us() // period_us + 1) * period_us

    def _sample_at(self, at_us: int) -> None:
        loop = asyncio.get_running_loop()

        def take() -> None:
            self.log.sample(at_us, self.drivers)
            self._sample_at(max(at_us + self.options.sample_ms * 1000, self._next_sample_us()))

        self._sample_timer = loop.call_at(self.clock.loop_time(at_us), take)

    def _poll_replays(self) -> None:
        for publisher in self.publishers:
            publisher.poll()
        self._replay_timer = asyncio.get_running_loop().call_later(REPLAY_POLL_S, self._poll_replays)


class _Encoder:
    """Turns a step's events into a batch on the wire."""

    def __init__(self, publisher: Publisher, rank: int, options: ServerOptions) -> None:
        self._publisher = publisher
        self._rank = rank
        self._form = options.kv_event_format
        self._int_hashes = options.int_block_hashes

    def __call__(self, events: Sequence[KvEvent]) -> None:
        self._publisher.publish(
            encode_batch(time.time(), events, self._rank, form=self._form, int_hashes=self._int_hashes)
        )


def _discard(events: Sequence[KvEvent]) -> None:
    return None


def _named(choice: Choice, only: Sequence[str] | None) -> bool:
    response_id = choice.reply.bodies.response_id
    names = (response_id, response_id.partition("-")[2], choice.request_id, choice.reply.client_id)
    return only is None or any(name in only for name in names)


def _weighted_load(driver: Driver) -> int:
    running, waiting = driver.load
    return running + WAITING_WEIGHT * waiting


def _fingerprint(options: ServerOptions, config: EngineConfig) -> str:
    sizes = {
        "tp": options.tensor_parallel_size,
        "pp": options.pipeline_parallel_size,
        "dp": options.data_parallel_size,
    }
    parts = "".join(f"-{name}{size}" for name, size in sizes.items() if size > 1)
    digest = hashlib.sha256(f"{options.model} {config} {options.preset}".encode()).hexdigest()
    return f"vllm-{VERSION}{parts}-{digest[:8]}"


def _cache_config(options: ServerOptions, config: EngineConfig) -> dict[str, str]:
    """The labels of cache_config_info: what this engine decides, and vLLM's defaults for what it does not have."""
    usable_tokens = config.num_gpu_blocks * config.block_size
    fixed = {
        "_block_size_resolved": "True", "cache_dtype": "auto", "cache_hit_alignment_tokens": "None",
        "enable_mamba_shared_prefix_checkpoint": "False", "hash_block_size": "None", "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None", "kv_cache_memory_bytes": "None",
        "kv_offloading_backend": "native", "kv_offloading_size": "None", "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None", "mamba_cache_dtype": "auto", "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None", "mamba_ssm_cache_dtype": "auto", "num_cpu_blocks": "None",
        "prefix_cache_retention_interval": "0", "prefix_match_unit": "None", "replayssm_buffer_len": "16",
        "simple_cpu_offload_num_blocks": "None", "skip_page_size_padded": "None", "sliding_window": "None",
        "swa_bounded_replay": "True", "use_kda_recoverssm": "False", "use_replayssm": "False",
    }  # fmt: skip
    return {
        **fixed,
        "block_size": str(config.block_size),
        "effective_attention_block_size": str(config.block_size),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(options.gpu_memory_utilization),
        "kv_cache_max_concurrency": str(usable_tokens / config.max_model_len),
        "kv_cache_size_tokens": str(usable_tokens),
        "num_gpu_blocks": str(config.num_gpu_blocks),
        "num_gpu_blocks_override": str(options.num_gpu_blocks_override),
        "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
        "user_specified_block_size": str(options.block_size_given),
    }
