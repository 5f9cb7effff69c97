"""Figures of report.html as plain plotly.js dictionaries, thinned out so that the page stays small.

A curve keeps a few hundred points however many requests there were: a distribution at fixed ranks, denser towards the
tail, a series in time as means over equal spans. Colours are not here: a trace says which router or replica it draws,
and the page colours it for light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.compare import Arm
from reports.latency import sample
from reports.metrics_table import METRICS
from reports.plot_parts import Plot, first_repeat, log_ticks, replicas_of, share_of, thin, trace_of
from reports.plots_cache import hit_rate, waterfall
from reports.plots_lanes import swim_lanes
from reports.plots_routing import Churn, index_size, mark_churn, placement_against_load
from reports.plots_time import latency_over_time, time_spent
from reports.rows import Floats, Ints

CURVE_POINTS = 240
SERIES_POINTS = 100
REPLICA_LINES_MAX = 12  # beyond, lines would hide each other: lowest, median and highest replica instead
PANELS_A_ROW = 4
GAP_SPANS = 2  # spans without a sample from which a line is broken: the replica was not there


def plots(arms: Sequence[Arm], router_samples: pd.DataFrame | None = None, churn: Churn = ()) -> list[Plot]:
    """Every plot for which the run has figures, in the order of the page; `churn` is marked where time is an axis."""
    drawn = [
        _makespans(arms),
        *(_distribution(arms, name, note) for name, note in DISTRIBUTIONS_DRAWN if not _again(arms, name)),
        *(latency_over_time(arms, name) for name in OVER_TIME_DRAWN),
        swim_lanes(arms),
        time_spent(arms),
        hit_rate(arms),
        _placement(arms),
        waterfall(arms),
        placement_against_load(arms),
        None if router_samples is None else index_size(arms, router_samples),
        *(_load(arms, *load) for load in LOADS_DRAWN),
    ]
    shown = [plot for plot in drawn if plot is not None and plot.data]
    if churn:
        for plot in shown:
            if plot.id.startswith(OVER_TIME):
                names = [arm.name for arm in arms]
                if plot.id.startswith("load-"):
                    names = [arm.name for arm in arms if arm.fleet[plot.id.removeprefix("load-")].notna().any()]
                mark_churn(plot, churn, names)
    return shown


OVER_TIME = ("time-ttft_ms", "time-tpot_ms", "hit-rate", "index-size", "load-")  # plots whose x is the arm's time


DISTRIBUTIONS_DRAWN = (
    ("ttft_ms", "from sent to first token"),
    ("tpot_ms", "per output token after the first, mean of each answer"),
    ("e2e_ms", "from sent to last token"),
    ("session_e2e_ms", "from the first turn sent to the last token, pauses included"),
    ("group_completion_ms", "from the group's first request to the last token of its slowest rollout"),
)
OVER_TIME_DRAWN = ("ttft_ms", "tpot_ms")
LOADS_DRAWN = (
    ("running", "Running requests", "requests in the batch of each replica", "requests"),
    ("waiting", "Waiting requests", "requests in the queue of each replica", "requests"),
    ("used_blocks", "KV blocks in use", "blocks held by requests of each replica", "blocks"),
)


def _distribution(arms: Sequence[Arm], name: str, note: str) -> Plot | None:
    """In seconds where nothing is below one."""
    data: list[dict[str, Any]] = []
    for place, arm in enumerate(arms):
        found = sample(name, arm.rows)
        if found is None or not len(found.values):
            continue
        shares, values = _curve(found.values)
        data.append(trace_of(place, arm.name, x=thin(values / 1_000, 3), y=thin(100 * shares, 3)))
    unit = "s" if data and min(value for trace in data for value in trace["x"]) >= 1_000 else "ms"
    for trace in data:
        if unit == "s":
            trace["x"] = [round(value / 1_000, 3) for value in trace["x"]]
        trace["hovertemplate"] = f"%{{y:.1f}} % within %{{x:,.1f}} {unit}<extra>{trace['name']}</extra>"
    drawn = [value for trace in data for value in trace["x"] if value > 0]
    layout = {
        "xaxis": {"type": "log", "title": {"text": f"{unit}, log scale"}, **log_ticks(drawn)},
        "yaxis": {
            "title": {"text": f"% of {_COUNTED.get(name, 'requests')}"},
            "range": [0, 101],
            "dtick": 25,
        },
        "hovermode": "closest",
    }
    section = "rollouts" if name == "group_completion_ms" else "latency"
    return Plot(f"ecdf-{name}", METRICS[name].title, note, data, layout, section=section) if data else None


def _again(arms: Sequence[Arm], name: str) -> bool:
    """Whether a curve says what another says: sessions of one turn are requests."""
    return name == "session_e2e_ms" and not any((arm.rows.column("turn").values > 0).any() for arm in arms)


_COUNTED = {"session_e2e_ms": "sessions", "group_completion_ms": "groups"}


def _curve(values: Ints | Floats) -> tuple[Floats, Floats]:
    """Shares and the values at these ranks: even steps, then finer ones through the last percent."""
    ordered = np.sort(values)
    shares = np.unique(np.concatenate([np.linspace(0, 1, CURVE_POINTS - 60), 1 - np.geomspace(0.1, 1e-4, 60)]))
    ranks = np.unique(np.clip(np.ceil(shares * len(ordered)).astype(np.int64) - 1, 0, len(ordered) - 1))
    return (ranks + 1) / len(ordered), ordered[ranks].astype(np.float64)


def _placement(arms: Sequence[Arm]) -> Plot | None:
    known = [arm for arm in arms if arm.metrics["placement"]]
    names = replicas_of(arms)
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
                "text": [f"{replica} {share:.0f} %" if share >= 12 else "" for share in shares],
                "textangle": 0,
                "textposition": "inside",
                "insidetextanchor": "middle",
                "hovertemplate": f"{replica}: %{{x:.1f}} % (%{{customdata:,}} requests)<extra>%{{y}}</extra>",
                "meta": {"replica": place, "replicas": len(names)},
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "% of requests"}, "range": [0, 100], "dtick": 25},
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
        replicas=names,
    )


def _makespans(arms: Sequence[Arm]) -> Plot | None:
    data = []
    for place, arm in enumerate(arms):
        rows = first_repeat(arm.rows)
        found = sample("step_makespan_ms", rows)
        if found is None or not len(found.values):
            continue
        steps = (found.clusters & ((1 << 40) - 1)).tolist()
        seconds = thin(found.values / 1e6, 3)
        trace = trace_of(place, arm.name, x=steps, y=seconds) | {"mode": "lines+markers"}
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


def _load(arms: Sequence[Arm], column: str, title: str, note: str, unit: str) -> Plot | None:
    """One panel a router, all on the same scale, one line a replica."""
    known = [(place, arm) for place, arm in enumerate(arms) if arm.fleet[column].notna().any()]
    if not known:
        return None
    down = -(-len(known) // PANELS_A_ROW)
    across = -(-len(known) // down)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"hovermode": "x unified", "annotations": []}
    names = replicas_of(arms)
    highest = max(float(arm.fleet[column].max()) for _, arm in known)
    longest_s = max(float(arm.fleet["t_us"][arm.fleet[column].notna()].max()) for _, arm in known) / 1e6
    for panel, (place, arm) in enumerate(known):
        suffix = str(panel + 1) if panel else ""
        x_domain = share_of(panel % across, across, gap=0.03)
        y_domain = share_of(down - 1 - panel // across, down, gap=0.2)
        layout[f"xaxis{suffix}"] = {
            "domain": x_domain,
            "anchor": f"y{suffix}",
            "range": [0, longest_s or 1],
            "ticksuffix": " s",
        }
        layout[f"yaxis{suffix}"] = {
            "domain": y_domain,
            "anchor": f"x{suffix}",
            "range": [0, highest * 1.08 or 1],
            "showticklabels": panel % across == 0,
            "tickformat": ",.6~g",
        }
        if panel % across == 0:
            layout[f"yaxis{suffix}"]["title"] = {"text": unit}
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
        for trace in _replica_lines(arm, column, names):
            data.append(trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"})
    key = list(dict.fromkeys(trace["name"] for trace in data)) if len(names) > REPLICA_LINES_MAX else names
    height = 210 * down + 50
    return Plot(f"load-{column}", title, note, data, layout, height, wide=True, section="load", replicas=key)


def _replica_lines(arm: Arm, column: str, names: Sequence[str]) -> Iterable[dict[str, Any]]:
    """One a replica; of very many the lowest, the median and the highest."""
    fleet = arm.fleet[arm.fleet["repeat"] == arm.fleet["repeat"].min()]
    t_us = fleet["t_us"].to_numpy(dtype=np.int64)
    span_us = max(500_000, -(-int(t_us.max() + 1) // SERIES_POINTS))
    series = {}
    for name in names:
        mask = (fleet["replica"] == name).to_numpy(dtype=bool) & fleet[column].notna().to_numpy(dtype=bool)
        if mask.any():
            series[name] = _means(t_us[mask] // span_us, fleet[column][mask].to_numpy(dtype=np.float64))
    if len(names) > REPLICA_LINES_MAX:
        table = pd.DataFrame(series)
        parts = {"lowest": table.min(axis=1), "median": table.median(axis=1), "highest": table.max(axis=1)}
        series = {f"{word} of {len(names)}": values for word, values in parts.items()}
        names = list(series)
    for name, known in series.items():
        values = _broken_where_absent(known)
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": thin(values.index.to_numpy(dtype=np.float64) * span_us / 1e6, 2),
            "y": [None if np.isnan(value) else value for value in thin(values.to_numpy(dtype=np.float64), 2)],
            "line": {"width": 1.6},
            "hovertemplate": f"{name}: %{{y:,.1f}}<extra></extra>",
            "meta": {"replica": names.index(name), "replicas": len(names)},
        }


def _broken_where_absent(values: pd.Series) -> pd.Series:
    """With an unknown value behind the last one before each gap, so that no line is drawn over the time in which a
    replica was dead."""
    spans = values.index.to_numpy(dtype=np.int64)
    gaps = spans[:-1][np.diff(spans) > GAP_SPANS] + 1
    return pd.concat([values, pd.Series(np.nan, index=gaps)]).sort_index() if len(gaps) else values


def _means(bins: Ints, values: Floats) -> pd.Series:
    return pd.Series(values, index=bins).groupby(level=0).mean()
