"""Figures about time: latency while the run went on, and what the time of a session was spent on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reports.compare import Arm
from reports.latency import PER_REQUEST, nearest_rank
from reports.metrics_table import METRICS
from reports.plot_parts import (
    SPANS,
    TIME_AXIS,
    Plot,
    first_repeat,
    log_ticks,
    share_of,
    spans_of,
    thin,
    trace_of,
    whole_sessions,
)
from reports.rows import Floats, Ints, Rows

DRAWN = (("p50", 50), ("p95", 95))  # from the bottom up, a panel each: on one axis they would cross each other
PANELS_PX = 420
PHASES = ("routing", "engine queue", "prefill", "decode", "pause")


def latency_over_time(arms: Sequence[Arm], name: str) -> Plot | None:
    """Median and p95 of the requests sent in each of equal spans, p95 above."""
    data: list[dict[str, Any]] = []
    drawn: dict[str, list[float]] = {word: [] for word, _ in DRAWN}
    for place, arm in enumerate(arms):
        steady = first_repeat(arm.rows).steady
        values, known = PER_REQUEST[name](steady)
        sent = steady.column("sent_us")
        mask = known & sent.known
        if not mask.any():
            continue
        spans, middles = spans_of(sent.values[mask])
        for panel, (word, percentile) in enumerate(DRAWN):
            ranks = _ranks(spans, np.asarray(values[mask] / 1_000, dtype=np.float64), percentile)
            trace = trace_of(place, f"{arm.name} {word}", x=thin(middles, 2), y=ranks)
            trace |= {"connectgaps": True, "yaxis": _axis("y", panel)}
            drawn[word] += [rank for rank in ranks if rank and rank > 0]
            trace["hovertemplate"] = f"{word} %{{y:,.1f}} ms<extra>{arm.name}</extra>"
            data.append(trace)
    time = {**TIME_AXIS, "title": {"text": "seconds since the arm began, when sent"}}
    layout: dict[str, Any] = {"xaxis": time, "hovermode": "x unified"}
    for panel, (word, _) in enumerate(DRAWN):
        layout[_axis("yaxis", panel)] = {
            "type": "log",
            "title": {"text": f"{word}, ms"},
            "domain": share_of(panel, len(DRAWN), gap=0.08),
            **log_ticks(drawn[word]),
        }
    title = f"{METRICS[name].title} over time"
    note = f"p95 above, p50 below, of the requests sent in each of {SPANS} spans; log scale"
    return Plot(f"time-{name}", title, note, data, layout, PANELS_PX) if any(drawn.values()) else None


def _axis(letter: str, panel: int) -> str:
    """As plotly counts them: the first has no number."""
    return f"{letter}{panel + 1}" if panel else letter


def _ranks(spans: Ints, values: Floats, percentile: int) -> list[float | None]:
    order = np.lexsort((values, spans))
    spans, values = spans[order], values[order]
    starts = np.searchsorted(spans, np.arange(SPANS))
    ends = np.searchsorted(spans, np.arange(SPANS), side="right")
    return [
        round(float(values[start + nearest_rank(end - start, percentile)]), 3) if end > start else None
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def time_spent(arms: Sequence[Arm]) -> Plot | None:
    """What a mean session's time went into; a phase that nobody recorded is inside the next one."""
    shares = [(arm, *_phases(whole_sessions(first_repeat(arm.rows)))) for arm in arms]
    known = [(arm, spent, sessions) for arm, spent, sessions in shares if sessions and sum(spent) > 0]
    if not known:
        return None
    data = []
    for phase, title in enumerate(PHASES):
        seconds = [spent[phase] / sessions / 1e6 for _, spent, sessions in known]
        if not any(seconds):
            continue
        parts = [spent[phase] / sum(spent) for _, spent, _ in known]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": title,
                "y": [arm.name for arm, _, _ in known],
                "x": [round(value, 4) for value in seconds],
                "text": [f"{title} {100 * part:.0f} %" if part >= 0.12 else "" for part in parts],
                "customdata": [round(100 * part, 1) for part in parts],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "hovertemplate": f"{title}: %{{x:,.2f}} s (%{{customdata}} %)<extra>%{{y}}</extra>",
                "meta": {"phase": phase},
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"title": {"text": "seconds of a mean session"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "ticklabelstandoff": 8, "automargin": True},
        "hovermode": "closest",
        "showlegend": True,
    }
    note = "a session's time by what it waited for; prefill holds the step of the first token, a pause is between turns"
    return Plot(
        "time-spent", "Where time went", note, data, layout, height=140 + 50 * len(known), wide=True, section="sessions"
    )


def _phases(rows: Rows) -> tuple[list[float], int]:
    """Microseconds per phase over all successes, and how many sessions these are of."""
    sent, routed, admitted = (rows.column(name) for name in ("sent_us", "routed_us", "admitted_us"))
    first, last = rows.column("first_token_us"), rows.column("last_token_us")
    mask = rows.ok & sent.known & first.known & last.known
    at_router = np.where(routed.known, routed.values, sent.values)
    in_engine = np.where(admitted.known, admitted.values, at_router)
    spans = (at_router - sent.values, in_engine - at_router, first.values - in_engine, last.values - first.values)
    spent = [float(np.maximum(span[mask], 0).sum()) for span in spans]
    return [*spent, _pauses(rows, mask)], len(np.unique(rows.sessions[mask]))


def _pauses(rows: Rows, mask: Any) -> float:
    """Between the end of an answer and the next turn of the same session."""
    sessions, sent, last = (
        values[mask] for values in (rows.sessions, rows.column("sent_us").values, rows.column("last_token_us").values)
    )
    order = np.lexsort((sent, sessions))
    same = sessions[order][1:] == sessions[order][:-1]
    gaps = sent[order][1:] - last[order][:-1]
    return float(np.maximum(gaps[same], 0).sum())
