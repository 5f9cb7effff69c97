"""Figures of report.html as plain plotly.js dictionaries, thinned out so that the page stays small.

A curve keeps a few hundred points however many requests there were: a distribution at fixed ranks, denser towards the
tail, a series in time as means over equal spans. Colours are not here: a trace says which router or replica it draws,
and the page colours it for light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from reports.compare import Arm
from reports.display import percent
from reports.latency import sample
from reports.metrics_table import METRICS
from reports.rows import Floats, Ints, Rows, replica_names

CURVE_POINTS = 240
SERIES_POINTS = 100
HIT_WINDOWS = 48
REPLICA_LINES_MAX = 12  # beyond, lines would hide each other: lowest, median and highest replica instead
PANELS_A_ROW = 4


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


def plots(arms: Sequence[Arm]) -> list[Plot]:
    """Every plot for which the run has figures, in the order of the page."""
    drawn = [
        _makespans(arms),
        *(_distribution(arms, name, note) for name, note in DISTRIBUTIONS_DRAWN),
        _hit_rate(arms),
        _placement(arms),
        *(_load(arms, *load) for load in LOADS_DRAWN),
    ]
    return [plot for plot in drawn if plot is not None and plot.data]


DISTRIBUTIONS_DRAWN = (
    ("ttft_ms", "from sent to first token"),
    ("tpot_ms", "per output token after the first, mean of each answer"),
    ("e2e_ms", "from sent to last token"),
    ("session_e2e_ms", "from the first turn sent to the last token, pauses included"),
)
LOADS_DRAWN = (
    ("running", "Running requests", "requests in the batch of each replica"),
    ("waiting", "Waiting requests", "requests in the queue of each replica"),
    ("used_blocks", "KV blocks in use", "blocks held by requests of each replica"),
)


def _distribution(arms: Sequence[Arm], name: str, note: str) -> Plot | None:
    data = []
    for place, arm in enumerate(arms):
        found = sample(name, arm.rows)
        if found is None or not len(found.values):
            continue
        shares, values = _curve(found.values)
        trace = _trace(place, arm.name, x=_thin(values / 1_000, 3), y=_thin(100 * shares, 3))
        trace["hovertemplate"] = f"%{{y:.1f}} % within %{{x:,.1f}} ms<extra>{arm.name}</extra>"
        data.append(trace)
    drawn = [value for trace in data for value in trace["x"] if value > 0]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "ms, log scale"}, **_log_ticks(drawn)},
        "yaxis": {
            "title": {"text": "% of " + ("sessions" if name.startswith("session") else "requests")},
            "range": [0, 101],
            "dtick": 25,
        },
        "hovermode": "closest",
    }
    return Plot(f"ecdf-{name}", METRICS[name].title, note, data, layout) if data else None


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
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


def _curve(values: Ints | Floats) -> tuple[Floats, Floats]:
    """Shares and the values at these ranks: even steps, then finer ones through the last percent."""
    ordered = np.sort(values)
    shares = np.unique(np.concatenate([np.linspace(0, 1, CURVE_POINTS - 60), 1 - np.geomspace(0.1, 1e-4, 60)]))
    ranks = np.unique(np.clip(np.ceil(shares * len(ordered)).astype(np.int64) - 1, 0, len(ordered) - 1))
    return (ranks + 1) / len(ordered), ordered[ranks].astype(np.float64)


def _hit_rate(arms: Sequence[Arm]) -> Plot | None:
    data: list[dict[str, Any]] = []
    for place, arm in enumerate(arms):
        rows = _first_repeat(arm.rows).steady
        prompt, cached, first = (
            rows.column("prompt_tokens"),
            rows.column("cached_tokens"),
            rows.column("first_token_us"),
        )
        served = rows.ok & prompt.known & cached.known & first.known
        if not served.any():
            continue
        ends_us = int(first.values[served].max()) + 1
        window = first.values[served] * HIT_WINDOWS // ends_us
        asked = np.bincount(window, weights=prompt.values[served], minlength=HIT_WINDOWS)
        hits = np.bincount(window, weights=cached.values[served], minlength=HIT_WINDOWS)
        rates = [100 * hit / whole if whole else None for hit, whole in zip(hits.tolist(), asked.tolist(), strict=True)]
        middle = (np.arange(HIT_WINDOWS) + 0.5) * ends_us / HIT_WINDOWS / 1e6
        trace = _trace(
            place, arm.name, x=_thin(middle, 2), y=[None if rate is None else round(rate, 2) for rate in rates]
        )
        trace["hovertemplate"] = f"%{{y:.1f}} % at %{{x:.1f}} s<extra>{arm.name}</extra>"
        data.append(trace)
    ceilings = [arm.metrics["hit_rate_ceiling"] for arm in arms if arm.metrics["hit_rate_ceiling"] is not None]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds since the arm began"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "% of prompt tokens"}, "range": [0, 101], "dtick": 25},
        "hovermode": "x unified",
    }
    note = f"prompt tokens found cached, in {HIT_WINDOWS} spans of time"
    if ceilings and data:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 100 * ceilings[0],
                "y1": 100 * ceilings[0],
                "line": {"dash": "dot", "width": 1.5},
            }
        ]
        note += f"; dotted: one infinite cache, {percent(ceilings[0])} over the whole run"
    return Plot("hit-rate", "Hit rate over time", note, data, layout, section="cache") if data else None


def _placement(arms: Sequence[Arm]) -> Plot | None:
    known = [arm for arm in arms if arm.metrics["placement"]]
    names = list(dict.fromkeys(name for arm in known for name in arm.metrics["placement"]))
    data = []
    for place, replica in enumerate(names):
        counts = [arm.metrics["placement"].get(replica, 0) for arm in known]
        totals = [sum(arm.metrics["placement"].values()) for arm in known]
        shares = [round(100 * count / total, 2) for count, total in zip(counts, totals, strict=True)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": replica,
                "y": [arm.name for arm in known],
                "x": shares,
                "customdata": counts,
                "text": [f"{replica} {share:.0f} %" if share >= 9 else "" for share in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "hovertemplate": f"{replica}: %{{x:.1f}} % (%{{customdata:,}} requests)<extra>%{{y}}</extra>",
                "meta": {"replica": place, "replicas": len(names)},
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "% of requests"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "ticklabelstandoff": 8, "automargin": True},
        "hovermode": "closest",
    }
    height = 130 + 46 * len(known)
    return Plot(
        "placement",
        "Placement",
        "share of the requests that each replica got",
        data,
        layout,
        height=max(340, height),
        section="cache",
    )


def _makespans(arms: Sequence[Arm]) -> Plot | None:
    data = []
    for place, arm in enumerate(arms):
        rows = _first_repeat(arm.rows)
        found = sample("step_makespan_ms", rows)
        if found is None or not len(found.values):
            continue
        steps = (found.clusters & ((1 << 40) - 1)).tolist()
        seconds = _thin(found.values / 1e6, 3)
        trace = _trace(place, arm.name, x=steps, y=seconds) | {"mode": "lines+markers"}
        trace["hovertemplate"] = f"step %{{x}}: %{{y:,.1f}} s<extra>{arm.name}</extra>"
        data.append(trace)
    layout = {
        "xaxis": {"title": {"text": "rollout step"}, "dtick": 1 if data and len(data[0]["x"]) <= 24 else None},
        "yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "hovermode": "x unified",
    }
    return (
        Plot(
            "step-makespan",
            "Step makespan",
            "the slowest rollout sets the time of its step",
            data,
            layout,
            section="rollouts",
        )
        if data
        else None
    )


def _load(arms: Sequence[Arm], column: str, title: str, note: str) -> Plot | None:
    """One panel a router, all on the same scale, one line a replica."""
    known = [(place, arm) for place, arm in enumerate(arms) if arm.fleet[column].notna().any()]
    if not known:
        return None
    down = -(-len(known) // PANELS_A_ROW)
    across = -(-len(known) // down)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"hovermode": "x unified", "annotations": []}
    highest = max(float(arm.fleet[column].max()) for _, arm in known)
    for panel, (place, arm) in enumerate(known):
        suffix = str(panel + 1) if panel else ""
        x_domain = _share_of(panel % across, across, gap=0.03)
        y_domain = _share_of(down - 1 - panel // across, down, gap=0.2)
        layout[f"xaxis{suffix}"] = {
            "domain": x_domain,
            "anchor": f"y{suffix}",
            "rangemode": "tozero",
            "ticksuffix": " s",
        }
        layout[f"yaxis{suffix}"] = {
            "domain": y_domain,
            "anchor": f"x{suffix}",
            "range": [0, highest * 1.08 or 1],
            "showticklabels": panel % across == 0,
            "tickformat": ",.4~g",
        }
        layout["annotations"].append(
            {
                "text": arm.name,
                "x": x_domain[0],
                "y": y_domain[1],
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "router": place,
            }
        )
        for trace in _replica_lines(arm, column):
            data.append(trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"})
    return Plot(f"load-{column}", title, note, data, layout, height=210 * down + 50, wide=True, section="load")


def _share_of(place: int, count: int, gap: float) -> list[float]:
    """The span from 0 to 1 that panel `place` of `count` fills, with gaps between panels and none at the edges."""
    size = (1 - gap * (count - 1)) / count
    start = place * (size + gap)
    return [round(start, 4), round(min(1.0, start + size), 4)]


def _replica_lines(arm: Arm, column: str) -> Iterable[dict[str, Any]]:
    fleet = arm.fleet[arm.fleet["repeat"] == arm.fleet["repeat"].min()]
    names = replica_names(fleet)
    t_us = fleet["t_us"].to_numpy(dtype=np.int64)
    span_us = max(500_000, -(-int(t_us.max() + 1) // SERIES_POINTS))
    series = {}
    for name in names:
        mask = (fleet["replica"] == name).to_numpy(dtype=bool) & fleet[column].notna().to_numpy(dtype=bool)
        series[name] = _means(t_us[mask] // span_us, fleet[column][mask].to_numpy(dtype=np.float64))
    if len(names) > REPLICA_LINES_MAX:
        table = pd.DataFrame(series)
        parts = {"lowest": table.min(axis=1), "median": table.median(axis=1), "highest": table.max(axis=1)}
        series = {f"{word} of {len(names)}": values for word, values in parts.items()}
    for place, (name, values) in enumerate(series.items()):
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": _thin(values.index.to_numpy(dtype=np.float64) * span_us / 1e6, 2),
            "y": _thin(values.to_numpy(dtype=np.float64), 2),
            "line": {"width": 1.6},
            "hovertemplate": f"{name}: %{{y:,.1f}}<extra></extra>",
            "meta": {"replica": place, "replicas": len(series)},
        }


def _means(bins: Ints, values: Floats) -> pd.Series:
    return pd.Series(values, index=bins).groupby(level=0).mean()


def _trace(place: int, name: str, *, x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"width": 2.4},
        "meta": {"router": place},
    }


def _thin(values: Floats, decimals: int) -> list[float]:
    return [round(value, decimals) for value in values.tolist()]


def _first_repeat(rows: Rows) -> Rows:
    repeats = rows.column("repeat").values
    return rows.where(repeats == repeats.min()) if len(rows) else rows
