"""The one table of metrics: name, unit, direction, formula, when it is null.

Terminal, JSON, HTML, gate and glossary are all fed from here, so a figure has the same name, unit and meaning wherever
it is shown. Latency metrics are taken over successes of the steady phase; S is the instant a request was sent, F its
first token, L its last token, E the end of its stream, n its output tokens. Words whose meaning differs between
load tools ("ITL", "latency") are not used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reports.errors import UnknownMetricError

Direction = Literal["lower", "higher", "none"]
Kind = Literal["distribution", "number", "mapping"]

PERCENTILES = (50, 90, 95, 99)
DISTRIBUTION_KEYS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES), "max", "count")


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    unit: str  # ms, share (0..1, shown as percent), points, 1/s, tokens/s, tokens, blocks, requests, count, replica-s
    direction: Direction  # which way is better; none: neither is
    kind: Kind
    formula: str
    null_when: str
    decimals: int = 1
    keys: tuple[str, ...] = ()  # parts of a mapping that have a dotted address

    def addresses(self) -> tuple[str, ...]:
        """Every dotted address under which a single number of this metric is found."""
        if self.kind == "number":
            return (self.name,)
        return tuple(f"{self.name}.{key}" for key in (DISTRIBUTION_KEYS if self.kind == "distribution" else self.keys))


def _latency(name: str, title: str, formula: str, null_when: str, decimals: int = 1) -> Metric:
    return Metric(name, title, "ms", "lower", "distribution", formula, null_when, decimals)


_TABLE = (
    _latency(
        "ttft_ms",
        "TTFT",
        "F - S: sent to first token. A role-only, usage or keep-alive chunk is no token, an empty-text "
        "token is (vLLM's rule)",
        "no success",
    ),
    _latency(
        "ttst_ms",
        "Second token",
        "second token chunk - F: the hand-over from prefill to decode (as aiperf)",
        "no answer of two chunks",
    ),
    _latency(
        "tpot_ms",
        "TPOT",
        "(L - F) / (n - 1), immune to chunking (as vLLM); answers of one token have none",
        "no answer of two tokens",
        2,
    ),
    _latency(
        "inter_chunk_latency_ms",
        "Chunk gap",
        "gaps between token chunks as they arrived, pooled over requests; chunks are not tokens",
        "gaps were not recorded",
        2,
    ),
    _latency("ntpot_ms", "Normalized TPOT", "(L - S) / n: TTFT shared out over the tokens", "no success", 2),
    _latency("e2e_ms", "End to end", "L - S; a trailing usage chunk is not a user's latency", "no success"),
    _latency(
        "session_e2e_ms",
        "Session end to end",
        "L of a session's last turn - S of its first, think time included; for a rollout its whole time. "
        "Only sessions without a failed turn",
        "no whole session",
    ),
    _latency(
        "step_makespan_ms",
        "Step makespan",
        "over a rollout step, the last L - the first S: its slowest member sets it. Only steps without a failed turn",
        "no rollout steps",
    ),
    _latency(
        "group_completion_ms",
        "Group completion",
        "over a group of rollouts (samples of one prompt) of a step, the last L - the first S: its slowest member sets "
        "it. Only groups without a failed turn",
        "no rollout steps, or rollouts have no group",
    ),
    _latency(
        "queue_ms",
        "Engine queue",
        "admitted by the engine - routed (sent, where the router does not say): the wait before the first "
        "scheduled step",
        "the engine does not tell",
    ),
    _latency(
        "routing_ms",
        "Routing",
        "decision made - S: receipt, tokenisation and choice inside the router",
        "the router does not tell, or a simulation",
        2,
    ),
    _latency(
        "sched_lag_ms",
        "Send lag",
        "S - scheduled, over every steady request that was sent: the load generator's own delay",
        "nothing was scheduled",
        2,
    ),
    _latency(
        "ttft_from_schedule_ms",
        "TTFT from schedule",
        "F - scheduled: TTFT corrected for coordinated omission",
        "nothing was scheduled",
    ),
    _latency("e2e_from_schedule_ms", "End to end from schedule", "L - scheduled", "nothing was scheduled"),
    Metric(
        "requests",
        "Requests",
        "requests",
        "none",
        "number",
        "requests of the steady phase, however they ended",
        "never",
        0,
    ),
    Metric("errors", "Errors", "requests", "lower", "number", "steady requests that failed: status error", "never", 0),
    Metric(
        "incomplete",
        "Incomplete",
        "requests",
        "lower",
        "number",
        "steady requests cut short, by the server (incomplete) or at the run's end (cancelled)",
        "never",
        0,
    ),
    Metric(
        "requests_per_s",
        "Requests/s",
        "1/s",
        "higher",
        "number",
        "steady successes / window; the window runs from the first steady S to the last steady E",
        "no success",
        2,
    ),
    Metric(
        "output_tokens_per_s",
        "Output tokens/s",
        "tokens/s",
        "higher",
        "number",
        "output tokens of steady successes / window",
        "no success",
        0,
    ),
    Metric(
        "input_tokens_per_s",
        "Input tokens/s",
        "tokens/s",
        "higher",
        "number",
        "prompt tokens of steady successes / window",
        "no success",
        0,
    ),
    Metric(
        "in_flight_mean",
        "In flight, mean",
        "requests",
        "none",
        "number",
        "time from S to E of all requests that lies in the window / window",
        "nothing was sent",
        1,
    ),
    Metric(
        "in_flight_peak",
        "In flight, peak",
        "requests",
        "none",
        "number",
        "most requests between S and E at one instant of the window",
        "nothing was sent",
        0,
    ),
    Metric(
        "hit_rate",
        "Hit rate",
        "share",
        "higher",
        "number",
        "cached prompt tokens / prompt tokens as the engine's usage reports them, over steady successes that report it",
        "no usage with cached tokens",
        1,
    ),
    Metric(
        "engine_hit_rate",
        "Engine hit rate",
        "share",
        "higher",
        "number",
        "hit tokens / query tokens by the engines' own counters, whole arm with warm-up",
        "the engines do not tell",
        1,
    ),
    Metric(
        "hit_rate_ceiling",
        "Hit rate ceiling",
        "share",
        "none",
        "number",
        "what one infinite cache would have hit on the same requests / their prompt tokens",
        "the workload gives none",
        1,
    ),
    Metric(
        "believed_hit_rate",
        "Believed hit rate",
        "share",
        "none",
        "number",
        "tokens the router believed cached where it sent the request / prompt tokens",
        "the router does not tell",
        1,
    ),
    Metric(
        "phantom_hit_points",
        "Phantom hits",
        "points",
        "none",
        "number",
        "100 x (believed - cached) / prompt tokens, over requests where both are known; above 0 the index "
        "lies optimistically",
        "belief or usage unknown",
        1,
    ),
    Metric(
        "redundant_prefill_tokens",
        "Redundant prefill",
        "tokens",
        "lower",
        "number",
        "prompt tokens prefilled - prompt tokens one infinite cache would have prefilled; recomputation "
        "after preemption is not in it",
        "no ceiling, or a request of it has no usage",
        0,
    ),
    Metric(
        "preemptions",
        "Preemptions",
        "count",
        "lower",
        "number",
        "by the engines' counters, whole arm",
        "the engines do not tell",
        0,
    ),
    Metric(
        "evicted_blocks",
        "Evicted blocks",
        "blocks",
        "lower",
        "number",
        "by the engines' counters, whole arm",
        "the engines do not tell",
        0,
    ),
    Metric(
        "placement",
        "Placement",
        "requests",
        "none",
        "mapping",
        "steady requests per replica; max_share = largest / all",
        "no replica is known",
        0,
        ("max_share",),
    ),
    Metric(
        "sticky_rate",
        "Sticky rate",
        "share",
        "none",
        "number",
        "later turns that went to the replica of their session's first turn / later turns",
        "no later turns, or replicas unknown",
        1,
    ),
    Metric(
        "load_cv",
        "Load imbalance",
        "cv",
        "lower",
        "mapping",
        "standard deviation / mean across replicas, in each 0.5 s of the window, then the mean over time; "
        "idle bins left out",
        "one replica, or the engines do not tell",
        2,
        ("decode_blocks", "waiting"),
    ),
    Metric(
        "tail_idle_replica_s",
        "Idle in tail",
        "replica-s",
        "lower",
        "number",
        "seconds in which a replica had no request at all although a rollout step that it had finished with was still "
        "running elsewhere, summed over replicas",
        "no rollout steps, or replicas unknown",
        1,
    ),
    Metric(
        "tpot_replica_spread",
        "TPOT spread",
        "ratio",
        "lower",
        "number",
        "largest / smallest median TPOT of a replica, over replicas with a success of two tokens",
        "fewer than two such replicas",
        2,
    ),
    Metric(
        "slo_attainment",
        "SLO attainment",
        "share",
        "higher",
        "number",
        "successes within every bound that applies / (ok + error + incomplete by the server); TPOT does "
        "not apply to one token",
        "no SLO",
        1,
    ),
    Metric(
        "request_goodput",
        "Goodput",
        "1/s",
        "higher",
        "number",
        "successes within every bound that applies / window",
        "no SLO",
        2,
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def addresses() -> tuple[str, ...]:
    """Every dotted address of the table, in its order."""
    return tuple(address for metric in METRICS.values() for address in metric.addresses())


def metric_of(address: str) -> Metric:
    """The metric that an address such as `ttft_ms.p99`, `hit_rate` or `load_cv.decode_blocks` belongs to."""
    metric = METRICS.get(address.split(".")[0])
    if metric is None or (address not in metric.addresses() and not _is_replica_count(metric, address)):
        near = difflib.get_close_matches(address, addresses(), n=4, cutoff=0.5)
        if metric is not None:
            near = list(metric.addresses())
        raise UnknownMetricError(
            f"no metric {address!r}: "
            f"{'did you mean ' + ', '.join(near) if near else 'choose from ' + ', '.join(METRICS)}"
        )
    return metric


def lookup(metrics: Mapping[str, Any], address: str) -> float | int | None:
    """The number at a dotted address of one arm's metrics; None where it is unknown."""
    metric = metric_of(address)
    value = metrics.get(metric.name)
    if value is None or metric.kind == "number":
        return value
    key = address.split(".", 1)[1]
    if metric.name == "placement" and key == "max_share":
        total = sum(value.values())
        return max(value.values()) / total if total else None
    found: float | int | None = value.get(key)
    return found


def direction_of(address: str) -> Direction:
    """Which way is better; a count of samples has no better."""
    metric = metric_of(address)
    return "none" if metric.kind == "distribution" and address.endswith(".count") else metric.direction


def _is_replica_count(metric: Metric, address: str) -> bool:
    return metric.name == "placement" and address.startswith("placement.") and len(address) > len("placement.")
