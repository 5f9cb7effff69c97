"""Whether an open loop sent what it was asked to, stage by stage; a stage that was not is left out of every figure.

A request belongs to the stage in which it was due, counted from the first one due. What a stage asked for is the rate
of these instants, so later turns of sessions count as they fell due. A stage that fell behind in one arm is left out in
all arms of its repeat, since only the same requests can be compared; of a load of one rate nothing would be left, so
the run is invalid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from reports.display import number, percent
from reports.latency import nearest_rank
from reports.records import OFF_RATE
from reports.rows import Mask, Rows

WHOLE_LOAD = "the load"
ACHIEVED_SHARE_MIN = 0.95
DELAY_MS_MAX = 100.0


def stages_of(requests: pd.DataFrame, scenario: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each stage of each arm of an open loop; one stage where the scenario names none."""
    load = scenario.get("load") or {}
    if load.get("driver") != "rate":
        return []
    found = []
    for router, repeat in requests[["router", "repeat"]].drop_duplicates().itertuples(index=False):
        mask = ((requests["router"] == router) & (requests["repeat"] == repeat)).to_numpy(dtype=bool)
        rows = Rows(requests[mask])
        for number_, (name, inside) in enumerate(_stages(rows, load), start=1):
            figures = _figures(rows, inside)
            if figures:
                found.append({"router": router, "repeat": int(repeat), "stage": number_, "name": name, **figures})
    return found


def without_off_rate(
    requests: pd.DataFrame, stages: Sequence[Mapping[str, Any]], load: Mapping[str, Any]
) -> pd.DataFrame:
    """Rows of stages that some arm of their repeat did not send as asked get the phase OFF_RATE. A load of one stage
    stays as it is: there would be nothing left."""
    bad = {(each["repeat"], each["stage"]) for each in stages if not each["valid"]}
    if not load.get("stages") or not bad:
        return requests
    off = np.zeros(len(requests), dtype=bool)
    for router, repeat in requests[["router", "repeat"]].drop_duplicates().itertuples(index=False):
        mask = ((requests["router"] == router) & (requests["repeat"] == repeat)).to_numpy(dtype=bool)
        for stage, (_, inside) in enumerate(_stages(Rows(requests[mask]), load), start=1):
            if (repeat, stage) in bad:
                off[np.flatnonzero(mask)[inside]] = True
    steady = (requests["phase"] == "steady").to_numpy(dtype=bool)
    return requests.assign(phase=requests["phase"].mask(off & steady, OFF_RATE))


def rate_missed(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the arm that sent slowest, where a load of one stage was not sent at its rate."""
    slow = [each for each in stages if each["achieved_per_s"] < ACHIEVED_SHARE_MIN * each["asked_per_s"]]
    if not slow or _several(stages):
        return []
    worst = min(slow, key=lambda each: (each["achieved_per_s"] / each["asked_per_s"], each["router"]))
    return [
        f"{worst['router']}: {number(worst['achieved_per_s'], 2)} requests/s were sent where "
        f"{number(worst['asked_per_s'], 2)} were asked (bound {ACHIEVED_SHARE_MIN:.0%}): lower the rate or give the "
        "load generator more processes"
    ]


def stages_left_out(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each stage of a load in stages that was not sent as asked."""
    if not _several(stages):
        return []
    notes = []
    for key in dict.fromkeys((each["repeat"], each["stage"]) for each in stages if not each["valid"]):
        worst = max(
            (each for each in stages if (each["repeat"], each["stage"]) == key and not each["valid"]),
            key=lambda each: (each["delay_ms_p99"], each["router"]),
        )
        share = worst["achieved_per_s"] / worst["asked_per_s"]
        notes.append(
            f"{worst['name']} is left out of every figure: {worst['router']} sent {percent(share)} of its rate, "
            f"{number(worst['delay_ms_p99'], 0)} ms late (p99; bounds {ACHIEVED_SHARE_MIN:.0%} and "
            f"{DELAY_MS_MAX:.0f} ms): lower the rate or give the load generator more processes"
        )
    return notes


def _several(stages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the scenario names stages, be it one: then they have names of their own."""
    return any(each["name"] != WHOLE_LOAD for each in stages)


def _stages(rows: Rows, load: Mapping[str, Any]) -> Iterator[tuple[str, Mask]]:
    """Each stage by name, and which requests were due in it."""
    due, sent = rows.column("scheduled_us"), rows.column("sent_us")
    known = due.known & sent.known
    begins_us = int(due.values[known].min()) if known.any() else 0
    ends_us = 0
    stages = load.get("stages") or ()
    for place, stage in enumerate(stages, start=1):
        starts_us, ends_us = ends_us, ends_us + round(stage["duration_s"] * 1e6)
        last = place == len(stages)  # later turns of the last sessions are due after its end
        inside = (due.values - begins_us >= starts_us) & (last | (due.values - begins_us < ends_us))
        yield f"stage {place} ({stage['rate_per_s']:g} sessions/s)", known & inside
    if not stages:
        yield WHOLE_LOAD, known


def _figures(rows: Rows, inside: Mask) -> dict[str, Any] | None:
    due_us, sent_us = rows.column("scheduled_us").values[inside], rows.column("sent_us").values[inside]
    if len(due_us) < 2 or due_us.max() == due_us.min():
        return None
    span_us = int(due_us.max() - due_us.min())
    took_us = max(span_us, int(sent_us.max() - due_us.min()))
    delays = np.sort(sent_us - due_us)
    middle, late = (int(delays[nearest_rank(len(delays), percentile)]) / 1_000 for percentile in (50, 99))
    asked, achieved = len(due_us) / span_us * 1e6, len(due_us) / took_us * 1e6
    return {
        "requests": len(due_us),
        "asked_per_s": asked,
        "achieved_per_s": achieved,
        "delay_ms_p50": middle,
        "delay_ms_p99": late,
        "valid": achieved >= ACHIEVED_SHARE_MIN * asked and late <= DELAY_MS_MAX,
    }


def stage_rows(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Texts for a table: stage, router, requests, asked and achieved per second, delay p50 and p99, verdict."""
    several = any(each["repeat"] for each in stages)
    return [
        (
            each["name"],
            each["router"] + (f", repeat {each['repeat'] + 1}" if several else ""),
            number(each["requests"], 0),
            number(each["asked_per_s"], 2),
            number(each["achieved_per_s"], 2),
            number(each["delay_ms_p50"], 1),
            number(each["delay_ms_p99"], 1),
            "as asked"
            if each["valid"]
            else "left out"
            if len({one["stage"] for one in stages}) > 1
            else "not as asked",
        )
        for each in sorted(stages, key=lambda each: (each["repeat"], each["stage"]))
    ]


STAGE_HEADS = ("stage", "router", "requests", "asked/s", "achieved/s", "delay p50 ms", "delay p99 ms", "")
