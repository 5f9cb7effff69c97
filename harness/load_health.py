"""Whether the load that was asked for was the load that was sent, as sentences and figures for the run's health.

Three checks over one arm's rows. An open loop must have sent as fast as its plan said, in every stage. What was in
flight must be rate times latency (Little's law), or the part that is not is named. And what a cap on requests allowed
must have been used, or the load was another one than its name says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness.arm import Arm
from harness.drive import Drive

LITTLE_SHARE_MAX = 0.05
"""As the issue's bound: mean in flight and rate times mean latency agree within 5 %."""
CAP_SHARE_MIN = 0.98

Row = dict[str, Any]


class Rate(NamedTuple):
    """Requests a second of one stage."""

    asked_per_s: float
    achieved_per_s: float

    @property
    def share(self) -> float:
        return self.achieved_per_s / self.asked_per_s


def slowest_rate(arms: Iterable[tuple[Arm, Sequence[Row]]]) -> Rate | None:
    """The stage, over all arms, that fell furthest behind its plan; None for closed loops."""
    rates = [rate for arm, rows in arms for _, rate, _ in stage_rates(arm.scenario.load, rows)]
    return min(rates, key=lambda rate: rate.share, default=None)


def stage_rates(drive: Drive, rows: Sequence[Row]) -> list[tuple[str, Rate, float]]:
    """(name, rate, p99 lag in milliseconds) of every stage of an open loop in which two requests or more were due."""
    if not drive.open_loop:
        return []
    due = sorted((r["scheduled_us"], r["sent_us"]) for r in rows if r.get("sent_us") is not None)
    ends_us, edges = 0.0, []
    for number, stage in enumerate(drive.stages, 1):
        edges.append((f"stage {number} ({stage.rate_per_s:g}/s)", ends_us, ends_us + stage.duration_s * 1e6))
        ends_us += stage.duration_s * 1e6
    begins_us = due[0][0] if due else 0
    found = []
    for name, start, end in edges or [("the load", 0.0, float("inf"))]:
        inside = [(at, sent) for at, sent in due if start <= at - begins_us < end]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            continue
        first = inside[0][0]
        asked = len(inside) / (inside[-1][0] - first) * 1e6
        achieved = len(inside) / max(max(sent for _, sent in inside) - first, inside[-1][0] - first) * 1e6
        lags = sorted(sent - at for at, sent in inside)
        found.append((name, Rate(asked, achieved), lags[-(-99 * len(lags) // 100) - 1] / 1000))
    return found


class Little(NamedTuple):
    """Mean requests in flight over the measured span, warm-up left out, and what they were."""

    in_flight: float
    expected: float
    """Rate times mean latency of the measured successes."""
    failed: float
    """In flight, and then failed, cut or cancelled."""
    after_last: float
    """In flight after their last token: the end of the stream came late."""

    @property
    def share(self) -> float:
        """How far the two are apart, of what was in flight."""
        return abs(self.in_flight - self.expected) / self.in_flight if self.in_flight else 0.0


def little(rows: Sequence[Row]) -> Little | None:
    """Over the span from the first measured request to the end of the last; None without any."""
    steady = [r for r in rows if r["phase"] == "steady" and r.get("sent_us") is not None]
    if not steady:
        return None
    start = min(r["sent_us"] for r in steady)
    end = max(_end(r) for r in steady)
    if end <= start:
        return None
    expected = failed = after = 0
    for row in rows:
        if row.get("sent_us") is None or row["phase"] != "steady":
            continue
        held = max(0, min(_end(row), end) - max(row["sent_us"], start))
        if row["status"] != "ok":
            failed += held
        else:
            expected += row["last_token_us"] - row["sent_us"]
            after += held - (row["last_token_us"] - row["sent_us"])
    span = end - start
    return Little((expected + failed + after) / span, expected / span, failed / span, after / span)


def _end(row: Row) -> int:
    end = row.get("end_us")
    return int(row["sent_us"] if end is None else end)


def load_notes(arm: Arm, rows: Sequence[Row], facts: dict[str, Any]) -> list[str]:
    """Whole sentences on what was not as asked."""
    notes = _little_note(arm, rows) + _cap_note(arm, rows)
    syncs = facts.get("weight_syncs") or {}
    lost = syncs.get("refused", 0) + syncs.get("failed", 0)
    if lost:
        notes.append(
            f"{arm.label}: {lost} of {sum(syncs.values())} cache resets for new weights were not done (engines refuse "
            "one while they work): prefixes of old weights were served; write weight_sync = 'wait' to let requests end"
        )
    return notes


def _little_note(arm: Arm, rows: Sequence[Row]) -> list[str]:
    found = little(rows)
    if found is None or found.share <= LITTLE_SHARE_MAX:
        return []
    parts = {
        "were requests that failed or were cut": found.failed,
        "had their last token and waited for the end of the stream": found.after_last,
    }
    what = max(parts, key=lambda part: parts[part])
    return [
        f"{arm.label}: {found.in_flight:.1f} requests were in flight on average and rate times mean latency gives "
        f"{found.expected:.1f}: {parts[what]:.1f} of them {what}"
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
