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
from mock_engine.driver import Driver, discard
from mock_engine.engine import Engine
from mock_engine.errors import RequestError
from mock_engine.faults import FaultPlan
from mock_engine.hashing import BlockHasher
from mock_engine.injection import Injector
from mock_engine.log import ReplicaLog
from mock_engine.metrics import EngineMetrics, ReplicaMetrics
from mock_engine.models import Models
from mock_engine.options import VERSION, ServerOptions
from mock_engine.outbox import Outbox
from mock_engine.prefix_report import PrefixReport
from mock_engine.presets import load_preset
from mock_engine.publisher import REPLAY_POLL_S, Publisher
from mock_engine.streams import Choice
from mock_engine.tokenizer import load_tokenizer

WAITING_WEIGHT = 4  # vLLM weighs a waiting request four times a running one when it chooses a rank


class Replica:
    def __init__(self, options: ServerOptions, config: EngineConfig, *, port: int, clock: Clock) -> None:
        self.options = options
        self.config = config
        self.port = port
        self.clock = clock
        at = port - options.port
        self.name = f"r{port}" if options.name is None else options.name
        if options.name is not None and options.replicas_per_process > 1:
            self.name = f"{options.name}{at}"  # so that each has logs and chance of its own
        self.preset = load_preset(options.preset)
        self.rng = Random(f"{options.seed}/{self.name}/answers")
        self.tokenizer = load_tokenizer(options.tokenizer)
        self.template = load_template(options.chat_template, self.tokenizer.chat_template)
        self.fingerprint = _fingerprint(options, config)
        self.in_flight = 0  # generation requests whose answer has not ended
        self.restarts = 0
        self._generations = 0  # of earlier lives' prefix reports
        self.log = ReplicaLog(options.log_dir, self.name)
        self.faults = Injector(FaultPlan(options.faults, f"{options.seed}/{self.name}/faults"), self.log, clock)
        self._sample_timer: asyncio.TimerHandle | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self.outboxes: list[Outbox] = []
        self.drivers: list[Driver] = []
        try:
            if options.kv_events.enable_kv_cache_events and options.kv_events.publisher == "zmq":
                for rank in range(options.data_parallel_size):
                    self.outboxes.append(self._make_outbox(rank))
            self._boot()
        except BaseException:  # one rank's endpoint is taken: let go of the others'
            self.close()
            raise

    def _make_outbox(self, rank: int) -> Outbox:
        ports_on = rank + (self.port - self.options.port) * self.options.data_parallel_size
        publisher = Publisher(self.options.kv_events, ports_on)
        return Outbox(publisher, rank, self.options, self.faults.plan, self.clock, self.faults.note)

    def _boot(self) -> None:
        """What a process makes when it starts: nothing of an earlier life is left, but for what counts lives."""
        options, config = self.options, self.config
        life = f"/{self.restarts}" if self.restarts else ""
        self.models = Models(options.model, options.served_model_name, config.max_model_len, options.lora_modules)
        self.hasher = BlockHasher(
            config.prefix_caching_hash_algo, seed=options.hash_seed, rng=Random(f"{options.seed}/none-hash{life}")
        )
        self.paused: str | None = None  # how: abort, wait or keep
        self.sleep_level: int | None = None
        self._metrics = [EngineMetrics(rank, config.max_model_len) for rank in range(options.data_parallel_size)]
        self.metrics = ReplicaMetrics(self.models.first, self._metrics, options.legacy_metrics)
        for rank_metrics in self._metrics:
            rank_metrics.cache_config = _cache_config(options, config)
        if options.enable_lora or options.lora_modules:
            self.metrics.lora = (options.max_loras, {})
        self.drivers = [self._make_driver(rank, life) for rank in range(options.data_parallel_size)]
        self.prefix_report = PrefixReport(
            [driver.prefixes for driver in self.drivers], options.report_top_k, past_generations=self._generations
        )

    def _make_driver(self, rank: int, life: str) -> Driver:
        cost = replace(self.preset.cost, jitter=self.options.jitter)
        engine = Engine(self.config, cost=cost, rng=Random(f"{self.options.seed}/{self.name}/{rank}{life}"))
        outbox = self.outboxes[rank] if self.outboxes else None
        return Driver(
            engine,
            self.clock,
            self._metrics[rank],
            discard if outbox is None else outbox,
            self.log.ended,
            self.options.clear_event,
            None if outbox is None else outbox.room,
        )

    @property
    def death(self) -> str | None:
        """Why an engine of this replica is dead, if one is; nothing but a restart helps."""
        return next((driver.death for driver in self.drivers if driver.death is not None), None)

    @property
    def publishers(self) -> list[Publisher]:
        return [outbox.publisher for outbox in self.outboxes]

    def start(self) -> None:
        """Starts the periodic work: fleet samples and the replay socket."""
        if self.log.samples:
            self._sample_at(self._next_sample_us())
        if any(publisher.answers_replays for publisher in self.publishers):
            self._poll_replays()
        for outbox in self.outboxes:
            outbox.started_us = self.clock.now_us()

    def restart(self) -> None:
        """As the process would in place: requests are gone unanswered, the cache is empty and no event says so, event
        sequences and counters begin at 0. The server cuts the connections."""
        for driver in self.drivers:
            driver.close()
        self.restarts += 1
        self._generations = self.prefix_report.generation + 1
        starts_us = self.clock.now_us() + self.faults.plan.faults.slow_start_ms * 1000
        for outbox in self.outboxes:
            outbox.restart(starts_us)
        self._boot()

    def close(self) -> None:
        for timer in (self._sample_timer, self._replay_timer):
            if timer is not None:
                timer.cancel()
        for driver in self.drivers:
            driver.close()
        for outbox in self.outboxes:
            outbox.close()
            outbox.publisher.close()
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

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """`preempt` throws out what runs first, so that no block is held."""
        done = [driver.reset_prefix_cache(preempt) for driver in self.drivers]  # every rank, whatever the first says
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
            await self._drained()
        if clear_cache:
            self.reset_prefix_cache()

    async def _drained(self) -> None:
        while any(driver.choices for driver in self.drivers):
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        self.paused = None
        if self.sleep_level is None:
            for driver in self.drivers:
                driver.thaw()

    async def sleep(self, level: int, mode: str) -> None:
        """`mode` says what becomes of requests in flight, as for a pause."""
        if mode == "wait":
            await self._drained()
        elif mode == "abort":
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
