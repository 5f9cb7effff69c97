"""Numbers of a workload table: a constant, or a table with `dist`.

Law: every sample takes exactly one `random()` draw (a constant takes none), so replacing one spread distribution
by another leaves all further draws where they were. Samples come by inverting the distribution function; bounds
cut a sample to the bound, they do not draw again, so a mean is that of the distribution before cutting.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist
from typing import get_args

import msgspec

from workloads.limits import PAUSE_MS_MAX, SESSIONS_MAX, TOKENS_MAX, Whole, sessions, shown

_NORMAL = NormalDist()
_WHOLE_MAX = 2**53
"""Up to here a float tells whole numbers apart."""


class _Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="dist"):
    """Base: `min` and `max` bound every sample."""

    min: float | None = None
    max: float | None = None

    def quantile(self, u: float) -> float:
        """The value that a share `u` of samples stays below, before bounds; 0 < u < 1."""
        raise NotImplementedError

    def sample(self, rng: random.Random) -> float:
        u = rng.random()
        value = self.quantile(u if u > 0.0 else 2.0**-54)
        if self.min is not None and value < self.min:
            return float(self.min)
        if self.max is not None and value > self.max:
            return float(self.max)
        return value

    def lowest(self) -> float:
        """No sample is below it."""
        return float("-inf") if self.min is None else float(self.min)

    def highest(self) -> float:
        """No sample is above it; infinite when nothing bounds it."""
        return float("inf") if self.max is None else float(self.max)

    def median(self) -> float:
        """Half of the samples are below it, before bounds; infinite when it is beyond all numbers."""
        try:
            return self.quantile(0.5)
        except OverflowError:
            return math.inf

    def _check_bounds(self) -> None:
        if any(bound is not None and not math.isfinite(bound) for bound in (self.min, self.max)):
            raise ValueError("min or max is not a finite number: give one, or leave it out")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min:g} is above max = {self.max:g}: swap them")


class Uniform(_Distribution, frozen=True, kw_only=True, tag="uniform"):
    """Whole numbers from `low` to `high`, both included and all alike."""

    low: int
    high: int

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if abs(value) > _WHOLE_MAX:
                raise ValueError(f"{name} = {shown(value)}: give a whole number up to {shown(_WHOLE_MAX)}")
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}: swap them")
        self._check_bounds()

    def quantile(self, u: float) -> float:
        return float(self.low + math.floor(u * (self.high - self.low + 1)))

    def lowest(self) -> float:
        return max(float(self.low), _Distribution.lowest(self))

    def highest(self) -> float:
        return min(float(self.high), _Distribution.highest(self))


class LogNormal(_Distribution, frozen=True, kw_only=True, tag="lognormal"):
    """Heavy tail: `mean` is the mean of the numbers themselves, `sigma` the spread of their logarithm."""

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        _positive("mean", self.mean)
        if not 0 <= self.sigma <= 10:
            raise ValueError(f"sigma = {self.sigma:g}: give the spread of the logarithm, from 0 to 10 (1 is heavy)")
        self._check_bounds()

    def quantile(self, u: float) -> float:
        return math.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * _NORMAL.inv_cdf(u))


class Normal(_Distribution, frozen=True, kw_only=True, tag="normal"):
    """The bell curve; bound it with `min`, since its left tail has no end."""

    mean: float
    sd: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean):
            raise ValueError(f"mean = {self.mean:g}: give a finite number")
        if not 0 <= self.sd < math.inf:
            raise ValueError(f"sd = {self.sd:g}: a standard deviation is a finite number, 0 or more")
        self._check_bounds()

    def quantile(self, u: float) -> float:
        return self.mean + self.sd * _NORMAL.inv_cdf(u)


class Exponential(_Distribution, frozen=True, kw_only=True, tag="exponential"):
    """Pauses without memory, such as between independent arrivals."""

    mean: float

    def __post_init__(self) -> None:
        _positive("mean", self.mean)
        self._check_bounds()

    def quantile(self, u: float) -> float:
        return -self.mean * math.log1p(-u)


class Geometric(_Distribution, frozen=True, kw_only=True, tag="geometric"):
    """Whole numbers from 1 on: how many turns, when each may be the last with the same chance `1 / mean`."""

    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"mean = {self.mean:g}: a geometric number is at least 1, so its mean is too")
        self._check_bounds()

    def quantile(self, u: float) -> float:
        if self.mean == 1:
            return 1.0
        return 1.0 + math.floor(math.log1p(-u) / math.log1p(-1 / self.mean))


class Choice(_Distribution, frozen=True, kw_only=True, tag="choice"):
    """One of `values`, as often as `weights` say (all alike without them)."""

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty: name at least one number to choose")
        if not all(map(math.isfinite, self.values)):
            raise ValueError("values holds something that is not a finite number: remove it")
        if self.weights is not None:
            if len(self.weights) != len(self.values):
                raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values: give one per value")
            if not (min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf):
                raise ValueError("weights must be 0 or more and not all 0")
        self._check_bounds()

    def quantile(self, u: float) -> float:
        weights = self.weights or (1.0,) * len(self.values)
        left = u * sum(weights)
        for value, weight in zip(self.values, weights, strict=True):
            left -= weight
            if left < 0:
                return float(value)
        return float(self.values[-1])

    def lowest(self) -> float:
        return max(min(self.values), _Distribution.lowest(self))

    def highest(self) -> float:
        return min(max(self.values), _Distribution.highest(self))


Distribution = Uniform | LogNormal | Normal | Exponential | Geometric | Choice
Length = int | Distribution
"""A whole number: of tokens, turns, chunks, requests."""
Pause = float | Distribution
"""A time in milliseconds."""

DISTRIBUTION_KEYS: dict[str, tuple[str, ...]] = {
    str(kind.__struct_config__.tag): tuple(kind.__struct_fields__) for kind in get_args(Distribution)
}
"""Names a table may give as `dist`, with the keys each takes; for messages."""


def length_sampler(value: Length, rng: random.Random, floor: int, ceiling: int = TOKENS_MAX) -> Callable[[], int]:
    """A function that draws whole numbers from `floor` to `ceiling`, rounded to the nearest."""
    if isinstance(value, int):
        return lambda: value
    sample = value.sample
    return lambda: max(floor, math.floor(min(max(sample(rng), -1.0), ceiling) + 0.5))


def pause_sampler_us(value: Pause, rng: random.Random) -> Callable[[], int]:
    """A function that draws pauses in whole microseconds, from 0 to the longest there is."""
    if isinstance(value, int | float):
        constant = round(value * 1000)
        return lambda: constant
    sample = value.sample
    return lambda: round(min(max(sample(rng), 0.0), PAUSE_MS_MAX) * 1000)


def largest(value: float | Distribution) -> tuple[float, str]:
    """How large a number gets, and for a message where: a constant, the upper bound of a spread, or without one its
    median."""
    if isinstance(value, int | float):
        return value, ""
    if value.highest() < math.inf:
        return value.highest(), " at its highest"
    return value.median(), " in half of its samples or more"


def check_length(name: str, value: Length, fits: Whole) -> None:
    """Refuses a number that does not fit. Spread ones are lifted and cut when drawn, but not if their bounds or most
    of their samples lie beyond."""
    highest = value if isinstance(value, int) else value.highest()
    if highest < fits.low:
        raise ValueError(f"{name} = {shown(highest)} can never reach {fits.low}: raise it")
    _check_most(name, value, fits.high, "", fits.why)


def check_sessions(times_name: str, times: int, name: str, value: Length) -> None:
    """Refuses a number of sessions, drawn `times` times, that together are more than a run can hold. Spread ones that
    only may be are cut to their part of the most when drawn."""
    check_length(name, value, Whole(1, SESSIONS_MAX))
    most, where = largest(value)
    sessions(f"{times_name} x {name}", times * most, where)


def check_pause(name: str, value: Pause) -> None:
    """Refuses a pause that has no end or is always negative."""
    if isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value:g}: give a finite number of milliseconds")
    if isinstance(value, int | float):
        if value < 0:
            raise ValueError(f"{name} = {value}: give a time in milliseconds; a pause is 0 ms or more")
    elif value.highest() < 0:
        raise ValueError(f"{name} = {value.highest():g} at its highest: a pause is 0 ms or more")
    elif -math.inf < value.lowest() < 0:
        raise ValueError(
            f"{name} goes down to {value.lowest():g}: a pause is 0 ms or more, so raise low (or set min = 0)"
        )
    _check_most(name, value, PAUSE_MS_MAX, " ms")


def _check_most(name: str, value: float | Distribution, most: float, unit: str, why: str = "") -> None:
    """A constant or a bound above `most` is a slip of the pen; so is a spread whose usual sample is."""
    found, where = largest(value)
    if not found <= most:
        why = why or f"at most {most:,.0f}{unit} can be drawn, so lower it"
        raise ValueError(f"{name} = {shown(found)}{unit}{where}: {why}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} = {value:g}: give a number above 0")
