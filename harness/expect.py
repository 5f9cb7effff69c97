"""What a scenario expects to find, and whether it was found.

An expectation is one sentence with a check behind it, judged on the figures of a finished run. An experiment states
them in its file, so that a run says whether the world is still as described; an expectation about figures that are
not there (a router that did not run, an unknown value) is not met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from reports import UnknownMetricError, direction_of, lookup


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[expect]]` table: a sentence, a metric's address and exactly one kind of check."""

    that: str
    """The expectation in words."""
    metric: str
    """Address of a figure, such as `ttft_ms.p99` or `placement.max_share`."""
    best: str | None = None
    """This router has the best figure of all, by the metric's own direction."""
    router: str | None = None
    """The router whose figure is compared with `above` or `below`."""
    above: str | float | None = None
    """A number, or a router whose figure must be smaller."""
    below: str | float | None = None
    """A number, or a router whose figure must be larger."""
    times: float = 1.0
    """`above`, `below`: by at least this factor."""
    rising: tuple[str, ...] = ()
    """The figure grows along these routers, or stays."""
    falling: tuple[str, ...] = ()
    """The figure shrinks along these routers, or stays."""
    lowest: tuple[str, ...] = ()
    """The smallest figure of all belongs to one of these routers."""

    def __post_init__(self) -> None:
        try:
            direction = direction_of(self.metric)
        except UnknownMetricError as error:
            raise ValueError(f"expectation {self.that!r}: {error}") from error
        kinds = [
            k for k in ("best", "above", "below", "rising", "falling", "lowest") if getattr(self, k) not in (None, ())
        ]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none"
            raise ValueError(
                f"expectation {self.that!r} has {said}: give exactly one of best, above, below, rising, falling, lowest"
            )
        if (kinds[0] in ("above", "below")) != (self.router is not None):
            raise ValueError(f"expectation {self.that!r}: router goes with above or below, and only with them")
        if kinds == ["best"] and direction == "none":
            raise ValueError(f"expectation {self.that!r}: {self.metric} has no better side; use above or below")
        if not self.times > 0:
            raise ValueError(f"expectation {self.that!r}: times = {self.times} must be above 0")

    def names(self) -> set[str]:
        """Routers that must have run."""
        given = {self.best, self.router, *(x for x in (self.above, self.below) if isinstance(x, str))}
        return {*self.rising, *self.falling, *self.lowest, *given} - {None}  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Finding:
    """An expectation beside what was found."""

    that: str
    met: bool
    found: str

    def __str__(self) -> str:
        return f"{'as expected' if self.met else 'NOT as expected'}: {self.that} ({self.found})"


def judge(expectations: Sequence[Expectation], routers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Every expectation beside the figures of a run's routers."""
    return [_judge(expectation, routers) for expectation in expectations]


def _judge(expectation: Expectation, routers: Mapping[str, Mapping[str, Any]]) -> Finding:
    figures = {name: lookup(metrics, expectation.metric) for name, metrics in routers.items()}
    unknown = sorted(name for name in expectation.names() if figures.get(name) is None)
    if unknown:
        return Finding(expectation.that, False, f"{expectation.metric} of {', '.join(unknown)} is not known")
    known = {name: float(value) for name, value in figures.items() if value is not None}
    found = f"{expectation.metric}: " + ", ".join(f"{name} {_short(value)}" for name, value in known.items())
    return Finding(expectation.that, _holds(expectation, known), found)


def _holds(expectation: Expectation, figures: Mapping[str, float]) -> bool:
    if expectation.best:
        lower = direction_of(expectation.metric) == "lower"
        own = figures[expectation.best]
        others = [value for name, value in figures.items() if name != expectation.best]
        return all(own < value if lower else own > value for value in others)
    if expectation.rising or expectation.falling:
        row = [figures[name] for name in expectation.rising or expectation.falling]
        return all(a <= b if expectation.rising else a >= b for a, b in pairwise(row))
    if expectation.lowest:
        smallest = min(figures.values())
        return any(figures[name] == smallest for name in expectation.lowest)
    own = figures[expectation.router or ""]
    bound = expectation.above if expectation.above is not None else expectation.below
    other = figures[bound] if isinstance(bound, str) else float(bound or 0)
    if expectation.above is not None:
        return own > other * expectation.times
    return own * expectation.times < other


def _short(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return (
        f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}".rstrip("0").rstrip(".")
        if abs(value) < 1000
        else f"{value:,.0f}"
    )
