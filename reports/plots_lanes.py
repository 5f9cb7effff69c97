"""Sessions as swim lanes: one lane a session, a bar a turn, coloured by the replica that answered it.

Every router shows the same sessions at the same heights, so one can follow a rollout from router to router. Of RL runs
it is the step that took any router longest; else the neighbours of the slowest session. The slowest one of each router
is marked: in RL it is the path that the whole step waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.compare import Arm
from reports.plot_parts import Plot, first_repeat, replicas_of, share_of, whole_steps
from reports.rows import natural_key

LANES_MAX = 24
ARMS_MAX = 6
LANE_PX, PANEL_GAP_PX, MARGINS_PX = 13, 56, 74
_COLUMNS = ("turn", "sent_us", "first_token_us", "last_token_us", "prompt_tokens", "cached_tokens", "rollout_step")


def swim_lanes(arms: Sequence[Arm]) -> Plot | None:
    tables = {place: _table(arm) for place, arm in enumerate(arms)}
    shown = {place: table for place, table in tables.items() if len(table)}
    if not shown:
        return None
    rollouts = all(table["rollout_step"].notna().all() for table in shown.values())
    step = _longest_step(list(shown.values())) if rollouts else None
    if step is not None:
        shown = {place: table[table["rollout_step"] == step] for place, table in shown.items()}
        shown = {place: table for place, table in shown.items() if len(table)}
    lanes = _lanes(list(shown.values()), rollouts)
    places = list(shown)[:ARMS_MAX]
    replicas = replicas_of(arms)
    inner = LANE_PX * len(lanes) * len(places) + PANEL_GAP_PX * (len(places) - 1)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"hovermode": "closest", "annotations": []}
    for panel, place in enumerate(places):
        table = shown[place][shown[place]["session"].isin(lanes)]
        suffix = str(panel + 1) if panel else ""
        domain = share_of(len(places) - 1 - panel, len(places), gap=PANEL_GAP_PX / inner)
        layout[f"xaxis{suffix}"] = {"anchor": f"y{suffix}", "rangemode": "tozero", "ticksuffix": " s"}
        if panel:
            layout[f"xaxis{suffix}"]["matches"] = "x"
        layout[f"yaxis{suffix}"] = {
            "domain": domain,
            "anchor": f"x{suffix}",
            "range": [len(lanes) - 0.4, -0.6],
            "showticklabels": False,
            "ticks": "",
            "showgrid": False,
        }
        traces, slowest, seconds = _panel(table, lanes, replicas)
        data += [trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in traces]
        layout["annotations"].append(
            {
                "text": f"{arms[place].name}: slowest {slowest}, {seconds:,.1f} s",
                "x": 0,
                "y": domain[1],
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "router": place,
            }
        )
    title = f"Rollouts of step {step}" if step is not None else "Sessions as lanes"
    note = (
        ("the longest step of any router; " if step is not None else f"{len(lanes)} sessions around the slowest; ")
        + "a lane is one session at the same height for every router; thin: waiting for the first token, thick: "
        "answering; colour: replica; shaded: the slowest"
    )
    section = "rollouts" if step is not None else "sessions"
    height = inner + MARGINS_PX
    return Plot("lanes", title, note, data, layout, height, wide=True, section=section, replicas=replicas)


def _table(arm: Arm) -> pd.DataFrame:
    """Answered turns of the first repeat with plain numbers, of what the figures count; NaN where unknown."""
    rows = whole_steps(first_repeat(arm.rows))
    frame = rows.frame
    mask = rows.ok & frame["session"].notna().to_numpy(dtype=bool)
    for name in ("sent_us", "first_token_us", "last_token_us"):
        mask &= rows.column(name).known
    chosen = frame[mask]
    columns = {name: chosen[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in _COLUMNS}
    texts = {name: chosen[name].to_numpy(dtype=object) for name in ("session", "replica")}
    return pd.DataFrame({**texts, **columns})


def _longest_step(tables: Sequence[pd.DataFrame]) -> int:
    """The step with the largest makespan of any router, which the table calls its maximum."""
    longest: dict[int, float] = {}
    for table in tables:
        grouped = table.groupby("rollout_step")
        spans = grouped["last_token_us"].max() - grouped["sent_us"].min()
        for step, span in zip(spans.index.tolist(), spans.tolist(), strict=True):
            longest[int(step)] = max(longest.get(int(step), 0.0), span)
    return max(sorted(longest), key=lambda step: longest[step])


def _lanes(tables: Sequence[pd.DataFrame], rollouts: bool) -> list[str]:
    """Which sessions, from top to bottom."""
    span: dict[str, float] = {}
    for table in tables:
        grouped = table.groupby("session")
        for session, each in (grouped["last_token_us"].max() - grouped["sent_us"].min()).items():
            span[str(session)] = span.get(str(session), 0.0) + float(each)
    slowest = sorted(span, key=lambda session: (-span[session], session))
    if rollouts:
        last = [str(table.groupby("session")["last_token_us"].max().idxmax()) for table in tables]  # all wait for these
        return sorted(dict.fromkeys([*last, *slowest][: LANES_MAX + len(last)]), key=natural_key)
    starts = tables[0].groupby("session")["sent_us"].min()
    order = sorted(span, key=lambda session: (starts.get(session, np.inf), session))
    first = min(max(0, order.index(slowest[0]) - LANES_MAX // 2), max(0, len(order) - LANES_MAX))
    return order[first : first + LANES_MAX]


def _panel(table: pd.DataFrame, lanes: Sequence[str], replicas: Sequence[str]) -> tuple[list[Any], str, float]:
    if table.empty:
        return [], "–", 0.0
    origin = float(table["sent_us"].min())
    ends = table.groupby("session")["last_token_us"].max()
    starts = table.groupby("session")["sent_us"].min()
    # Of a step it is who ends last that all wait for; of independent sessions, who takes longest.
    measure = ends if table["rollout_step"].notna().all() else ends - starts
    slowest = str(measure.sort_index().idxmax())
    heights = {session: place for place, session in enumerate(lanes)}
    mark = {
        "type": "scatter",
        "mode": "lines",
        "name": "slowest",
        "x": [_seconds(starts[slowest] - origin), _seconds(ends[slowest] - origin)],
        "y": [heights[slowest]] * 2,
        "line": {"width": 17},
        "opacity": 0.28,
        "hoverinfo": "skip",
        "meta": {"mark": True},
    }
    traces: list[Any] = [mark]
    for place, replica in enumerate(replicas):
        own = table[table["replica"] == replica].sort_values(["session", "turn"])
        for start, end, width, word in (
            ("sent_us", "first_token_us", 2.4, "waited"),
            ("first_token_us", "last_token_us", 8, "answered for"),
        ):
            x: list[float | None] = []
            y: list[int | None] = []
            texts: list[str] = []
            for row in own.itertuples(index=False):
                from_us, to_us = getattr(row, start), getattr(row, end)
                x += [_seconds(from_us - origin), _seconds(to_us - origin), None]
                y += [heights[str(row.session)]] * 2 + [None]
                texts += [_hover(row, word, to_us - from_us)] * 2 + [""]
            if x:
                traces.append(
                    {
                        "type": "scatter",
                        "mode": "lines",
                        "name": replica,
                        "x": x,
                        "y": y,
                        "text": texts,
                        "line": {"width": width},
                        "hovertemplate": f"%{{text}}<extra>{replica}</extra>",
                        "meta": {"replica": place, "replicas": len(replicas)},
                    }
                )
    return traces, slowest, float(ends[slowest] - starts[slowest]) / 1e6


def _hover(row: Any, word: str, span_us: float) -> str:
    turn = "" if np.isnan(row.turn) else f" turn {row.turn:.0f}"
    text = f"{row.session}{turn}: {word} {span_us / 1e6:,.2f} s"
    if not (np.isnan(row.prompt_tokens) or np.isnan(row.cached_tokens)):
        text += f", {row.cached_tokens:,.0f} of {row.prompt_tokens:,.0f} prompt tokens cached"
    return text


def _seconds(span_us: float) -> float:
    return round(float(span_us) / 1e6, 3)
