"""Least squares that fit a step cost: non-negative coefficients, errors relative to what was measured.

A step's duration is linear in the coefficients but for the dense model's max(weight_read, token * N): which of the two
wins is one threshold of N, so all thresholds that tell the rows apart are tried and each leaves a linear problem. A
served mean is linear too while the schedule stays as it is: serve, solve, serve again, until nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from mock_engine.config import EngineConfig
from mock_engine.cost_model import Batch, StepCost
from mock_engine.errors import ConfigError
from mock_engine.served import (
    COLUMNS,
    REQUEST,
    SERVED_COLUMNS,
    US_PER_UNIT,
    ClosedLoop,
    FloatArray,
    Served,
    mean_of,
    serve_closed_loop,
)

EQUATIONS_PER_COEFFICIENT = 2  # fewer measurements than this a free coefficient say nothing about the error
MEASUREMENTS_MIN = 3  # with a base preset
PRIOR_WEIGHT = 0.06  # a base's coefficient off by half weighs as much as one measured value off by 3 %
ROUNDS_MAX = 12
RETREATS_MAX = 2
SPREAD = 0.5  # of the fixed time of a request, in the first descent
REQUESTS_MIN = 40  # served for one measured mean
STALLED = 0.97  # of the squared error: a round that saves less is the last one
_SETTLED = 1e-4  # largest relative change of a coefficient that ends the serving rounds
ROUNDING = 1e-18
"""Sum of squared relative errors that is nothing but floating point."""
_THRESHOLDS_MAX = 64  # tried at once; then the neighbourhood of the best
_NULL = 1e-7  # a direction that moves the predictions less than this, relative to the strongest one, is not seen
_INVOLVED = 0.1  # share of such a direction from which on a coefficient is named


Prior = Mapping[str, float]
"""Coefficients of a base preset: a fit stays near them where the measurements say little. One of 0 stays 0."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """`standard_error` is None for a coefficient that came out at 0, its bound."""

    value: float
    standard_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPoint:
    """A measured closed loop; None: not measured."""

    load: ClosedLoop
    config: EngineConfig
    ttft_us: float | None
    tpot_us: float | None


def nonnegative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """argmin |matrix @ x - target| over x >= 0, by Lawson and Hanson's active sets (Solving Least Squares Problems,
    1974, chapter 23)."""
    count = matrix.shape[1]
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    x = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    tolerance = 1e-13 * float(np.linalg.norm(target))
    for _ in range(5 * count):
        gradient = np.where(passive, -np.inf, scaled.T @ (target - scaled @ x))
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while passive.any():
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            blocked = passive & (trial <= 0)
            if not blocked.any():
                x = trial
                break
            x = x + (trial - x) * np.min(x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300))
            passive &= ~blocked | (x > 1e-15 * np.max(x, initial=0.0))
            x[~passive] = 0.0
    return x / np.where(norms > 0, norms, 1.0)


def fit_steps(
    batches: Sequence[Batch], measured_us: Sequence[float], *, experts: int, top_k: int, prior: Prior
) -> dict[str, Estimate]:
    """The coefficients of `COLUMNS` from durations of single steps. `prior`: see `Prior`."""
    problem = _Steps(batches, np.asarray(measured_us, dtype=float), experts, top_k, prior)
    if experts:
        rows = problem.rows(0)
    else:
        rows = problem.rows(problem.best_threshold())
    prior = dict(prior)
    if not experts and "weight_read_us" not in prior and not rows[:, 1].any():
        prior["weight_read_us"] = 0.0  # every step's tokens outweigh the weights, so they are no cost of their own
    return estimate(rows, problem.measured, COLUMNS, prior)


class _Steps:
    def __init__(self, batches: Sequence[Batch], measured: FloatArray, experts: int, top_k: int, prior: Prior) -> None:
        tokens, sequences, pairs, context = np.array(batches, dtype=float).T
        self.tokens = tokens
        self.measured = measured
        self.prior = prior
        self.experts = experts
        read = 1 - (1 - top_k / experts) ** tokens if experts else np.zeros(len(tokens))
        self._fixed = np.column_stack([np.ones(len(tokens)), read, tokens, pairs, sequences, context])
        self._fixed *= US_PER_UNIT[: len(COLUMNS)]

    def rows(self, threshold: float) -> FloatArray:
        """Amounts of every coefficient, in microseconds a unit; below the threshold the weights take longer."""
        rows = self._fixed.copy()
        if not self.experts:
            reading = self.tokens < threshold
            rows[:, 1] = reading
            rows[reading, 2] = 0.0
        return rows

    def loss(self, x: FloatArray) -> float:
        linear = np.maximum(x[1], x[2] * self.tokens)
        others = self._fixed @ np.where([name in ("weight_read_us", "token_us") for name in COLUMNS], 0.0, x)
        return float(np.sum(((others + linear) / self.measured - 1) ** 2))

    def attempt(self, threshold: float) -> tuple[float, float]:
        """(loss, threshold) of the best solution that starts from this threshold and follows its own."""
        best = (math.inf, threshold)
        for _ in range(8):
            x = _solve(self.rows(threshold), self.measured, COLUMNS, self.prior)
            best = min(best, (self.loss(x), threshold))
            following = x[1] / x[2] if x[2] > 0 else math.inf
            if np.array_equal(self.tokens < following, self.tokens < threshold):
                break
            threshold = following
        return best

    def best_threshold(self) -> float:
        every = [*np.unique(self.tokens).tolist(), math.inf]
        stride = -(-len(every) // _THRESHOLDS_MAX)
        tried = [self.attempt(threshold) for threshold in every[::stride]]
        if stride > 1:
            at = int(np.searchsorted(every, _simplest(tried)))
            tried += [self.attempt(threshold) for threshold in every[max(0, at - stride) : at + stride]]
        return _simplest(tried)


def _simplest(tried: Sequence[tuple[float, float]]) -> float:
    """The smallest threshold among the best: solutions that differ by rounding alone must not be chosen by it."""
    least = min(loss for loss, _ in tried)
    return min(threshold for loss, threshold in tried if loss <= least * (1 + 1e-6) + ROUNDING)


def fit_served(
    points: Sequence[ServedPoint],
    start: StepCost,
    *,
    prior: Prior,
    seed: int = 0,
    tell: Callable[[int, float], None] = lambda number, error: None,
) -> tuple[dict[str, Estimate], StepCost]:
    """The coefficients of `SERVED_COLUMNS` from measured closed loops, and the cost that they make. `start` gives the
    first schedule and the experts; `tell` hears, after every round, its number and the root mean square error of the
    cost that it served with."""
    values = sum((point.ttft_us is not None) + (point.tpot_us is not None) for point in points)
    _require_enough(values, SERVED_COLUMNS, prior)
    rounds = _Rounds(points, prior, seed, tell)
    near = rounds.descend(start, SPREAD)
    rounds.forget()
    rounds.descend(near, 0.0)
    rounds.descend(start, 0.0)
    if not start.experts and "weight_read_us" not in prior and not rounds.best_rows[:, 1].any():
        prior = {**prior, "weight_read_us": 0.0}
    found = estimate(rounds.best_rows, rounds.measured, SERVED_COLUMNS, prior)
    cost = rounds.best
    return {name: Estimate(getattr(cost, name), found[name].standard_error) for name in SERVED_COLUMNS}, cost


class _Rounds:
    """Serve, solve, serve again. Whether a request just catches a step is a jump that hides the slope, above all when
    every client waits the same fixed time; so the first descent spreads that time, and the second one does not."""

    def __init__(
        self,
        points: Sequence[ServedPoint],
        prior: Prior,
        seed: int,
        tell: Callable[[int, float], None],
    ) -> None:
        self.points = points
        self.prior = prior
        self.seed = seed
        self.tell = tell
        self.count = 0
        self.best_loss = math.inf
        self.best: StepCost
        self.best_rows = self.measured = np.zeros(0)

    def forget(self) -> None:
        self.best_loss = math.inf

    def descend(self, cost: StepCost, spread: float) -> StepCost:
        """The best cost on the way down from this one."""
        lowest, here, retreats = math.inf, cost, 0
        for _ in range(ROUNDS_MAX):
            rows, self.measured, modelled = _equations(
                self.points, serve_points(self.points, cost, self.seed, spread=spread)
            )
            loss = float(np.mean((modelled / self.measured - 1) ** 2))
            self.count += 1
            self.tell(self.count, math.sqrt(loss))
            if loss < self.best_loss:
                self.best, self.best_loss, self.best_rows = cost, loss, rows
            if loss < lowest:
                stalled = loss > STALLED * lowest
                here, lowest, retreats = cost, loss, 0
                if stalled:
                    break
                solved = _solve(rows, self.measured, SERVED_COLUMNS, self.prior)
                following = with_values(cost, dict(zip(SERVED_COLUMNS, solved, strict=True)))
            elif retreats < RETREATS_MAX:  # the schedule changed more than the solution knew: half as far
                retreats += 1
                following = _between(here, cost)
            else:
                break
            if _settled(cost, following):
                break
            cost = following
        return here


def serve_points(points: Sequence[ServedPoint], cost: StepCost, seed: int = 0, *, spread: float = 0.0) -> list[Served]:
    """Every point served with the same lengths each time that it is asked with the same seed, small ones several times
    over."""
    return [
        mean_of(
            [
                serve_closed_loop(point.config, cost, point.load, Random(f"{seed}/{number}/{draw}"), spread=spread)
                for draw in range(-(-REQUESTS_MIN // point.load.requests))
            ]
        )
        for number, point in enumerate(points)
    ]


def with_values(cost: StepCost, values: Mapping[str, float]) -> StepCost:
    """The cost with these coefficients, in the precision that a preset is written in."""
    merged = {name: values.get(name, getattr(cost, name)) for name in SERVED_COLUMNS}
    request_us = round(merged.pop(REQUEST))
    rounded = {name: round(float(value), 3) for name, value in merged.items()}
    return StepCost(**rounded, request_fixed_us=request_us, experts=cost.experts, top_k=cost.top_k)


def estimate(rows: FloatArray, measured: FloatArray, names: Sequence[str], prior: Prior) -> dict[str, Estimate]:
    """Solves and judges; refuses rows that leave a coefficient open."""
    _require_enough(len(measured), names, prior)
    free, weighted, target = _weighted(rows, measured, names, prior)
    _require_seen(weighted, [names[i] for i in free])
    x = np.zeros(len(names))
    x[free] = nonnegative_least_squares(weighted, target)
    inside = [at for at, i in enumerate(free) if x[i] > 0]
    errors: dict[int, float] = {}
    if inside and len(target) > len(inside):
        used = weighted[:, inside]
        norms = np.linalg.norm(used, axis=0)
        variance = float(np.sum((weighted @ x[free] - target) ** 2)) / (len(target) - len(inside))
        spread = np.diag(np.linalg.pinv((used / norms).T @ (used / norms))) * variance
        for at, s, norm in zip(inside, spread, norms, strict=True):
            errors[free[at]] = float(math.sqrt(max(s, 0.0)) / norm)
    return {name: Estimate(float(x[i]), errors.get(i)) for i, name in enumerate(names)}


def _require_enough(count: int, names: Sequence[str], prior: Prior) -> None:
    free = sum(prior.get(name) != 0 for name in names)
    based = any(prior.values())
    needed = MEASUREMENTS_MIN if based else EQUATIONS_PER_COEFFICIENT * free
    if count < needed:
        raise ConfigError(
            f"{count} measured values are too few for {free} coefficients: give at least {needed}"
            + ("" if based else f", or name a base preset and give at least {MEASUREMENTS_MIN}")
        )


def _require_seen(weighted: FloatArray, names: list[str]) -> None:
    norms = np.linalg.norm(weighted, axis=0)
    strongest = float(np.max(norms, initial=0.0))
    unseen = [name for name, norm in zip(names, norms, strict=True) if norm <= 0 or norm < 1e-300 * strongest]
    if unseen:
        raise ConfigError(f"no row shows {', '.join(unseen)}: {_mend(unseen)}")
    _, sizes, directions = np.linalg.svd(weighted / norms, full_matrices=False)
    for size, direction in zip(sizes, directions, strict=True):
        if size < _NULL * sizes[0]:
            mixed = [name for name, share in zip(names, direction, strict=True) if abs(share) > _INVOLVED]
            raise ConfigError(f"the rows cannot tell {' from '.join(mixed)}: {_mend(mixed)}")


_MENDS = {
    "weight_read_us": "steps of few tokens beside steps of many",
    "token_us": "prefills from some hundred to some thousand tokens",
    "prefill_attention_ns": "prefills of unequal length, or on long cached prefixes",
    "sequence_us": "steps of unequal numbers of sequences",
    "kv_read_ns": "decodes at unequal context lengths",
    "step_fixed_us": "steps of unequal sizes",
    REQUEST: "time to first token at two concurrencies",
}


def _mend(names: Sequence[str]) -> str:
    wanted = "; ".join(dict.fromkeys(_MENDS[name] for name in names))
    return f"measure also {wanted}; or name a base preset, whose values are kept where yours say nothing"


def _solve(rows: FloatArray, measured: FloatArray, names: Sequence[str], prior: Prior) -> FloatArray:
    free, weighted, target = _weighted(rows, measured, names, prior)
    x = np.zeros(len(names))
    x[free] = nonnegative_least_squares(weighted, target)
    return x


def _weighted(
    rows: FloatArray, measured: FloatArray, names: Sequence[str], prior: Prior
) -> tuple[list[int], FloatArray, FloatArray]:
    """(free columns, their equations, right sides): a measurement's error counts relative to it, a prior's little."""
    free = [i for i, name in enumerate(names) if prior.get(name) != 0]
    known = [(at, prior[names[i]]) for at, i in enumerate(free) if names[i] in prior]
    pull = np.zeros((len(known), len(free)))
    for row, (at, value) in enumerate(known):
        pull[row, at] = PRIOR_WEIGHT / value
    weighted = np.vstack([rows[:, free] / measured[:, None], pull])
    return free, weighted, np.concatenate([np.ones(len(measured)), np.full(len(known), PRIOR_WEIGHT)])


def _equations(points: Sequence[ServedPoint], served: Sequence[Served]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(amounts in microseconds a unit, measured, modelled) of every mean that was measured."""
    rows, measured, modelled = [], [], []
    for point, got in zip(points, served, strict=True):
        if point.ttft_us is not None:
            rows.append(got.ttft_row * US_PER_UNIT)
            measured.append(point.ttft_us)
            modelled.append(got.ttft_us)
        if point.tpot_us is not None and not math.isnan(got.tpot_us):
            rows.append(got.tpot_row * US_PER_UNIT)
            measured.append(point.tpot_us)
            modelled.append(got.tpot_us)
    return np.array(rows), np.array(measured), np.array(modelled)


def _between(one: StepCost, other: StepCost) -> StepCost:
    return with_values(one, {name: (getattr(one, name) + getattr(other, name)) / 2 for name in SERVED_COLUMNS})


def _settled(before: StepCost, after: StepCost) -> bool:
    """Whether no coefficient moved by more than it matters; one that is close to 0 may wander."""
    for name in SERVED_COLUMNS:
        old, new = getattr(before, name), getattr(after, name)
        if abs(new - old) > max(_SETTLED * abs(old), 0.002):
            return False
    return True
