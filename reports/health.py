"""Whether a run measured the routers, or the machine that it ran on.

`invalid` means that no figure may be trusted; `degraded` that small differences may not. Every reason is a sentence
with the number found, the bound, and the mend. The worst arm decides, since a comparison is as good as its worst side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from reports.arms import arms_of, failure_counts
from reports.display import number
from reports.latency import PER_REQUEST, nearest_rank
from reports.records import OFF_RATE
from reports.rows import Rows
from reports.stages import rate_missed, stages_left_out
from reports.unfinished import account

LAG_MS_INVALID = 100.0
LAG_SHARE_DEGRADED = 0.10  # of the TTFT median
LATENESS_MS_DEGRADED = 5.0
ERROR_SHARE_DEGRADED = 0.01
ERROR_SHARE_INVALID = 0.10
"""From here on the answers that came say little of those that did not: survivors flatter."""
STANDSTILL_MS_INVALID = 2_000.0
"""A step this late is no busy machine: something stood still, was suspended, or the disk held a process up."""
# A fleet sample holds the p99 of half a second. The run's p99 is taken as the p90 over samples: a sample's p99 over few
# steps is nearly its maximum, so their p99 would be the p99.99 of the steps.
LATENESS_PERCENTILE = 90

WARM, UNACCOUNTED = "warm start", "are accounted for where"
"""Words by which the gate knows these two reasons and gives each a code of its own."""

Verdict = Literal["ok", "degraded", "invalid"]


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What the rows cannot tell; whoever drives the run fills in what it knows."""

    asked_requests: int | None = None  # requests the plan held, warm-up included, over all arms
    cpu_warnings: tuple[str, ...] = ()  # the load generator's own, as it gave them
    lost_processes: tuple[str, ...] = ()  # names that died without being asked to
    warm_arms: Mapping[str, int] = field(default_factory=dict)  # arm -> blocks cached before its first request
    unverified_arms: tuple[str, ...] = ()  # arms whose cold start could not be checked
    checked_answers: int = 0
    wrong_answers: int = 0
    notes: tuple[str, ...] = ()  # further reasons to call the run degraded, in whole sentences


def health(
    requests: pd.DataFrame,
    fleet: pd.DataFrame,
    facts: HealthFacts | None = None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """`{"verdict": "ok" | "degraded" | "invalid", "reasons": [sentence, ...]}`, worst reasons first.

    `stages` are those of `stages_of`. Of a load in stages one that fell behind is left out, and the others stand.
    """
    facts = facts or HealthFacts()
    invalid, degraded = _told(facts)
    invalid += rate_missed(stages)
    degraded += stages_left_out(stages)
    _accounting(requests, facts, invalid)
    arms = _arms(requests, fleet)
    _success(arms, invalid, degraded)
    _lag(arms, invalid, degraded)
    _lateness(arms, invalid, degraded)
    verdict: Verdict = "invalid" if invalid else "degraded" if degraded else "ok"
    return {"verdict": verdict, "reasons": invalid + degraded}


@dataclass(frozen=True, slots=True)
class _Arm:
    name: str
    rows: int
    """All of its requests, warm-up included."""
    off_rate: bool
    """Whether a stage was left out."""
    steady: Rows
    fleet: pd.DataFrame


def _arms(requests: pd.DataFrame, fleet: pd.DataFrame) -> list[_Arm]:
    pairs = arms_of(requests, fleet)
    several = any(repeat for _, repeat in pairs)
    arms = []
    for router, repeat in pairs:
        rows, samples = (
            frame[((frame["router"] == router) & (frame["repeat"] == repeat)).to_numpy(dtype=bool)]
            for frame in (requests, fleet)
        )
        name = f"{router}, repeat {repeat + 1}" if several else router
        arms.append(_Arm(name, len(rows), bool((rows["phase"] == OFF_RATE).any()), Rows(rows).steady, samples))
    return arms


def _told(facts: HealthFacts) -> tuple[list[str], list[str]]:
    invalid, degraded = [], list(facts.notes)
    for name in facts.lost_processes:
        invalid.append(f"process {name} was lost during the run: its figures stop there; see its log under logs/")
    for warning in facts.cpu_warnings:
        invalid.append(
            f"the load generator ran out of CPU ({warning}): lower the concurrency, or give it more processes or cores"
        )
    for arm, blocks in facts.warm_arms.items():
        invalid.append(
            f"{WARM}: {arm} began with {blocks:,} cached blocks: reset the replicas or start fresh ones before each arm"
        )
    for arm in facts.unverified_arms:
        degraded.append(
            f"{arm} may have started warm: its replicas do not tell how many blocks they hold; restart "
            "them before each arm"
        )
    if facts.wrong_answers:
        invalid.append(
            f"{facts.wrong_answers:,} of {facts.checked_answers:,} checked answers were not the expected tokens: "
            "arms did not run the same conversations; check that nothing between load and replica rewrites requests"
        )
    return invalid, degraded


def _accounting(requests: pd.DataFrame, facts: HealthFacts, invalid: list[str]) -> None:
    if facts.asked_requests is not None and len(requests) != facts.asked_requests:
        invalid.append(
            f"{len(requests):,} requests {UNACCOUNTED} {facts.asked_requests:,} were planned: "
            "the run was cut, or rows were lost; run it again to the end"
        )
    elif requests.empty:
        invalid.append("no request was recorded: nothing was measured; see the logs of the load generator")


def _success(arms: Sequence[_Arm], invalid: list[str], degraded: list[str]) -> None:
    failing = []
    for arm in arms:
        rows = arm.steady
        failed = int((rows.status("error") | rows.status("incomplete")).sum())  # the others the load cut or never sent
        if not len(rows):
            if arm.rows:
                invalid.append(
                    f"{arm.name}: no stage was sent at its rate, so nothing was measured: lower the rates"
                    if arm.off_rate
                    else f"{arm.name}: all {arm.rows:,} requests were warm-up, so nothing was measured: "
                    "lower load.warmup_s, load.warmup_sessions or load.ramp_s, or add sessions"
                )
        elif not rows.ok.any():
            first = rows.frame["error"].dropna()
            why = f" (first: {str(first.iloc[0])[:120]})" if len(first) else ""
            invalid.append(
                f"{arm.name}: none of {len(rows):,} requests succeeded{why}: see logs/ of the router and the replicas"
            )
        elif failed > ERROR_SHARE_INVALID * len(rows):
            invalid.append(
                f"{arm.name}: {account(failure_counts(rows))}; errors and cut short are over "
                f"{ERROR_SHARE_INVALID:.0%}, and the others alone flatter it: look at error_class in "
                "requests.parquet and at logs/"
            )
        elif failed > ERROR_SHARE_DEGRADED * len(rows):
            failing.append(f"{arm.name}: {account(failure_counts(rows))}")
    if failing:
        degraded.append(
            f"{'; '.join(failing)}; latency is taken over the others only, which may flatter an arm: look at "
            "error_class in requests.parquet"
        )


def _lag(arms: Sequence[_Arm], invalid: list[str], degraded: list[str]) -> None:
    too_late: list[tuple[float, str, str]] = []
    noticeable: list[tuple[float, str, str]] = []
    for arm in arms:
        lag_us, sent = PER_REQUEST["sched_lag_ms"](arm.steady)
        if not sent.any():
            continue
        lag_ms = _rank(lag_us[sent], 99) / 1_000
        ttft_us, known = PER_REQUEST["ttft_ms"](arm.steady)
        ttft_ms = _rank(ttft_us[known], 50) / 1_000 if known.any() else None
        if lag_ms > LAG_MS_INVALID:
            too_late.append((lag_ms, arm.name, ""))
        elif ttft_ms is not None and lag_ms > LAG_SHARE_DEGRADED * ttft_ms:
            noticeable.append((lag_ms, arm.name, number(ttft_ms, 1)))
    if too_late:
        lag_ms, name, _ = max(too_late)
        invalid.append(
            f"{name}{_others(too_late)}: requests left {number(lag_ms, 1)} ms late (p99, bound "
            f"{LAG_MS_INVALID:.0f} ms): the load generator was too busy; lower the concurrency or the rate"
        )
    if noticeable:
        lag_ms, name, ttft = max(noticeable)
        degraded.append(
            f"{name}{_others(noticeable)}: requests left {number(lag_ms, 1)} ms late (p99), over "
            f"{LAG_SHARE_DEGRADED:.0%} of the TTFT median of {ttft} ms: small differences in TTFT are the load "
            "generator's; lower the concurrency or the rate"
        )


def _lateness(arms: Sequence[_Arm], invalid: list[str], degraded: list[str]) -> None:
    late = []
    for arm in arms:
        known = arm.fleet["late_us_p99"].dropna().to_numpy(dtype=np.float64)
        if len(known) and (worst_ms := float(known.max()) / 1_000) > STANDSTILL_MS_INVALID:
            invalid.append(
                f"{arm.name}: a replica stood still for {number(worst_ms / 1_000, 1)} s: the machine was suspended or "
                "stopped it; run it again"
            )
            continue
        if len(known) and (late_ms := _rank(known, LATENESS_PERCENTILE) / 1_000) > LATENESS_MS_DEGRADED:
            late.append((late_ms, arm.name))
    if late:
        late_ms, name = max(late)
        degraded.append(
            f"{name}{_others(late)}: tokens left the replicas {number(late_ms, 1)} ms late (p99, bound "
            f"{LATENESS_MS_DEGRADED:.0f} ms): this machine is too busy for this load; use fewer replicas or streams, "
            "slower steps, or --mode sim"
        )


def _others(arms: Sequence[object]) -> str:
    """The worst arm is named, and how many more there are."""
    return f" (and {len(arms) - 1} more)" if len(arms) > 1 else ""


def _rank(values: Any, percentile: int) -> float:
    rank = nearest_rank(len(values), percentile)
    return float(np.partition(values, rank)[rank])
