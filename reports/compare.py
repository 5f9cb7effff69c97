"""Who is better at one figure, and whether that can be said at all.

The best router is named winner only if it is better than every other by more than the interval of that difference, at
95 % shared out over the comparisons, and by more than half a percent. Otherwise it is too close to call. Arms ran the
same sessions, so differences are taken between like sessions: what both arms found hard cancels out. With three or more
repeats the interval comes from the spread between repeats, which also holds the machine's own noise; not of failures,
which are too rare for that. A spread known from three repeats is hardly known, so their interval is wide (Student's t
with two degrees of freedom), and there may be fewer winners than of one run alone.

Requests that were lost are in no latency figure, and would have been among the slow ones: a router that lost clearly
more of them than another, by the same interval, wins no time against it, however good its survivors look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from reports.intervals import COMPARED_AS_SHARE, Estimate, alike, estimates, has_model, t_quantile
from reports.metrics_table import direction_of, lookup, metric_of
from reports.rows import Rows
from reports.unfinished import lost

CONFIDENCE = 0.95
MEANINGFUL = 0.005  # of the worse value; below it a difference is of no use to anybody, however certain
REPEATS_MIN = 3

DECIMALS = 6  # as a run's file keeps them; beyond, values are the same
TOO_CLOSE = "too close to call"
EQUAL = "equal"
LOST_MORE = "lost more requests"  # so what is ahead in a time wins nothing
NOT_JUDGED = "not judged"  # no model says how much chance is in this figure of one or two repeats

# What a comparison shows first. RL figures lead where there are rollout steps: the slowest member sets the time.
ROLLOUT_ADDRESSES = (
    "step_makespan_ms.p50",
    "step_makespan_ms.max",
    "group_completion_ms.p50",
    "group_completion_ms.p90",
    "group_completion_ms.max",
    "tail_idle_replica_s",
    "tpot_replica_spread",
)
HEADLINE_ADDRESSES = (
    "ttft_ms.p50",
    "ttft_ms.p99",
    "tpot_ms.p50",
    "tpot_ms.p99",
    "session_e2e_ms.p99",
    "output_tokens_per_s",
    "hit_rate",
    "load_cv.decode_blocks",
    "load_cv.waiting",
    "errors",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """What a comparison needs of one router: its rows, its samples, its metrics over all repeats and per repeat."""

    name: str
    rows: Rows
    fleet: pd.DataFrame
    metrics: Mapping[str, Any]
    repeats: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    address: str
    winner: str | None
    best: str | None  # None: fewer than two arms know the figure, or all have the same
    contenders: tuple[str, ...] = ()  # routers that cannot be told from the best
    runner_up: str | None = None
    gain: float | None = None  # by how much of the runner-up's value the best is better
    interval: tuple[float, float] | None = None  # of best - runner-up, in the metric's unit
    basis: str = ""


def call(address: str, arms: Sequence[Arm], slo: Mapping[str, float] | None = None) -> Call:
    direction = direction_of(address)
    values = {arm.name: value for arm in arms if (value := _compared(arm.metrics, address)) is not None}
    if direction == "none" or len(values) < 2:
        return Call(address, None, None)
    if len({round(value, DECIMALS) for value in values.values()}) == 1:
        return Call(address, None, None, tuple(values), basis=EQUAL)
    sign = 1 if direction == "lower" else -1
    known = [arm for arm in arms if arm.name in values]
    ranked = sorted(known, key=lambda arm: (sign * values[arm.name], arm.name))  # the order of arms decides nothing
    best, others = ranked[0], ranked[1:]
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    judged = {arm.name: _difference(address, best, arm, dict(slo or {}), confidence) for arm in others}
    ahead = {name for name, found in judged.items() if _exceeds(found[0], values[best.name], values[name], sign)}
    beaten = ahead
    if metric_of(address).unit == "ms":
        beaten = {arm.name for arm in others if arm.name in ahead and not _lost_more(best, arm, confidence)}
    runner_up = others[0]
    interval, basis = judged[runner_up.name]
    if len(ahead) == len(others) > len(beaten):
        basis = LOST_MORE
    if basis == NOT_JUDGED:
        return Call(address, None, None, tuple(values), basis=NOT_JUDGED)
    worse = abs(values[runner_up.name])
    return Call(
        address,
        best.name if len(beaten) == len(others) else None,
        best.name,
        (best.name, *(arm.name for arm in others if arm.name not in beaten)),
        runner_up.name,
        abs(values[best.name] - values[runner_up.name]) / worse if worse else None,
        interval,
        basis,
    )


def winner(address: str, arms: Sequence[Arm], slo: Mapping[str, float] | None = None) -> str | None:
    """The router that is best at this figure beyond doubt; None is "too close to call"."""
    return call(address, arms, slo).winner


def make_arms(
    requests: pd.DataFrame,
    fleet: pd.DataFrame,
    routers: Mapping[str, Mapping[str, Any]],
    repeats: Sequence[Mapping[str, Any]] = (),
) -> list[Arm]:
    """Arms whose sessions are numbered alike, so that the same session can be found in each."""
    ids = pd.factorize(requests["session"])[0].astype(np.int64)
    arms = []
    for name, metrics in routers.items():
        mask = (requests["router"] == name).to_numpy(dtype=bool)
        own = fleet[(fleet["router"] == name).to_numpy(dtype=bool)]
        each = tuple(repeat["metrics"] for repeat in repeats if repeat["router"] == name)
        arms.append(Arm(name, Rows(requests[mask], ids[mask]), own, metrics, each))
    return arms


def outcome(found: Mapping[str, Any]) -> str:
    """A call of run.json in a word or two: who won, why nobody did, or nothing where there is nothing to win."""
    basis = str(found.get("basis") or "")
    return found.get("winner") or (basis if basis == LOST_MORE else TOO_CLOSE if found.get("best") else basis)


def repeats_behind(found: Call) -> int | None:
    """Between how many repeats the spread was taken; None where the interval comes from sessions and slices."""
    count, _, word = found.basis.partition(" ")
    return int(count) if word == "repeats" and count.isdigit() else None


def lost_share(metrics: Mapping[str, Any]) -> float:
    """Of the requests of an arm, those that did not complete."""
    return lost(metrics) / metrics["requests"] if metrics["requests"] else 0.0


def _lost_more(a: Arm, b: Arm, confidence: float) -> bool:
    """Whether `a` lost a larger share of its requests than `b` by more than the interval of that difference."""
    if lost_share(a.metrics) <= lost_share(b.metrics):
        return False
    interval, _ = _difference("not_completed", a, b, {}, confidence)
    return interval is not None and interval[0] > 0


def _compared(metrics: Mapping[str, Any], address: str) -> float | None:
    value = lookup(metrics, address)
    if value is not None and address in COMPARED_AS_SHARE:
        return value / metrics["requests"] if metrics["requests"] else None
    return value


def _exceeds(interval: tuple[float, float] | None, best: float, other: float, sign: int) -> bool:
    if interval is None or abs(best - other) <= MEANINGFUL * abs(other):
        return False
    return interval[1] < 0 if sign > 0 else interval[0] > 0


def _difference(
    address: str, a: Arm, b: Arm, slo: dict[str, float], confidence: float
) -> tuple[tuple[float, float] | None, str]:
    """Interval of a - b, and what it rests on."""
    pairs = [(_compared(x, address), _compared(y, address)) for x, y in zip(a.repeats, b.repeats, strict=False)]
    gaps = [x - y for x, y in pairs if x is not None and y is not None]
    if len(gaps) >= REPEATS_MIN and address not in COMPARED_AS_SHARE:
        mean = math.fsum(gaps) / len(gaps)
        error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
        half = t_quantile((1 + confidence) / 2, len(gaps) - 1) * error
        return (mean - half, mean + half), f"{len(gaps)} repeats"
    one = estimates(address, a.rows, a.fleet, slo, confidence)
    two = estimates(address, b.rows, b.fleet, slo, confidence)
    intervals = [_interval_of_difference(*alike(x, y, confidence)) for x, y in zip(one, two, strict=False)]
    if not intervals:
        return None, "too few sessions" if has_model(address) else NOT_JUDGED
    return (
        min(low for low, _ in intervals),
        max(high for _, high in intervals),
    ), f"sessions and slices of {max(1, len(a.rows.windows))} repeat(s)"


def _interval_of_difference(a: Estimate, b: Estimate) -> tuple[float, float]:
    """Of a - b, from both intervals and the correlation of like units: the method of variance estimates recovery, which
    for two shares is Newcombe's (1998) hybrid of Wilson's intervals."""
    rho = _correlation(a, b)
    difference = a.value - b.value
    down = (a.value - a.low, b.high - b.value)
    up = (a.high - a.value, b.value - b.low)
    low, high = (math.sqrt(max(0.0, x * x + y * y - 2 * rho * x * y)) for x, y in (down, up))
    return difference - low, difference + high


def _correlation(a: Estimate, b: Estimate) -> float:
    shared, in_a, in_b = np.intersect1d(a.units, b.units, assume_unique=True, return_indices=True)
    if 2 * len(shared) < max(len(a.units), len(b.units)):
        return 0.0
    x, y = a.scores[in_a], b.scores[in_b]
    norm = math.sqrt(math.fsum((x * x).tolist()) * math.fsum((y * y).tolist()))
    return a.paired * b.paired * min(1.0, max(-1.0, math.fsum((x * y).tolist()) / norm)) if norm > 0 else 0.0
