"""What a scenario will take before it runs: time, memory and load, told from the beginning of it in virtual time.

Each router of ours is simulated for a moment at most; what lies beyond is taken to go on as it began. A router that
virtual time cannot contain is taken to do as round robin. Nothing is started, and the clock is the processor's: what is
said holds for this machine when it does nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.arm import Arm
from harness.census import Census, census
from harness.router_entry import RouterEntry
from harness.scenario import Scenario
from harness.sim import Simulation

TRIAL_S = 4.0
"""For all routers together; a built-in scenario is through by then, or far enough."""
LOOK_EVERY = 64
"""Requests between two looks at the clock."""
STAND_IN = "round-robin"

REPLICA_MIB, REPLICA_START_S = 68, 0.6
"""A replica's process as measured; it starts on one core in this time."""
BLOCK_BYTES = 300
"""Of a KV block that is in use, in a replica as in a simulation."""
ROUTER_MIB, LOAD_MIB, HARNESS_MIB = 70, 80, 190
LOAD_START_S = 3.5
"""Router, Locust and the end of an arm."""
ROW_BYTES = 2_600
"""Of a request's row until the reports are written, its place in the figures and pages included."""
TOKEN_BYTES = 60
"""Of an output token meanwhile: the gap before it."""
REPORT_S, REPORT_ROW_S = 3.0, 0.0005


@dataclass(frozen=True, slots=True)
class Trial:
    """One arm in virtual time, whole or its beginning."""

    router: str
    share: float
    """Of its requests."""
    model_s: float
    """Of the whole arm, extrapolated where the trial was broken off."""
    wall_s: float
    """What a simulation of the whole arm takes."""
    in_flight: float
    in_flight_peak: int
    requests_per_s: float
    tokens_per_s: float
    """Output tokens; the mean from the first request to the last."""
    tokens_per_s_peak: float
    """In the busiest second."""
    blocks: int
    """KV blocks in use in the fleet, at most."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a whole run, with all routers and repeats."""

    trials: tuple[Trial, ...]
    live_s: float
    sim_s: float
    live_mib: float
    sim_mib: float
    processes: int
    """Of a live arm."""


def estimate(scenario: Scenario, counted: Census | None = None, cores: int = 1, trial_s: float = TRIAL_S) -> Estimate:
    """`cores` is how many replicas start side by side."""
    counted = counted or census(scenario, scenario.seed)
    trials = tuple(
        trial(scenario, entry, counted, trial_s / len(scenario.routers)) for entry in _contained(scenario.routers)
    )
    arms, replicas = len(trials) * scenario.repeats, len(scenario.fleet.names)
    rows = counted.requests * arms
    reports_s = REPORT_S + REPORT_ROW_S * rows
    start_s = LOAD_START_S + (0.0 if scenario.fleet.urls else REPLICA_START_S * replicas / max(1, cores))
    blocks_mib = max(found.blocks for found in trials) * BLOCK_BYTES / 2**20
    rows_mib = HARNESS_MIB + (rows * ROW_BYTES + counted.output_tokens * arms * TOKEN_BYTES) / 2**20
    own = 0 if scenario.fleet.urls else replicas
    routers = max(entry.setup(scenario.router).ingresses for entry in scenario.routers)
    return Estimate(
        trials=trials,
        live_s=scenario.repeats * sum(found.model_s + start_s for found in trials) + reports_s,
        sim_s=scenario.repeats * sum(found.wall_s for found in trials) + reports_s,
        live_mib=own * REPLICA_MIB + blocks_mib + routers * ROUTER_MIB + scenario.load.processes * LOAD_MIB + rows_mib,
        sim_mib=rows_mib + blocks_mib,
        processes=own + routers + scenario.load.processes,
    )


def trial(scenario: Scenario, entry: RouterEntry, counted: Census, within_s: float) -> Trial:
    """One arm, broken off after so much time of the processor."""
    started = time.process_time()

    def look(done: int) -> None:
        if done % LOOK_EVERY == 0 and time.process_time() - started > within_s:
            raise _EnoughError

    simulation = Simulation(Arm(scenario, entry, 0), on_done=look)
    try:
        simulation.run()
        whole = True
    except _EnoughError:
        whole = False
    wall_s = time.process_time() - started
    now_us, rows = simulation.so_far()
    sent = [row for row in rows.requests if row.get("sent_us") is not None]
    ends_us = max((row["end_us"] for row in sent), default=now_us)
    share = 1.0 if whole else len(sent) / max(1, counted.requests)
    seconds = max(ends_us, 1) / 1e6
    tokens = _tokens_by_second(sent)
    return Trial(
        router=entry.name,
        share=share,
        model_s=seconds + (0.0 if whole else _left_s(sent, counted.requests - len(sent), ends_us)),
        wall_s=wall_s / max(share, 1e-9),
        in_flight=sum(row["end_us"] - row["sent_us"] for row in sent) / 1e6 / seconds,
        in_flight_peak=_peak(sent),
        requests_per_s=len(sent) / seconds,
        tokens_per_s=tokens.total() / seconds,
        tokens_per_s_peak=float(max(tokens.values(), default=0)),
        blocks=_blocks(rows.fleet),
    )


class _EnoughError(Exception):
    """The trial has taken its time."""


def _left_s(sent: Sequence[dict[str, Any]], left: int, ends_us: int) -> float:
    """At the pace of the trial's second half, when its ramp is over."""
    late = sum(1 for row in sent if row["end_us"] > ends_us / 2)
    return left / max(1, late) * ends_us / 2e6


def _contained(entries: Iterable[RouterEntry]) -> list[RouterEntry]:
    return [RouterEntry(name=entry.name, policy=STAND_IN) if entry.foreign else entry for entry in entries]


def _tokens_by_second(sent: Iterable[dict[str, Any]]) -> Counter[int]:
    """Output tokens that came in each second; those of a request spread evenly from its first to its last."""
    found: Counter[int] = Counter()
    for row in sent:
        first, last, tokens = row.get("first_token_us"), row.get("last_token_us"), row.get("output_tokens") or 0
        if first is None or last is None or not tokens:
            continue
        begin, end = first // 1_000_000, last // 1_000_000
        for second in range(begin, end + 1):
            inside = min(last, (second + 1) * 1_000_000) - max(first, second * 1_000_000)
            found[second] += round(tokens * inside / (last - first)) if last > first else tokens
    return found


def _peak(sent: Iterable[dict[str, Any]]) -> int:
    flying = peak = 0
    for _, change in sorted(change for row in sent for change in ((row["sent_us"], 1), (row["end_us"], -1))):
        flying += change
        peak = max(peak, flying)
    return peak


def _blocks(samples: Iterable[dict[str, Any]]) -> int:
    by_instant: Counter[int] = Counter()
    for sample in samples:
        by_instant[sample["t_us"]] += sample["used_blocks"]
    return max(by_instant.values(), default=0)
