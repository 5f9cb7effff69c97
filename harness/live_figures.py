"""Figures of a test while it runs: latencies as histograms that several processes can add up.

Pure. For watching only; reports are made from rows. A bucket is 2 % wide, so a quantile is within 1 % of a request's
own figure. Everything only grows, so a window is the difference of two states.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from typing import Any

from harness.load_rows import Row
from harness.sse import OK

_WIDTH = math.log(1.02)
WINDOW_S = 10.0


class Figures:
    """Sums over requests. `pack` and `merge` carry them between processes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """ok, failed: requests. prompt, cached: tokens of prompts whose hits are known, and those hits. ttft_us,
        tpot_us: sums of what the histograms hold."""
        self.ttft: Counter[int] = Counter()
        self.tpot: Counter[int] = Counter()

    def add(self, row: Row) -> None:
        """One request that was sent and has ended; warm-up counts too, since this shows what is going on."""
        if row.sent_us is None:
            return
        self.counts["ok" if row.status == OK else "failed"] += 1
        if row.status != OK or row.first_token_us is None or row.last_token_us is None:
            return
        self._latency("ttft", self.ttft, row.first_token_us - row.sent_us)
        if row.output_tokens and row.output_tokens > 1:
            self._latency("tpot", self.tpot, (row.last_token_us - row.first_token_us) / (row.output_tokens - 1))
        if row.cached_tokens is not None and row.prompt_tokens:
            self.counts["prompt"] += row.prompt_tokens
            self.counts["cached"] += row.cached_tokens

    def _latency(self, name: str, histogram: Counter[int], us: float) -> None:
        histogram[math.floor(math.log(max(us, 1.0)) / _WIDTH)] += 1
        self.counts[f"{name}_us"] += round(us)

    def mean_ms(self, name: str) -> float | None:
        histogram: Counter[int] = getattr(self, name)
        return self.counts[f"{name}_us"] / histogram.total() / 1000 if histogram else None

    def pack(self) -> dict[str, list[tuple[Any, int]]]:
        """Plain data for a message."""
        return {name: list(getattr(self, name).items()) for name in ("counts", "ttft", "tpot")}

    def merge(self, packed: dict[str, Any]) -> None:
        for name in ("counts", "ttft", "tpot"):
            mine: Counter[Any] = getattr(self, name)
            for key, count in packed.get(name, ()):
                mine[key] += count

    def copy(self) -> Figures:
        new = Figures()
        new.merge(self.pack())
        return new

    def since(self, before: Figures) -> Figures:
        """What came after an earlier state of the same figures."""
        new = Figures()
        new.counts, new.ttft, new.tpot = (
            self.counts - before.counts,
            self.ttft - before.ttft,
            self.tpot - before.tpot,
        )
        return new

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that answers say came from a cache; None where none says so."""
        return self.counts["cached"] / self.counts["prompt"] if self.counts["prompt"] else None


class Window:
    """The figures of the last seconds, from states noted as time goes on."""

    def __init__(self, seconds: float = WINDOW_S) -> None:
        self._seconds = seconds
        self._states: deque[tuple[float, Figures]] = deque([(-math.inf, Figures())])

    def note(self, now_s: float, figures: Figures) -> Figures:
        """Notes the present state and returns what came in the window until now."""
        self._states.append((now_s, figures.copy()))
        while len(self._states) > 1 and self._states[1][0] <= now_s - self._seconds:
            self._states.popleft()
        return figures.since(self._states[0][1])


def quantile_ms(histogram: Counter[int], share: float) -> float | None:
    """Nearest rank, in milliseconds, within 1 %; None without samples."""
    rank = math.ceil(share * histogram.total())
    for bucket in sorted(histogram):
        rank -= histogram[bucket]
        if rank <= 0:
            return math.exp((bucket + 0.5) * _WIDTH) / 1000
    return None


_SUMS = {
    "ttft_s": "vllm:time_to_first_token_seconds_sum",
    "ttft_n": "vllm:time_to_first_token_seconds_count",
    "tpot_s": "vllm:request_time_per_output_token_seconds_sum",
    "tpot_n": "vllm:request_time_per_output_token_seconds_count",
    "hits": "vllm:prefix_cache_hits_total",
    "queries": "vllm:prefix_cache_queries_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
_LINE = re.compile(r"^([\w:]+)(?:\{[^}]*\})? ([-+\d.eE]+)$", re.MULTILINE)


def engine_figures(metrics: str) -> dict[str, float]:
    """What an engine's `/metrics` says of itself, summed over its ranks (`kv_usage` is their mean); a figure that it
    does not give is missing."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(metrics):
        found.setdefault(name, []).append(float(value))
    sums = {key: sum(found[name]) for key, name in _SUMS.items() if name in found}
    if "kv_usage" in sums:
        sums["kv_usage"] /= len(found[_SUMS["kv_usage"]])
    return sums
