"""The experiments behind `docs/experiments.md`: what is measured in virtual time, without a run's files.

A built-in scenario that states expectations is an experiment. This module runs one and judges it, knows which failure
of the field each one shows, compares the affinity sweep with the published table cell by cell, and draws the map of
fleet and cache sizes on which the published order of the straggler experiment holds. It writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.arm import arms_of
from harness.expect import Finding, judge
from harness.scenario import Scenario, builtin_names, load_scenario
from harness.sim import Simulation
from reports import arm_metrics, fleet_frame, lookup, requests_frame, router_frame

SMALL = "-small"
"""Ends the name of an experiment that two cores also carry live: another one's fact, cut down."""


@dataclass(frozen=True, slots=True)
class FailureMode:
    """A row of the published failure-mode table."""

    symptom: str
    shown_by: dict[str, str]
    """Scenarios, each with the metric in which the symptom is seen and about which it has an expectation."""


FAILURE_MODES: dict[str, FailureMode] = {
    "herding": FailureMode(
        "One replica at full load, the rest idle, hit rate excellent", {"herding": "placement.max_share"}
    ),
    "index-not-eviction-aware": FailureMode(
        "Hit rate collapses under pressure while the router's own metric looks fine",
        {"stale-index": "phantom_hit_points"},
    ),
    "hit-rate-near-zero": FailureMode(
        "Hit rate near zero despite obviously shared prompts",
        {"template-mismatch": "believed_hit_rate", "timestamp-prefix": "hit_rate"},
    ),
    "body-truncation": FailureMode(
        "Hit rate degrades only for the longest requests", {"long-body-truncation": "hit_rate"}
    ),
    "index-growth": FailureMode("The router's index grows without bound", {"index-growth": "index_size_max"}),
    "lost-events": FailureMode(
        "Routing degrades after an incident and never recovers",
        {"event-loss": "believed_hit_rate", "restart-in-place": "stale_placements"},
    ),
    "two-routers": FailureMode(
        "Two routers pick the same replica in a burst", {"two-ingresses": "placement.max_share"}
    ),
    "cross-tenant-hits": FailureMode("Cross-tenant cache hits", {"tenant-isolation": "stale_placements"}),
    "no-reuse": FailureMode(
        "The tail gets worse with KV-aware routing on uniform traffic", {"no-reuse": "tpot_ms.p99"}
    ),
}
"""By a short key."""

PUBLISHED_RATIOS = (0.0, 0.3, 0.67, 1.5, math.inf)
PUBLISHED_SWEEP: dict[str, tuple[float, ...]] = {
    "hit": (12, 44, 78, 91, 96),
    "p50": (410, 290, 215, 198, 190),
    "p99": (2100, 1850, 1900, 3400, 8900),
}
"""The measured example of the reference text on prefix-aware routing, section 4: hit rate in percent, TTFT in ms."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the arms of a scenario gave: figures by router, and the rows they were made from."""

    scenario: Scenario
    figures: dict[str, dict[str, Any]]
    requests: dict[str, list[dict[str, Any]]]
    fleet: dict[str, list[dict[str, Any]]]
    routers: dict[str, list[dict[str, Any]]]
    findings: list[Finding]

    def figure(self, router: str, address: str) -> float | int | None:
        return lookup(self.figures[router], address)


def experiment_names() -> list[str]:
    """Built-in scenarios that state what they expect."""
    return [name for name in builtin_names() if load_scenario(name).expect]


def measure(scenario: Scenario) -> Measured:
    """Runs every router of a scenario in virtual time."""
    figures, requests, fleet, routers = {}, {}, {}, {}
    for arm in arms_of(scenario):
        rows = Simulation(arm).run()
        requests[arm.router.name], fleet[arm.router.name] = rows.requests, rows.fleet
        routers[arm.router.name] = rows.router
        figures[arm.router.name] = arm_metrics(
            requests_frame(rows.requests),
            fleet_frame(rows.fleet),
            slo=scenario.slo,
            ceiling_cached_tokens=rows.ceiling_cached_tokens,
            replicas=scenario.replica_names,
            router_samples=router_frame(rows.router),
        )
    return Measured(scenario, figures, requests, fleet, routers, judge(scenario.expect, figures))


def later_turn_hits(rows: Iterable[Mapping[str, Any]], block_size: int) -> tuple[float, float]:
    """(share of later turns that were served all that can be reused of their history, share of its tokens), 0..1.

    What can be reused is the previous prompt and answer in full blocks; of the answer's last token no block is kept.
    """
    done = {(row["session"], row["turn"]): row for row in rows if row["status"] == "ok"}
    turns = whole = served = reusable = 0
    for (session, turn), row in done.items():
        before = done.get((session, turn - 1))
        if before is None:
            continue
        history = (before["prompt_tokens"] + before["output_tokens"] - 1) // block_size * block_size
        turns += 1
        whole += row["cached_tokens"] >= history
        served += min(row["cached_tokens"], history)
        reusable += history
    return (whole / turns, served / reusable) if turns else (math.nan, math.nan)


def moved_sessions(rows: Iterable[Mapping[str, Any]], from_us: int, until_us: int) -> tuple[int, int]:
    """(sessions whose last turn sent before `until_us` went to another replica than their last one before `from_us`,
    sessions with turns on both sides): who moved because of what happened at `from_us`."""
    before: dict[str, tuple[int, str]] = {}
    after: dict[str, tuple[int, str]] = {}
    for row in rows:
        sent_us = row.get("sent_us")
        if sent_us is not None and row["replica"] is not None and sent_us < until_us:
            side = before if sent_us < from_us else after
            side[row["session"]] = max(side.get(row["session"], (-1, "")), (sent_us, row["replica"]))
    both = before.keys() & after.keys()
    return sum(before[session][1] != after[session][1] for session in both), len(both)


def stale_until_us(rows: Iterable[Mapping[str, Any]], from_us: int) -> int | None:
    """When the last request was sent, from an instant on, that was to hit and found nothing; None: none was."""
    return max(
        (
            row["sent_us"]
            for row in rows
            if row["status"] == "ok"
            and row["sent_us"] >= from_us
            and (row["believed_hit_tokens"] or 0) > 0
            and row["cached_tokens"] == 0
        ),
        default=None,
    )


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One weight ratio beside its published figures."""

    router: str
    ratio: float
    hit_percent: float
    """By requests, the figure that is compared."""
    token_hit_percent: float
    hit_rate_percent: float
    """Of all prompt tokens, as `hit_rate` counts."""
    p50_ms: float
    p99_ms: float
    published: tuple[float, float, float]

    def deviations(self) -> tuple[float, float, float]:
        """Ours over the published figure less one: hit, p50, p99."""
        ours = (self.hit_percent, self.p50_ms, self.p99_ms)
        return tuple(a / b - 1 for a, b in zip(ours, self.published, strict=True))  # type: ignore[return-value]


def sweep_rows(sweep: Measured) -> list[SweepRow]:
    """The affinity sweep beside the published table; its routers stand in the order of the ratios."""
    rows = []
    for place, (router, ratio) in enumerate(zip(sweep.figures, PUBLISHED_RATIOS, strict=True)):
        whole, tokens = later_turn_hits(sweep.requests[router], sweep.scenario.engine.block_size)
        figures = sweep.figures[router]
        rows.append(
            SweepRow(
                router,
                ratio,
                100 * whole,
                100 * tokens,
                100 * figures["hit_rate"],
                figures["ttft_ms"]["p50"],
                figures["ttft_ms"]["p99"],
                (PUBLISHED_SWEEP["hit"][place], PUBLISHED_SWEEP["p50"][place], PUBLISHED_SWEEP["p99"][place]),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class MapCell:
    """One fleet and cache size of the straggler map, over several seeds."""

    replicas: int
    blocks: int
    best_tail: int
    """Seeds in which the KV- and load-aware router has the best p99 rollout time."""
    lowest_hits: int
    """Seeds in which its hit rate is the lowest."""
    holds: int
    """Seeds in which both are so, which is the published order."""
    seeds: int
    tail_ratio: float
    """Its p99 rollout time over that of the better of the two others, mean over the seeds."""


MAP_REPLICAS = (2, 4, 8)
MAP_BLOCKS = (1400, 1600, 2600, 4000, 8000)
MAP_SEEDS = (1, 2, 3)
AWARE = "dynamo-kv"


def published_order(found: Measured) -> tuple[bool, bool, float]:
    """(the aware router has the best p99 rollout time, it has the lowest hit rate, its p99 over the better other)."""
    p99 = {name: float(found.figure(name, "session_e2e_ms.p99") or math.nan) for name in found.figures}
    rate = {name: float(found.figure(name, "hit_rate") or 0.0) for name in found.figures}
    others = [name for name in found.figures if name != AWARE]
    return (
        all(p99[AWARE] < p99[name] for name in others),
        all(rate[AWARE] < rate[name] for name in others),
        p99[AWARE] / min(p99[name] for name in others),
    )


def straggler_cell(replicas: int, blocks: int, seeds: Sequence[int]) -> MapCell:
    sizes = [f"fleet.replicas={replicas}", f"engine.num_gpu_blocks={blocks}"]
    orders = [
        published_order(measure(load_scenario("rl-rollout-stragglers", overrides=sizes, seed=seed))) for seed in seeds
    ]
    return MapCell(
        replicas,
        blocks,
        best_tail=sum(tail for tail, _, _ in orders),
        lowest_hits=sum(hits for _, hits, _ in orders),
        holds=sum(tail and hits for tail, hits, _ in orders),
        seeds=len(seeds),
        tail_ratio=sum(ratio for _, _, ratio in orders) / len(orders),
    )


def straggler_map(seeds: Sequence[int] = MAP_SEEDS) -> list[MapCell]:
    """Every fleet and cache size, smallest first; minutes, not seconds."""
    return [straggler_cell(replicas, blocks, seeds) for replicas in MAP_REPLICAS for blocks in MAP_BLOCKS]
