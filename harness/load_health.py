"""Whether the load that was asked for was the load that was sent, as sentences and figures for the run's health.

Two checks over one arm; whether an open loop kept its rate is told by `reports`. What was in flight, as the load and
the engines counted it themselves, must be the rows' rate times latency (Little's law), or the part that is not is
named. And what a cap on requests allowed must have been used, or the load was another one than its name says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.arm import Arm

LITTLE_SHARE_MAX = 0.05
"""As the issue's bound: mean in flight and rate times mean latency agree within 5 %."""
CAP_SHARE_MIN = 0.98
SAMPLES_MIN = 8
"""Samples of the fleet below which nothing is said of engines: four seconds."""
APART_MIN = 1.0
"""Requests by which counts may differ at any time: one ends while the next is on its way."""

Row = dict[str, Any]


class Little(NamedTuple):
    """Mean requests in flight over the measured span, warm-up left out, and what they were."""

    in_flight: float
    """As whoever sent them counted while they were under way, or as the rows say where nobody counted."""
    expected: float
    """Rate times mean latency of the measured successes."""
    failed: float
    """In flight, and then failed, cut or cancelled."""
    after_last: float
    """In flight after their last token: the end of the stream came late."""
    uncounted: float
    """In flight by the count and in no row: they waited to be sent, or their rows are missing."""

    @property
    def share(self) -> float:
        """How far the two are apart, of what was in flight."""
        return abs(self.in_flight - self.expected) / self.in_flight if self.in_flight else 0.0


def little(rows: Sequence[Row], held_us: int | None = None) -> Little | None:
    """Over the span from the first measured request to the end of the last; None without any. `held_us` is the time of
    all measured requests together by a count that is not made from rows."""
    steady = [r for r in rows if r["phase"] == "steady" and r.get("sent_us") is not None]
    if not steady:
        return None
    start = min(r["sent_us"] for r in steady)
    end = max(_end(r) for r in steady)
    if end <= start:
        return None
    expected = failed = after = 0
    for row in steady:
        held = _end(row) - row["sent_us"]
        if row["status"] != "ok":
            failed += held
        else:
            expected += row["last_token_us"] - row["sent_us"]
            after += held - (row["last_token_us"] - row["sent_us"])
    span, in_rows = end - start, expected + failed + after
    counted = in_rows if held_us is None else held_us
    return Little(counted / span, expected / span, failed / span, after / span, (counted - in_rows) / span)


class Inside(NamedTuple):
    """What the engines themselves had running or waiting, at the same instants as the rows say of the load."""

    sent: list[int]
    """Requests under way at each sample of the fleet, by the rows, warm-up included; without what an engine's frontend
    takes of each before its scheduler sees it."""
    held: list[int]
    """Running or waiting in all engines together."""
    leaving: float
    """How many are in their last step on average: our engines have let them go when that step begins."""


def inside(arm: Arm, rows: Sequence[Row], fleet: Sequence[Row]) -> Inside | None:
    """At the instants at which every engine was sampled, from the first request to the last; None where engines do not
    tell, or replicas came and went."""
    names = arm.scenario.fleet.names
    at: dict[int, list[int]] = {}
    for sample in fleet:
        if sample["running"] is not None and sample["waiting"] is not None:
            at.setdefault(sample["t_us"], []).append(sample["running"] + sample["waiting"])
    spans = [(r["sent_us"], _end(r)) for r in rows if r.get("sent_us") is not None]
    if not spans or arm.scenario.churn:
        return None
    fixed_us = arm.scenario.preset.cost.request_fixed_us
    sent = sorted(min(start + fixed_us, end) for start, end in spans)
    ended = sorted(end for _, end in spans)
    whole = [t for t in sorted(at) if len(at[t]) == len(names) and sent[0] <= t < ended[-1]]
    if not whole:
        return None
    steps = [sample["step_us_mean"] for sample in fleet if sample.get("step_us_mean") is not None]
    leaving = len(spans) / (ended[-1] - sent[0]) * sum(steps) / len(steps) if steps and ended[-1] > sent[0] else 0.0
    there = [bisect_right(sent, t) - bisect_right(ended, t) for t in whole]
    return Inside(there, [sum(at[t]) for t in whole], leaving)


def _end(row: Row) -> int:
    end = row.get("end_us")
    return int(row["sent_us"] if end is None else end)


def load_notes(arm: Arm, rows: Sequence[Row], facts: dict[str, Any], fleet: Sequence[Row] = ()) -> list[str]:
    """Whole sentences on what was not as asked."""
    seen = inside(arm, rows, fleet)
    notes = _little_note(arm, rows, facts) or _inside_note(arm, seen)
    notes += _cap_note(arm, rows) or _capped_note(arm, seen)
    if facts.get("deaf"):
        notes.append(facts["deaf"])
    if facts.get("limited"):
        notes.append(
            f"{arm.label}: a time limit or a shape ended the test, so the last sessions were cut and some never began: "
            "compare it with tests of the same length only"
        )
    syncs = facts.get("weight_syncs") or {}
    lost = syncs.get("refused", 0) + syncs.get("failed", 0)
    if lost:
        notes.append(
            f"{arm.label}: {lost} of {sum(syncs.values())} cache resets for new weights were not done (engines refuse "
            "one while they work): prefixes of old weights were served; write weight_sync = 'wait' to let requests end"
        )
    return notes


def _little_note(arm: Arm, rows: Sequence[Row], facts: dict[str, Any]) -> list[str]:
    found = little(rows, facts.get("held_us"))
    if found is None or found.share <= LITTLE_SHARE_MAX:
        return []
    parts = {
        "were requests that failed or were cut": found.failed,
        "had their last token and waited for the end of the stream": found.after_last,
        "waited in the load generator to be sent, or have no row": found.uncounted,
    }
    what = max(parts, key=lambda part: parts[part])
    return [
        f"{arm.label}: {found.in_flight:.1f} requests were in flight on average, and those that succeeded account for "
        f"{found.expected:.1f} (their rate times their mean latency, Little's law): {parts[what]:.1f} of them {what}"
    ]


def _inside_note(arm: Arm, seen: Inside | None) -> list[str]:
    """Little's law held against the engines' own count: what was sent and is not with them is on the way."""
    if seen is None or len(seen.sent) < SAMPLES_MIN:
        return []
    sent, held = (sum(counts) / len(counts) for counts in (seen.sent, seen.held))
    if abs(sent - held) <= max(LITTLE_SHARE_MAX * sent, APART_MIN + seen.leaving):
        return []
    begin = f"{arm.label}: {sent:.1f} requests were in flight on average and the engines had {held:.1f}"
    if held > sent:
        return [f"{begin} running or waiting: somebody else uses them, too; give the run engines of its own"]
    return [
        f"{begin} of them running or waiting: the others were in the router or on the way, so latency holds more than "
        "the engines' work"
    ]


def _capped_note(arm: Arm, seen: Inside | None) -> list[str]:
    """The load kept its cap full, and the engines never had so many: a plateau below what was asked for."""
    load = arm.scenario.load
    if seen is None or load.open_loop or load.concurrency is None:
        return []
    full = sorted(
        held for sent, held in zip(seen.sent, seen.held, strict=True) if sent >= CAP_SHARE_MIN * load.concurrency
    )
    if len(full) < SAMPLES_MIN or full[-1] >= min(
        CAP_SHARE_MIN * load.concurrency, load.concurrency - APART_MIN - seen.leaving
    ):
        return []
    if full[len(full) // 2] < CAP_SHARE_MIN * full[-1]:
        return []  # no plateau: they were on the way now and then, as short requests are
    return [
        f"{arm.label}: capped at {full[-1]}: {load.concurrency} requests in flight were asked for and sent, and the "
        "engines never had more: raise the limit on connections or on concurrent requests before them"
    ]


def _cap_note(arm: Arm, rows: Sequence[Row]) -> list[str]:
    load = arm.scenario.load
    if load.driver != "requests" or load.concurrency is None:
        return []
    changes = sorted(
        change for r in rows if r.get("sent_us") is not None for change in ((r["sent_us"], 1), (_end(r), -1))
    )
    flying = peak = 0
    for _, change in changes:
        flying += change
        peak = max(peak, flying)
    if peak >= CAP_SHARE_MIN * load.concurrency:
        return []
    return [
        f"{arm.label}: {load.concurrency} requests in flight were asked for and {peak} were reached: the workload had "
        "no more turns ready at once; give it more sessions or shorter think times, or ask for less"
    ]
