"""Latency: from recorded instants to samples, and from samples to distributions. The formulas live here only.

A sample is taken over successes of the steady phase, in microseconds, each value with its session, since values of
one session are not independent. Percentiles are nearest rank: always a value that was measured, never one in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from reports.metric import PERCENTILES
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


def _token_gap(rows: Rows) -> tuple[Floats, Mask]:
    tokens, first = rows.column("output_tokens"), rows.column("first_chunk_tokens")
    span, known = _between(rows, "first_token_us", "last_token_us", rows.ok)
    later = tokens.values - first.values
    return span / np.maximum(later, 1), known & tokens.known & first.known & (later >= 1)


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
    "first_content_ms": _instants("sent_us", "first_content_us"),
    "ttst_ms": _instants("first_token_us", "second_token_us"),
    "tpot_ms": _tpot,
    "token_gap_ms": _token_gap,
    "ntpot_ms": _ntpot,
    "e2e_ms": _instants("sent_us", "last_token_us"),
    "queue_ms": _queue,
    "routing_ms": _instants("sent_us", "routed_us"),
    "client_wait_ms": lambda rows: _between(rows, "ready_us", "sent_us", np.ones(len(rows), dtype=bool)),
    "ttft_with_wait_ms": _instants("ready_us", "first_token_us"),
    "sched_lag_ms": lambda rows: _between(rows, "scheduled_us", "sent_us", np.ones(len(rows), dtype=bool)),
    "ttft_from_schedule_ms": _instants("scheduled_us", "first_token_us"),
    "e2e_from_schedule_ms": _instants("scheduled_us", "last_token_us"),
}


def _spans(rows: Rows, groups: Ints) -> Sample | None:
    """Per group of rows, its last token - its first send, if all succeeded and the last token is of the steady phase.

    What began in a ramp and ends in steady load counts: the sessions that fill the slots of a closed loop all begin
    in its ramp, and without them only those that started late, or none, would be left.
    """
    inside = groups >= 0
    sent, last = rows.column("sent_us"), rows.column("last_token_us")
    whole = rows.ok & sent.known & last.known
    steady = (rows.frame["phase"] == "steady").to_numpy(dtype=bool) & whole
    names, index = np.unique(groups[inside], return_inverse=True)
    if not len(names):
        return None
    never = np.iinfo(np.int64).min
    first_us = np.full(len(names), np.iinfo(np.int64).max)
    last_us, steady_us = np.full(len(names), never), np.full(len(names), never)
    np.minimum.at(first_us, index, sent.values[inside])
    np.maximum.at(last_us, index, last.values[inside])
    np.maximum.at(steady_us, index, np.where(steady, last.values, never)[inside])
    broken = np.bincount(index, weights=~whole[inside], minlength=len(names)) > 0
    counts = ~broken & (steady_us == last_us)
    return Sample((last_us - first_us)[counts], names[counts])


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
