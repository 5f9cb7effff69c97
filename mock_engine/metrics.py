"""Everything that `/metrics` says: vLLM 0.33's names, types, labels and buckets, through prometheus-client.

Values are plain numbers that the driver adds to, a few a step; they become metric families only when somebody
scrapes. Gauges change only when an engine step is processed, as in vLLM, so a request that is queued while the
engine sleeps is not seen. Durations are model time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, exposition, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from mock_engine.metric_names import (
    COUNTERS,
    FINISHED_REASONS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LEGACY_HELP,
    REJECTIONS,
    buckets,
)

# Older client libraries only know the form 0.0.4.
CONTENT_TYPE: str = getattr(exposition, "CONTENT_TYPE_PLAIN_1_0_0", exposition.CONTENT_TYPE_LATEST)
US_PER_S = 1e6


class Histogram:
    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        rows, total = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return rows


@dataclass(frozen=True, slots=True)
class Finished:
    """One request's life, for the observations that are made when it ends. Instants in microseconds."""

    reason: str
    arrived_us: int
    admitted_us: int
    first_token_us: int
    last_token_us: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    preemptions: int


class EngineMetrics:
    """The numbers of one data-parallel rank."""

    def __init__(self, rank: int, max_model_len: int) -> None:
        self.rank = str(rank)
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.gauges = dict.fromkeys(GAUGES, 0.0)
        self.sleep_level: int | None = None
        self.labelled: dict[str, dict[str, float]] = {
            name: dict.fromkeys(values, 0.0) for name, (_, values) in LABELLED_COUNTERS.items()
        }
        self.histograms = {name: Histogram(buckets(name, max_model_len)) for name in HISTOGRAMS}
        self.cache_config: dict[str, str] = {}

    def step(self, running: int, waiting: int, used_share: float) -> None:
        gauges = self.gauges
        gauges["num_requests_running"] = running
        gauges["num_requests_waiting"] = waiting
        gauges["kv_cache_usage_perc"] = used_share

    def tokens(self, iteration_tokens: int, generated: int) -> None:
        """The tokens of one step that gave an output or ended a prefill."""
        self.counters["generation_tokens"] += generated
        self.histograms["iteration_tokens_total"].observe(iteration_tokens)

    def admitted(self, queried: int, hits: int) -> None:
        self.counters["prefix_cache_queries"] += queried
        self.counters["prefix_cache_hits"] += hits
        self.labelled["prompt_tokens_cached_by_source"]["device"] += hits

    def first_token(self, ttft_us: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.histograms["time_to_first_token_seconds"].observe(ttft_us / US_PER_S)
        self.counters["prompt_tokens"] += prompt_tokens
        self.counters["prompt_tokens_cached"] += cached_tokens
        by_source = self.labelled["prompt_tokens_by_source"]
        by_source["local_compute"] += prompt_tokens - cached_tokens
        by_source["local_cache_hit"] += cached_tokens

    def token_gaps(self, gap_us: int, times: int) -> None:
        self.histograms["inter_token_latency_seconds"].observe(gap_us / US_PER_S, times)

    def finished(self, end: Finished) -> None:
        self.labelled["request_success"][end.reason] += 1
        decode_us = end.last_token_us - end.first_token_us
        observed: dict[str, float] = {
            "e2e_request_latency_seconds": (end.last_token_us - end.arrived_us) / US_PER_S,
            "request_queue_time_seconds": (end.admitted_us - end.arrived_us) / US_PER_S,
            "request_inference_time_seconds": (end.last_token_us - end.admitted_us) / US_PER_S,
            "request_prefill_time_seconds": (end.first_token_us - end.admitted_us) / US_PER_S,
            "request_decode_time_seconds": decode_us / US_PER_S,
            "request_time_per_output_token_seconds": decode_us / US_PER_S / max(1, end.output_tokens - 1),
            "request_prompt_tokens": end.prompt_tokens,
            "request_generation_tokens": end.output_tokens,
            "request_params_max_tokens": end.max_tokens,
            "request_num_preemptions": end.preemptions,
            "request_prefill_kv_computed_tokens": end.computed_tokens,
        }
        for name, value in observed.items():
            self.histograms[name].observe(value)

    def group_finished(self, n: int, output_tokens_max: int) -> None:
        """All samples of one prompt have ended."""
        self.histograms["request_params_n"].observe(n)
        self.histograms["request_max_num_generation_tokens"].observe(output_tokens_max)


@dataclass(slots=True)
class HttpMetrics:
    """What the HTTP layer counts, by route; probes are not counted."""

    requests: dict[tuple[str, str, str], float] = field(default_factory=dict)
    request_bytes: dict[str, list[float]] = field(default_factory=dict)
    response_bytes: dict[str, list[float]] = field(default_factory=dict)
    seconds: Histogram = field(default_factory=lambda: Histogram(buckets("http_highr", 0)))
    seconds_by_route: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def add(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        key = (handler, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        for sizes, size in ((self.request_bytes, request_bytes), (self.response_bytes, response_bytes)):
            row = sizes.setdefault(handler, [0.0, 0.0])
            row[0] += 1
            row[1] += size
        self.seconds.observe(seconds)
        route = (handler, method)
        if route not in self.seconds_by_route:
            self.seconds_by_route[route] = Histogram(buckets("http_lowr", 0))
        self.seconds_by_route[route].observe(seconds)


class ReplicaMetrics(Collector):
    """All families of one replica, in the order in which a real server lists them."""

    def __init__(self, model_name: str, ranks: Sequence[EngineMetrics], legacy: bool = False) -> None:
        self.model_name = model_name
        self.ranks = tuple(ranks)
        self.rejections = dict.fromkeys(REJECTIONS, 0.0)
        self.lora: tuple[int, dict[tuple[str, str], float]] | None = (
            None  # (max_loras, {(running, waiting): unix time})
        )
        self.http = HttpMetrics()
        self._legacy = legacy
        self.registry = CollectorRegistry(auto_describe=False)
        GCCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._cached: tuple[float, bytes] | None = None

    def exposition(self, staleness_ms: int = 0) -> bytes:
        """The text form; with a staleness, a text up to so old is served again."""
        now = time.monotonic()
        if self._cached is None or (now - self._cached[0]) * 1000 >= staleness_ms:
            self._cached = (now, generate_latest(self.registry))
        return self._cached[1]

    def load(self, form: str) -> str:
        """What the response header endpoint-load-metrics says, as JSON or TEXT."""
        waiting = float(sum(rank.gauges["num_requests_waiting"] for rank in self.ranks))
        usage = float(sum(rank.gauges["kv_cache_usage_perc"] for rank in self.ranks) / len(self.ranks))
        if form == "JSON":
            return f'JSON {{"named_metrics": {{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}}}'
        return f"TEXT named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges_and_counters()
        yield self._rejections()
        for name, text in HISTOGRAMS.items():
            yield self._histogram(name, text)
        yield self._cache_config()
        if self.lora is not None:
            yield self._lora_info(*self.lora)
        if self._legacy:
            yield from self._legacy_names()
        yield from self._http()

    def _labels(self, rank: EngineMetrics, **more: str) -> list[str]:
        return [value for _, value in sorted({"engine": rank.rank, "model_name": self.model_name, **more}.items())]

    def _gauges_and_counters(self) -> Iterator[Metric]:
        for name in ("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu"):
            yield self._counter(name)
        yield self._gauge("num_requests_running")
        yield self._gauge("num_requests_waiting")
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", GAUGES["num_requests_waiting_by_reason"],
            labels=["engine", "model_name", "reason"],
        )  # fmt: skip
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", GAUGES["engine_sleep_state"], labels=["engine", "model_name", "sleep_state"]
        )
        for rank in self.ranks:
            reasons.add_metric(self._labels(rank, reason="capacity"), rank.gauges["num_requests_waiting"])
            reasons.add_metric(self._labels(rank, reason="deferred"), 0.0)
            level = rank.sleep_level
            states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
            for state, on in states.items():
                sleep.add_metric(self._labels(rank, sleep_state=state), float(on))
        yield reasons
        yield sleep
        yield self._gauge("kv_cache_usage_perc")
        for name in COUNTERS:
            if not name.startswith("estimated_"):
                yield self._counter(name)
                if name in ("prompt_tokens", "prompt_tokens_cached"):
                    yield self._labelled_counter(f"{name}_by_source")
        yield self._labelled_counter("request_success")

    def _gauge(self, name: str) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", GAUGES[name], labels=["engine", "model_name"])
        for rank in self.ranks:
            family.add_metric(self._labels(rank), rank.gauges[name])
        return family

    def _counter(self, name: str) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", COUNTERS[name], labels=["engine", "model_name"])
        for rank in self.ranks:
            family.add_metric(self._labels(rank), rank.counters[name])
        return family

    def _labelled_counter(self, name: str) -> Metric:
        text, values = LABELLED_COUNTERS[name]
        label = "finished_reason" if values is FINISHED_REASONS else "source"
        labels = sorted(["engine", "model_name", label])
        family = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for rank in self.ranks:
            for value, count in rank.labelled[name].items():
                family.add_metric(self._labels(rank, **{label: value}), count)
        return family

    def _rejections(self) -> Metric:
        text = "Number of admission attempts rejected by a queue limit, by reason."
        family = CounterMetricFamily("vllm:admission_rejections", text, labels=["model_name", "reason"])
        for reason, count in self.rejections.items():
            family.add_metric([self.model_name, reason], count)
        return family

    def _histogram(self, name: str, text: str, source: str | None = None) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["engine", "model_name"])
        for rank in self.ranks:
            values = rank.histograms[source or name]
            family.add_metric(self._labels(rank), buckets=values.cumulative(), sum_value=values.sum)
        return family

    def _cache_config(self) -> Metric:
        names = sorted({"engine", *self.ranks[0].cache_config})
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=names)
        for rank in self.ranks:
            family.add_metric([{**rank.cache_config, "engine": rank.rank}[name] for name in names], 1.0)
        return family

    def _lora_info(self, max_loras: int, seen: Mapping[tuple[str, str], float]) -> Metric:
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
        for (running, waiting), at in seen.items():
            family.add_metric([str(max_loras), running, waiting], at)
        return family

    def _legacy_names(self) -> Iterator[Metric]:
        labels = ["engine", "model_name"]
        for name, text in LEGACY_HELP.items():
            if name == "time_per_output_token_seconds":
                yield self._histogram(name, text, source="inter_token_latency_seconds")
                continue
            kind = (
                CounterMetricFamily
                if name in ("gpu_prefix_cache_hits", "gpu_prefix_cache_queries")
                else GaugeMetricFamily
            )
            family = kind(f"vllm:{name}", text, labels=labels)
            for rank in self.ranks:
                hits, queries = rank.counters["prefix_cache_hits"], rank.counters["prefix_cache_queries"]
                value = {
                    "gpu_cache_usage_perc": rank.gauges["kv_cache_usage_perc"],
                    "gpu_prefix_cache_hits": hits,
                    "gpu_prefix_cache_queries": queries,
                    "gpu_prefix_cache_hit_rate": hits / queries if queries else 0.0,
                }.get(name, 0.0)
                family.add_metric(self._labels(rank), value)
            yield family

    def _http(self) -> Iterator[Metric]:
        text = "Total number of requests by method, status and handler."
        total = CounterMetricFamily("http_requests", text, labels=["handler", "method", "status"])
        for key, count in self.http.requests.items():
            total.add_metric(key, count)
        yield total
        directions = (
            ("request", "incoming requests", self.http.request_bytes),
            ("response", "outgoing responses", self.http.response_bytes),
        )
        for name, what, sizes in directions:
            text = (
                f"Content length of {what} by handler. Only value of header is respected. Otherwise ignored. "
                f"No percentile calculated. "
            )
            summary = Metric(f"http_{name}_size_bytes", text, "summary")
            for handler, (answers, size) in sizes.items():
                summary.add_sample(f"http_{name}_size_bytes_count", {"handler": handler}, answers)
                summary.add_sample(f"http_{name}_size_bytes_sum", {"handler": handler}, size)
            yield summary
        text = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
        fine = HistogramMetricFamily("http_request_duration_highr_seconds", text)
        fine.add_metric([], buckets=self.http.seconds.cumulative(), sum_value=self.http.seconds.sum)
        yield fine
        text = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "
        coarse = HistogramMetricFamily("http_request_duration_seconds", text, labels=["handler", "method"])
        for route, seconds in self.http.seconds_by_route.items():
            coarse.add_metric(route, buckets=seconds.cumulative(), sum_value=seconds.sum)
        yield coarse
