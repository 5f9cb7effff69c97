"""What every figure of report.html is made of: the shape of a plot, a curve, and numbers thinned out.

A trace never holds a colour: `meta` says which router, replica or role it draws, and the page colours it for light or
dark, replicas by their place among all of the run. Roles are `mark` (what to look at), `soft` (background), and `phase`
0 to 4 (what a request was doing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reports.compare import Arm
from reports.latency import sample
from reports.rows import Floats, Ints, Rows, natural_key, replica_names

SPANS = 48  # of a curve over time
TIME_AXIS = {"title": {"text": "seconds since the arm began"}, "rangemode": "tozero"}


@dataclass(frozen=True, slots=True)
class Plot:
    id: str
    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340
    wide: bool = False
    section: str = field(default="latency")
    replicas: list[str] = field(default_factory=list)
    """Names behind the colours of replicas, which the caption shows; empty where no trace is one."""


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Round values, written out, at even distances where the range is narrow; plotly's own show bare digits."""
    if not values:
        return {}
    low, high = min(values), max(values)
    if high < 4 * low:
        power = 10.0 ** math.floor(math.log10(max((high - low) / 5, low / 1_000)))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 6 >= high - low)
        ticks = [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
    else:
        steps = (1, 3) if high > 300 * low else (1, 2, 5) if high > 12 * low else (1, 1.5, 2, 3, 5, 7)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
    inside = [tick for tick in ticks if 0.95 * low <= tick <= 1.05 * high]
    return {"tickmode": "array", "tickvals": inside, "ticktext": [f"{tick:,.6g}" for tick in inside]}


def replicas_of(arms: Sequence[Arm]) -> list[str]:
    """Every replica of a run, so that one has the same colour in all plots."""
    named = {name for arm in arms for name in (*replica_names(arm.fleet), *replica_names(arm.rows.frame))}
    return sorted(named | {name for arm in arms for name in arm.metrics["placement"] or ()}, key=natural_key)


def share_of(place: int, count: int, gap: float) -> list[float]:
    """The span from 0 to 1 that panel `place` of `count` fills, with gaps between panels and none at the edges."""
    size = (1 - gap * (count - 1)) / count
    start = place * (size + gap)
    return [round(start, 4), round(min(1.0, start + size), 4)]


def trace_of(place: int, name: str, *, x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"width": 2.4},
        "meta": {"router": place},
    }


def spans_of(instants_us: Ints) -> tuple[Ints, Floats]:
    """Which of SPANS equal spans from the arm's start each instant lies in, and their middles in seconds."""
    ends_us = int(instants_us.max()) + 1
    middles = (np.arange(SPANS) + 0.5) * ends_us / SPANS / 1e6
    return np.clip(instants_us * SPANS // ends_us, 0, SPANS - 1), middles


def thin(values: Floats, decimals: int) -> list[float]:
    return [round(value, decimals) for value in values.tolist()]


def whole_sessions(rows: Rows) -> Rows:
    """Rows of the sessions that count as whole, turns in a ramp included; where none does, of the steady phase."""
    return _of_counted(rows, "session_e2e_ms", rows.sessions) or rows.steady


def whole_steps(rows: Rows) -> Rows:
    """Rows of the rollout steps that count; where there are none, of whole sessions."""
    return _of_counted(rows, "step_makespan_ms", rows.steps) or whole_sessions(rows)


def _of_counted(rows: Rows, name: str, units: Ints) -> Rows | None:
    found = sample(name, rows)
    return None if found is None or not len(found.values) else rows.where(np.isin(units, found.clusters))


def first_repeat(rows: Rows) -> Rows:
    repeats = rows.column("repeat").values
    return rows.where(repeats == repeats.min()) if len(rows) else rows
