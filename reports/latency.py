"""Latency: from recorded instants to samples, and from samples to distributions. The formulas live here only.

A sample is taken over successes of the steady phase, in microseconds, each value with its session, since values of
one session are not independent. Percentiles are nearest rank: always a value that was measured, never one in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from reports.metrics_table import PERCENTILES
from reports.rows import Floats, Ints, Mask, Rows, Sample


def nearest_rank(count: int, percentile: int) -> int:
    """Position, from 0, of the percentile in `count` sorted values: the least with `percentile` % at or below it."""
    return max(0, (percentile * count + 99) // 100 - 1)


def distribution(sample: Sample | None) -> dict[str, float | int] | None:
    """mean, percentiles, max in milliseconds, and count; None, not zeros, where there is no sample."""
    if sample is None or not len(sample.values):
        return None
    values = sample.values
    count = len(values)
    ranks = [nearest_rank(count, percentile) for percentile in PERCENTILES]
    placed = np.partition(values, [*ranks, count - 1])
    mean_us = int(values.sum()) / count if values.dtype == np.int64 else math.fsum(values.tolist()) / count
    return {
        "mean": mean_us / 1_000,
        **{f"p{percentile}": placed[rank].item() / 1_000 for percentile, rank in zip(PERCENTILES, ranks, strict=True)},
        "max": placed[count - 1].item() / 1_000,
        "count": count,
    }


def _between(rows: Rows, earlier: str, later: str, mask: Mask) -> tuple[Ints, Mask]:
    start, end = rows.column(earlier), rows.column(later)
    return end.values - start.values, mask & start.known & end.known


def _instants(earlier: str, later: str) -> Callable[[Rows], tuple[Ints | Floats, Mask]]:
    return lambda rows: _between(rows, earlier, later, rows.ok)


def _tpot(rows: Rows) -> tuple[Floats, Mask]:
    tokens = rows.column("output_tokens")
    span, known = _between(rows, "first_token_us", "last_token_us", rows.ok)
    mask = known & tokens.known & (tokens.values >= 2)
    return span / np.maximum(tokens.values - 1, 1), mask


def _ntpot(rows: Rows) -> tuple[Floats, Mask]:
    tokens = rows.column("output_tokens")
    span, known = _between(rows, "sent_us", "last_token_us", rows.ok)
    mask = known & tokens.known & (tokens.values >= 1)
    return span / np.maximum(tokens.values, 1), mask


def _queue(rows: Rows) -> tuple[Ints, Mask]:
    sent, routed, admitted = rows.column("sent_us"), rows.column("routed_us"), rows.column("admitted_us")
    start = np.where(routed.known, routed.values, sent.values)
    return admitted.values - start, rows.ok & admitted.known & (routed.known | sent.known)


# Figures of a single request: microseconds per row, and which rows have one.
PER_REQUEST: dict[str, Callable[[Rows], tuple[Ints | Floats, Mask]]] = {
    "ttft_ms": _instants("sent_us", "first_token_us"),
    "ttst_ms": _instants("first_token_us", "second_token_us"),
    "tpot_ms": _tpot,
    "ntpot_ms": _ntpot,
    "e2e_ms": _instants("sent_us", "last_token_us"),
    "queue_ms": _queue,
    "routing_ms": _instants("sent_us", "routed_us"),
    "sched_lag_ms": lambda rows: _between(rows, "scheduled_us", "sent_us", np.ones(len(rows), dtype=bool)),
    "ttft_from_schedule_ms": _instants("scheduled_us", "first_token_us"),
    "e2e_from_schedule_ms": _instants("scheduled_us", "last_token_us"),
}


def _spans(rows: Rows, groups: Ints) -> Sample | None:
    """Per group of rows, its last token - its first send, if every one of its rows is a steady success."""
    inside = groups >= 0
    sent, last = rows.column("sent_us"), rows.column("last_token_us")
    whole = rows.ok & sent.known & last.known & (rows.frame["phase"] == "steady").to_numpy(dtype=bool)
    names, index = np.unique(groups[inside], return_inverse=True)
    if not len(names):
        return None
    first_us = np.full(len(names), np.iinfo(np.int64).max)
    last_us = np.full(len(names), np.iinfo(np.int64).min)
    np.minimum.at(first_us, index, sent.values[inside])
    np.maximum.at(last_us, index, last.values[inside])
    broken = np.bincount(index, weights=~whole[inside], minlength=len(names)) > 0
    return Sample((last_us - first_us)[~broken], names[~broken])


def sample(name: str, rows: Rows) -> Sample | None:
    """The sample behind a distribution of the table; `rows` are all rows of an arm, whatever their phase."""
    if name == "session_e2e_ms":
        known = ~rows.frame["session"].isna().to_numpy(dtype=bool)
        return _spans(rows, np.where(known, rows.sessions, -1))
    if name == "step_makespan_ms":
        return _spans(rows, rows.steps)
    if name == "group_completion_ms":
        return _spans(rows, rows.groups)
    steady = rows.steady
    if name == "inter_chunk_latency_ms":
        return steady.gaps(steady.ok)
    values, mask = PER_REQUEST[name](steady)
    return Sample(values[mask], steady.sessions[mask], steady.slices[mask])


def distributions(rows: Rows, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: distribution(sample(name, rows)) for name in names}
