"""How sure a figure of one arm is, from the arm's own rows: a value, an interval, and what each unit adds to it.

Turns of one session share their fate, and so do requests that were under way together, so there are two ways to count
what is independent: by session (by step, for makespans) and by slice of the window (the only one for rates). Both are
given; who compares takes the wider. A percentile gets the interval of ranks that its share of values below it may take
(Woodruff's method with clusters); means and ratios get the linearised cluster variance. A share of requests, such as
those that failed, gets Wilson's score interval for as many requests as it is worth (its count over Kish's design
effect), which also holds for 0 of 100. Nothing is drawn: the same rows give the same interval. Where a rank would lie
beyond the largest value, as with a p99 over few values, the interval reaches as far again beyond the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import pandas as pd

from reports.arms import DISTRIBUTIONS, FAILURES, cancelled, good_requests
from reports.balance import LOAD_COLUMNS, load_bins
from reports.latency import nearest_rank, sample
from reports.rows import SLICES, Floats, Ints, Mask, Rows

UNITS_MIN = 3  # sessions, steps, slices or repeats below which there is no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float
    units: Ints  # sorted: sessions, steps or slices, numbered alike in every arm
    scores: Floats  # what each unit adds to the deviation of the figure
    paired: float = 1.0  # share of the standard error that the units explain; only that can cancel between arms
    count: int | None = None  # of a share of requests: how many these are


def estimates(
    address: str, rows: Rows, fleet: pd.DataFrame, slo: dict[str, float], confidence: float
) -> tuple[Estimate, ...]:
    """By session, by slice and, of a share of requests, by repeat, as far as the figure has them; the same order for
    every arm.

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
    steady = rows.steady
    if name == "hit_rate":
        mask, parts, wholes = _hits(steady)
        return _ratios(parts[mask], wholes[mask], (steady.sessions[mask], steady.slices[mask]), confidence)
    if name in _SHARES:
        found_share = _SHARES[name](steady, slo)
        if found_share is None:
            return ()
        mask, hits = found_share
        units, repeats = (steady.sessions[mask], steady.slices[mask]), steady.column("repeat").values[mask]
        return _shares(hits[mask], units, repeats, confidence)
    return _rate(rows, name, slo, confidence)


def has_model(address: str) -> bool:
    """Whether rows alone can say how sure a figure is: a largest value, a count or a spread of replicas cannot."""
    name, _, statistic = address.partition(".")
    if name in DISTRIBUTIONS:
        return statistic == "mean" or statistic.startswith("p")
    return name in ("load_cv", "hit_rate") or name in _SHARES or name in _RATES


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


def _shares(hits: Mask, units: Sequence[Ints], repeats: Ints, confidence: float) -> tuple[Estimate, ...]:
    """Of a share of requests. Repeats are units too where there are enough: a replica that died in one of them says
    little of the next; but too few to tell what their arms have in common."""
    count = len(hits)
    if not count:
        return ()
    value = float(hits.mean())
    found = []
    for each in (*units, repeats):
        names, scores = _sum_by(each, (hits - value) / count)
        if len(names) >= UNITS_MIN:
            share = Estimate(value, value, value, names, scores, float(each is not repeats), count)
            found.append(_wilson(share, _design_effect(share), confidence))
        elif each is not repeats:
            return ()
    return tuple(found)


def alike(a: Estimate, b: Estimate, confidence: float) -> tuple[Estimate, Estimate]:
    """Shares of two arms, both with the larger of their design effects: an arm in which nothing failed cannot tell
    whether failures come alone or in crowds. Other figures stay as they are."""
    if a.count is None or b.count is None:
        return a, b
    effect = max(_design_effect(a), _design_effect(b))
    return _wilson(a, effect, confidence), _wilson(b, effect, confidence)


def _design_effect(share: Estimate) -> float:
    """Variance by units / variance if every request stood alone (Kish); never below 1."""
    alone = _alone(share)
    return max(1.0, _error(share.scores) ** 2 / alone) if alone else 1.0


def _alone(share: Estimate) -> float:
    return share.value * (1 - share.value) / (share.count or 1)


def _wilson(share: Estimate, effect: float, confidence: float) -> Estimate:
    """Wilson's score interval for as many requests as the share is worth."""
    worth = max(1.0, (share.count or 1) / effect)
    square = NormalDist().inv_cdf((1 + confidence) / 2) ** 2 / worth
    middle = (share.value + square / 2) / (1 + square)
    half = math.sqrt(square * (share.value * (1 - share.value) + square / 4)) / (1 + square)
    error = math.sqrt(_alone(share) * effect)
    explained = min(1.0, _error(share.scores) / error) if error and share.paired else 0.0
    low, high = min(middle - half, share.value), max(middle + half, share.value)
    return replace(share, low=low, high=high, paired=explained)


def _hits(steady: Rows) -> tuple[Mask, Floats, Floats]:
    """Which requests tell, and their cached and prompt tokens."""
    prompt, cached = steady.column("prompt_tokens"), steady.column("cached_tokens")
    served = steady.ok & prompt.known & cached.known
    return served, cached.values.astype(np.float64), prompt.values.astype(np.float64)


Share = tuple[Mask, Mask]  # which rows, and which of them count


def _of_all(mask_of: Callable[[Rows], Mask]) -> Callable[[Rows, dict[str, float]], Share | None]:
    return lambda steady, slo: (np.ones(len(steady), dtype=bool), mask_of(steady))


def _attained(steady: Rows, slo: dict[str, float]) -> Share | None:
    good = good_requests(steady, slo)
    return None if good is None else (~cancelled(steady), good)


_SHARES: dict[str, Callable[[Rows, dict[str, float]], Share | None]] = {
    "slo_attainment": _attained,
    **{name: _of_all(mask_of) for name, mask_of in FAILURES.items()},
}
COMPARED_AS_SHARE = tuple(FAILURES)
"""Counts that are compared as shares of what was sent, as arms need not have sent equally many. Few repeats of a rare
failure say nothing by their spread, so these are counted by session, slice and repeat."""
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
