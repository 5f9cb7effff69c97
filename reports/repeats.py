"""Whether a wall-clock figure got worse, from repeats on both sides.

Repeat k of both runs had the same sessions, so like is compared with like and what the sessions made hard cancels out.
The spread of these gaps is the machine's noise. Three repeats alone tell little about it, so the gaps of all routers
estimate it together, each around its own mean; a router twice as noisy as that keeps its own spread. Drawing from three
repeats again (a bootstrap) would see even less, so Student's t is used and nothing is drawn. Many figures are judged at
once: Benjamini and Hochberg's rule keeps the chance that an unchanged run is called worse below ALPHA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.intervals import t_quantile, t_tail

ALPHA = 0.05
EQUAL = 1e-9  # below, a difference is that of rounding
OWN_NOISE = 2.0  # times the common variance from which a router's own counts


@dataclass(frozen=True, slots=True)
class Change:
    """How far a figure moved for the worse (negative: for the better), in the unit of its tolerance."""

    worse: float
    low: float  # 95 % interval of `worse`
    high: float
    chance: float  # of seeing this much or more if nothing had become worse


def changes(gaps: Mapping[str, Sequence[float]]) -> dict[str, Change]:
    """Per router, from the gaps of its repeats, worse being positive. At least two repeats each."""
    freedom = sum(len(each) - 1 for each in gaps.values())
    common = math.fsum(_squares(each) for each in gaps.values()) / freedom
    return {router: _change(each, common, freedom) for router, each in gaps.items()}


def _change(gaps: Sequence[float], common: float, freedom: int) -> Change:
    count = len(gaps)
    mean, own = math.fsum(gaps) / count, _squares(gaps) / (count - 1)
    variance, degrees = (own, count - 1) if own > OWN_NOISE * common else (common, freedom)
    error = math.sqrt(variance / count)
    if error < EQUAL:  # the same in every repeat: no chance is in it
        return Change(mean, mean, mean, 0.0 if mean > EQUAL else 1.0)
    half = t_quantile(1 - ALPHA / 2, degrees) * error
    return Change(mean, mean - half, mean + half, t_tail(mean / error, degrees))


def _squares(gaps: Sequence[float]) -> float:
    mean = math.fsum(gaps) / len(gaps)
    return math.fsum((gap - mean) ** 2 for gap in gaps)


def beyond_chance(chances: Sequence[float]) -> list[bool]:
    """Which of several figures, judged together, are worse beyond chance."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    last = max((rank for rank, place in enumerate(order, 1) if chances[place] <= ALPHA * rank / len(order)), default=0)
    found = [False] * len(chances)
    for place in order[:last]:
        found[place] = True
    return found
