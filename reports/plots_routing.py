"""Figures about the routers themselves: where new sessions go under load, how much one remembers, what came and went.

Replicas that come and go are marked in every plot over time, so that a step in a curve has its cause beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.compare import Arm
from reports.display import number
from reports.plot_parts import TIME_AXIS, Plot, thin, trace_of
from reports.spread import chances

LOAD_BINS = 10
CORRELATED = 0.1  # a weaker correlation is of no use, however certain
CORRELATED_ERRORS = 2.0  # standard errors of a correlation of chance, 1 / sqrt(chances)
INDEX_POINTS = 240
DONE = {"add": "joins", "drain": "drains", "remove": "leaves", "crash": "crashes", "restart": "restarts"}

Churn = Sequence[Mapping[str, Any]]


def placement_against_load(arms: Sequence[Arm]) -> Plot | None:
    """How often a new session went to a replica, by the share of the decode load that the replica had then."""
    data, signs = [], []
    for place, arm in enumerate(arms):
        load, went = chances(arm.rows, arm.fleet)
        r = arm.metrics.get("new_session_load_r")
        if r is None:
            continue
        bins = np.minimum((load * LOAD_BINS).astype(np.int64), LOAD_BINS - 1)
        count = np.bincount(bins, minlength=LOAD_BINS)
        taken = np.bincount(bins, weights=went, minlength=LOAD_BINS)
        used = count > 0
        middle = 100 * (np.arange(LOAD_BINS) + 0.5) / LOAD_BINS
        trace = trace_of(place, arm.name, x=thin(middle[used], 1), y=thin(100 * taken[used] / count[used], 2))
        trace["customdata"] = count[used].tolist()
        trace["mode"] = "lines+markers"
        trace["hovertemplate"] = f"%{{y:.0f}} % of %{{customdata:,}} chances<extra>{arm.name}, r {number(r, 2)}</extra>"
        data.append(trace)
        certain = abs(r) >= max(CORRELATED, CORRELATED_ERRORS / np.sqrt(len(load)))
        way = ("avoids load" if r < 0 else "seeks load") if certain else "shows neither"
        signs.append(f"{arm.name} {way} (r {number(r, 2)})")
    layout = {
        "xaxis": {"title": {"text": "% of the decode load on the replica"}, "range": [0, 100], "dtick": 25},
        "yaxis": {"title": {"text": "% of new sessions that went there"}, "rangemode": "tozero"},
        "hovermode": "closest",
    }
    note = f"falling: new sessions avoid load, rising: they seek it; by correlation {', '.join(signs)}"
    return Plot("placement-load", "New sessions against load", note, data, layout, section="cache") if data else None


def index_size(arms: Sequence[Arm], samples: pd.DataFrame) -> Plot | None:
    """Entries that each router process holds, in the first repeat."""
    data = []
    for place, arm in enumerate(arms):
        own = samples[(samples["router"] == arm.name) & samples["index_size"].notna()]
        own = own[own["repeat"] == own["repeat"].min()]
        ingresses = own["ingress"].drop_duplicates().tolist()
        for ingress in ingresses:
            part = own[own["ingress"] == ingress].iloc[:: max(1, len(own) // INDEX_POINTS)]
            name = arm.name if len(ingresses) == 1 else f"{arm.name} {ingress}"
            seconds = part["t_us"].to_numpy(dtype=np.float64) / 1e6
            trace = trace_of(place, name, x=thin(seconds, 2), y=[int(size) for size in part["index_size"]])
            trace["hovertemplate"] = f"%{{y:,}} entries<extra>{name}</extra>"
            data.append(trace)
    layout = {
        "xaxis": TIME_AXIS,
        "yaxis": {"title": {"text": "entries"}, "rangemode": "tozero", "tickformat": "~s"},
        "hovermode": "x unified",
    }
    note = "entries in the index of prefixes of each router process; a curve that never bends has no bound"
    return Plot("index-size", "Index size over time", note, data, layout, section="cache") if data else None


def mark_churn(plot: Plot, churn: Churn, names: Sequence[str]) -> Plot:
    """A dotted line wherever a replica came or went, in each panel of a plot over time; panels are `names` in order, or
    one panel holds all."""
    panels = [key for key in plot.layout if key.startswith("xaxis")]
    several = len(panels) > 1
    for panel, key in enumerate(panels):
        suffix = key.removeprefix("xaxis")
        router = names[panel] if several else names[0]
        events = [each for each in churn if not each.get("repeat") and each.get("router", router) == router]
        for place, each in enumerate(events):
            at_s = each["at_s"] if each.get("done_at_s") is None else each["done_at_s"]
            line = {"type": "line", "x0": at_s, "x1": at_s, "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1}}
            where = {"xref": f"x{suffix}", "yref": f"y{suffix} domain" if several else "paper"}
            plot.layout.setdefault("shapes", []).append(line | where)
            text = f"{each['replica']} {DONE.get(each['do'], each['do'])}"
            # Above a plot of its own; beside others the name of the router stands there.
            y, anchor = (1 - 0.08 * (place % 3), "top") if several else (1 + 0.05 * (place % 2), "bottom")
            note = {"text": text, "x": at_s, "y": y, "yanchor": anchor, "xanchor": "left", "showarrow": False}
            plot.layout.setdefault("annotations", []).append(note | where | {"small": True})
    return plot
