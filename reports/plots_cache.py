"""Figures about the cache: the hit rate over time, and where hits were lost on the way from possible to served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reports.compare import Arm
from reports.display import percent
from reports.plot_parts import SPANS, TIME_AXIS, Plot, first_repeat, spans_of, thin, trace_of

FALLS = ("lost by placement or eviction", "believed, not served")
STAGES = ("one infinite cache", FALLS[0], "the router believed", FALLS[1], "served")


def hit_rate(arms: Sequence[Arm]) -> Plot | None:
    data: list[dict[str, Any]] = []
    for place, arm in enumerate(arms):
        rows = first_repeat(arm.rows).steady
        prompt, cached, first = (
            rows.column("prompt_tokens"),
            rows.column("cached_tokens"),
            rows.column("first_token_us"),
        )
        served = rows.ok & prompt.known & cached.known & first.known
        if not served.any():
            continue
        spans, middles = spans_of(first.values[served])
        asked = np.bincount(spans, weights=prompt.values[served], minlength=SPANS)
        hits = np.bincount(spans, weights=cached.values[served], minlength=SPANS)
        rates = [100 * hit / whole if whole else None for hit, whole in zip(hits.tolist(), asked.tolist(), strict=True)]
        trace = trace_of(
            place, arm.name, x=thin(middles, 2), y=[None if rate is None else round(rate, 2) for rate in rates]
        )
        trace["hovertemplate"] = f"%{{y:.1f}} % at %{{x:.1f}} s<extra>{arm.name}</extra>"
        data.append(trace)
    ceilings = [arm.metrics["hit_rate_ceiling"] for arm in arms if arm.metrics["hit_rate_ceiling"] is not None]
    layout: dict[str, Any] = {
        "xaxis": TIME_AXIS,
        "yaxis": {"title": {"text": "% of prompt tokens"}, "range": [0, 101], "dtick": 25},
        "hovermode": "x unified",
    }
    note = f"prompt tokens found cached, in {SPANS} spans of time"
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


def waterfall(arms: Sequence[Arm]) -> Plot | None:
    """From what one infinite cache would have hit down to what was served; a rise is a belief that was too low."""
    data: list[dict[str, Any]] = []
    for place, arm in enumerate(arms):
        steps = _steps(arm)
        if not steps:
            continue
        for full in (True, False):
            chosen = [step for step in steps if (step[0] not in FALLS) is full]
            data.append(
                {
                    "type": "bar",
                    "name": arm.name,
                    "x": [stage for stage, _, _ in chosen],
                    "y": [round(to - start, 2) for _, start, to in chosen],
                    "base": [round(start, 2) for _, start, _ in chosen],
                    "offsetgroup": str(place),
                    "text": [f"{to:.1f}" if full else _signed(to - start) for _, start, to in chosen],
                    "textposition": "outside" if not full else "inside",
                    "insidetextanchor": "end",
                    "textangle": 0,
                    "hovertemplate": f"%{{x}}: %{{text}} points<extra>{arm.name}</extra>",
                    "meta": {"router": place, "faint": not full},
                }
            )
    drawn = {stage for bars in data for stage in bars["x"]}
    shown = [stage for stage in STAGES if stage in drawn]
    layout = {
        "barmode": "group",
        "bargap": 0.22,
        "xaxis": {"categoryorder": "array", "categoryarray": shown, "range": [-0.5, len(shown) - 0.5]},
        "yaxis": {"title": {"text": "% of prompt tokens"}, "range": [0, 104], "dtick": 25},
        "hovermode": "closest",
    }
    note = "prompt tokens that could have been hit and those that were"
    if FALLS[1] in drawn:
        note = (
            "prompt tokens that could have been hit, were expected where the request was sent, and were served from "
            "cache; believed, not served: gone when the engine came to the request, be it that the index was wrong "
            "when the router chose or that it was evicted while the request waited; above 0 served, not believed"
        )
    return Plot("waterfall", "Where hits were lost", note, data, layout, wide=True, section="cache") if data else None


def _signed(points: float) -> str:
    text = f"{points:+.1f}"
    return text if text.strip("+-0.") else ""


def _steps(arm: Arm) -> list[tuple[str, float, float]]:
    """Each stage with where its bar starts and ends, in percent."""
    values = [arm.metrics.get(name) for name in ("hit_rate_ceiling", "believed_hit_rate", "hit_rate")]
    ceiling, believed, served = (None if value is None else 100 * value for value in values)
    if served is None or (ceiling is None and believed is None):
        return []
    steps: list[tuple[str, float, float]] = []
    level = None
    for place, value in ((0, ceiling), (2, believed), (4, served)):
        if value is None:
            continue
        if level is not None:
            fall = FALLS[1] if place == 4 and believed is not None else FALLS[0]
            steps.append((fall, level, value))
        steps.append((STAGES[place], 0.0, value))
        level = value
    return steps
