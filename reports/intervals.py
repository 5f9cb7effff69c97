"""How sure a figure of one arm is, from the arm's own rows: a value, an interval, and what each unit adds to it.

Turns of one session share their fate, and so do requests that were under way together, so there are two ways to count
what is independent: by session (by step, for makespans) and by slice of the window (the only one for rates). Both are
given; who compares takes the wider. A percentile gets the interval of ranks that its share of values below it may take
(Woodruff's method with clusters); means and shares get the linearised cluster variance. Nothing is drawn: the same rows
give the same interval. Where a rank would lie beyond the largest value, as with a p99 over few values, the interval
reaches as far again beyond the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd

from reports.arms import DISTRIBUTIONS, cancelled, good_requests
from reports.balance import LOAD_COLUMNS, load_bins
from reports.latency import nearest_rank, sample
from reports.rows import SLICES, Floats, Ints, Mask, Rows

UNITS_MIN = 3  # sessions, steps or slices below which there is no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float
    units: Ints  # sorted: sessions, steps or slices, numbered alike in every arm
    scores: Floats  # what each unit adds to the deviation of the figure
    paired: float = 1.0  # share of the standard error that the units explain; only that can cancel between arms


def estimates(
    address: str, rows: Rows, fleet: pd.DataFrame, slo: dict[str, float], confidence: float
) -> tuple[Estimate, ...]:
    """By session and by slice, as far as the figure has them, in this order for every arm.

    Empty where the figure is unknown, has no model of chance, or rests on fewer than UNITS_MIN units.
    """
    name, _, statistic = address.partition(".")
    if name in DISTRIBUTIONS:
        found = sample(name, rows)
        if found is None or not len(found.values):
            return ()
        values = np.asarray(found.values / 1_000, dtype=np.float64)
        units = (found.clusters,) if found.slices is None else (found.clusters, found.slices)
        if statistic == "mean":
            return _ratios(values, np.ones(len(values)), units, confidence)
        return _percentiles(values, int(statistic[1:]), units, confidence) if statistic.startswith("p") else ()
    if name == "load_cv":
        return _load_cv(rows, fleet, LOAD_COLUMNS[statistic], confidence)
    if name in _RATIOS:
        steady = rows.steady
        ratio = _RATIOS[name](steady, slo)
        if ratio is None:
            return ()
        mask, parts, wholes = ratio
        return _ratios(parts[mask], wholes[mask], (steady.sessions[mask], steady.slices[mask]), confidence)
    return _rate(rows, name, slo, confidence)


def has_model(address: str) -> bool:
    """Whether rows alone can say how sure a figure is: a largest value, a count or a spread of replicas cannot."""
    name, _, statistic = address.partition(".")
    if name in DISTRIBUTIONS:
        return statistic == "mean" or statistic.startswith("p")
    return name == "load_cv" or name in _RATIOS or name in _RATES


def t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t with whole degrees of freedom, by bisection of its finite series; normal above 200."""
    if freedom > 200:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < 2 * probability - 1 else (low, middle)
    return (low + high) / 2


def t_tail(t: float, freedom: int) -> float:
    """P(T > t)."""
    inside = 2 * NormalDist().cdf(abs(t)) - 1 if freedom > 200 else _t_inside(abs(t), freedom)
    return (1 - inside) / 2 if t > 0 else (1 + inside) / 2


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(freedom // 2):
        total += term
        factor = (2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2)
        term *= factor * cosine * cosine
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _sum_by(units: Ints, values: Floats) -> tuple[Ints, Floats]:
    names, index = np.unique(units, return_inverse=True)
    return names, np.bincount(index, weights=values, minlength=len(names)).astype(np.float64)


def _error(scores: Floats) -> float:
    """Standard error of a figure whose deviation is the sum of independent scores."""
    return math.sqrt(math.fsum((scores * scores).tolist()) * len(scores) / (len(scores) - 1))


def _ratios(parts: Floats, wholes: Floats, units: Sequence[Ints], confidence: float) -> tuple[Estimate, ...]:
    whole = math.fsum(wholes.tolist())
    if whole <= 0:
        return ()
    value = math.fsum(parts.tolist()) / whole
    deviations = (parts - value * wholes) / whole
    found = []
    for each in units:
        names, scores = _sum_by(each, deviations)
        if len(names) < UNITS_MIN:
            return ()
        half = t_quantile((1 + confidence) / 2, len(names) - 1) * _error(scores)
        found.append(Estimate(value, value - half, value + half, names, scores))
    return tuple(found)


def _percentiles(values: Floats, percentile: int, units: Sequence[Ints], confidence: float) -> tuple[Estimate, ...]:
    ordered = np.sort(values)
    count, rank = len(ordered), nearest_rank(len(ordered), percentile)
    value, share = float(ordered[rank]), percentile / 100
    below = (values <= value).astype(np.float64)
    deviations = (below - below.mean()) / count
    by_request = math.sqrt(share * (1 - share) / count)
    found = []
    for each in units:
        names, scores = _sum_by(each, deviations)
        if len(names) < UNITS_MIN:
            return ()
        by_unit = _error(scores)
        error = max(by_unit, by_request)
        reach = t_quantile((1 + confidence) / 2, len(names) - 1) * error * count
        low, highest = float(ordered[max(0, math.floor(rank - reach))]), math.ceil(rank + reach)
        top = float(ordered[min(count - 1, highest)])
        high = top if highest < count else 2 * top - low
        found.append(Estimate(value, low, high, names, -scores, by_unit / error))
    return tuple(found)


Ratio = tuple[Mask, Floats, Floats]  # which rows, and their parts and wholes


def _requests_that(mask_of: Callable[[Rows], Mask]) -> Callable[[Rows, dict[str, float]], Ratio | None]:
    def ratio(steady: Rows, slo: dict[str, float]) -> Ratio:
        return np.ones(len(steady), dtype=bool), mask_of(steady).astype(np.float64), np.ones(len(steady))

    return ratio


def _hits(steady: Rows, slo: dict[str, float]) -> Ratio:
    prompt, cached = steady.column("prompt_tokens"), steady.column("cached_tokens")
    served = steady.ok & prompt.known & cached.known
    return served, cached.values.astype(np.float64), prompt.values.astype(np.float64)


def _attained(steady: Rows, slo: dict[str, float]) -> Ratio | None:
    good = good_requests(steady, slo)
    return None if good is None else (~cancelled(steady), good.astype(np.float64), np.ones(len(steady)))


_RATIOS: dict[str, Callable[[Rows, dict[str, float]], Ratio | None]] = {
    "hit_rate": _hits,
    "slo_attainment": _attained,
    "errors": _requests_that(lambda steady: steady.status("error")),
    "incomplete": _requests_that(lambda steady: steady.status("incomplete") | steady.status("cancelled")),
}
# Counts are compared as shares of what was sent: arms need not have sent equally many.
COMPARED_AS_SHARE = ("errors", "incomplete")
_RATES = ("output_tokens_per_s", "input_tokens_per_s", "request_goodput", "requests_per_s")


def _rate(rows: Rows, name: str, slo: dict[str, float], confidence: float) -> tuple[Estimate, ...]:
    steady = rows.steady
    amount: Floats = np.ones(len(steady))
    chosen = steady.ok
    starts = ends = steady.column("end_us")
    if name == "output_tokens_per_s":
        starts, ends = steady.column("first_token_us"), steady.column("last_token_us")
        amount = steady.column("output_tokens").values.astype(np.float64)
    elif name == "input_tokens_per_s":
        amount = steady.column("prompt_tokens").values.astype(np.float64)
    elif name == "request_goodput":
        good = good_requests(steady, slo)
        if good is None:
            return ()
        chosen = good
    elif name not in _RATES:
        return ()
    repeats = steady.column("repeat").values
    parts, wholes, units = [], [], []
    for repeat, window in rows.windows.items():
        mask = chosen & starts.known & ends.known & (repeats == repeat)
        first_us, span_us = starts.values[mask], np.maximum(ends.values[mask] - starts.values[mask], 1)
        edges = np.linspace(window.starts_us, window.ends_us, SLICES + 1)
        delivered = [float((amount[mask] * np.clip((edge - first_us) / span_us, 0, 1)).sum()) for edge in edges]
        delivered[-1] = float(amount[mask].sum())  # what comes at the very end is inside
        parts.append(np.diff(delivered))
        wholes.append(np.full(SLICES, (window.ends_us - window.starts_us) / 1e6 / SLICES))
        units.append(repeat * SLICES + np.arange(SLICES))
    if not parts:
        return ()
    return _ratios(np.concatenate(parts), np.concatenate(wholes), (np.concatenate(units),), confidence)


def _load_cv(rows: Rows, fleet: pd.DataFrame, column: str, confidence: float) -> tuple[Estimate, ...]:
    values, repeats, t_us = load_bins(rows, fleet, column)
    if not len(values):
        return ()
    units = np.zeros(len(values), dtype=np.int64)
    for repeat, window in rows.windows.items():
        mask = repeats == repeat
        units[mask] = repeat * SLICES + window.slice_of(t_us[mask])
    return _ratios(values, np.ones(len(values)), (units,), confidence)
