"""`routebench check`: what a scenario will ask for and what it will take, without starting anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rich.console import Console

from harness.census import census
from harness.errors import UsageError
from harness.estimate import Estimate, Trial, estimate
from harness.mode_check import refusals
from harness.scenario import Scenario
from routers.deciding import PolicyWatch

TOKENS_PER_S_PER_CORE = 400
"""Streamed tokens that a core carries with replicas, router and reader on it; above it a live run is likely to measure
its machine, which `routebench doctor` finds out."""
CHURN_SHOWN = 8
MODES = ("sim", "live")
NONE_REFUSED: Mapping[str, str] = {}


def check_command(scenario: Scenario) -> int:
    """Prints the counts and the estimates; the scenario is checked already."""
    refused = refusals(scenario)
    if len(refused) == len(MODES):
        raise UsageError(
            f"{scenario.name}: no mode can run it: " + "; ".join(f"{mode}: {refused[mode]}" for mode in MODES)
        )
    counted = census(scenario, scenario.seed)
    room = (scenario.engine.num_gpu_blocks - 1) * scenario.engine.block_size * len(scenario.fleet.names)
    arms = len(scenario.routers) * scenario.repeats
    say = Console(highlight=False, markup=False)
    say.print(f"{scenario.name}: ok. {scenario.about}")
    say.print(
        f"  {arms} arms ({', '.join(r.name for r in scenario.routers)}; {scenario.repeats} repeats), "
        f"{len(scenario.fleet.names)} replicas of {scenario.preset.name}"
    )
    say.print(
        f"  an arm: {counted.sessions:,} sessions, {counted.requests:,} requests, {counted.prompt_tokens:,} prompt "
        f"tokens, {counted.output_tokens:,} output tokens, longest context {counted.longest_context:,}"
    )
    say.print(f"  {scenario.load.describe()}; the fleet's caches hold {room:,} tokens")
    for line in [*_setups(scenario), *_churn_lines(scenario), *_fault_lines(scenario), *_tenant_lines(scenario)]:
        say.print(f"  {line}")
    cores = os.cpu_count() or 1
    with PolicyWatch(lambda said: print(f"! a router: {said}", file=sys.stderr, flush=True)):
        found = estimate(scenario, counted, cores)
    for line in [*estimate_lines(found, cores, scenario.name, refused), *_never(scenario, found.trials)]:
        say.print(f"  {line}")
    return 0


def _setups(scenario: Scenario) -> list[str]:
    """How routers are run, where that is not each alone and plain."""
    said: dict[str, list[str]] = {}
    for entry in scenario.routers:
        said.setdefault(entry.setup(scenario.router).describe(), []).append(entry.name)
    return [f"{', '.join(names)}: {words}" for words, names in said.items() if words]


def _churn_lines(scenario: Scenario) -> list[str]:
    """What happens to replicas, in order."""
    if not scenario.churn:
        return []
    shown = [event.describe() for event in scenario.churn[:CHURN_SHOWN]]
    more = len(scenario.churn) - len(shown)
    return [f"replicas come and go: {', '.join(shown)}" + (f" and {more} more" if more else "")]


def _fault_lines(scenario: Scenario) -> list[str]:
    """What goes wrong on purpose, and where."""
    lines = []
    if engine := scenario.faults.engine.active():
        who = ", ".join(scenario.faults.replicas) or "every replica"
        lines.append(f"faults of {who}: " + ", ".join(f"{name} = {value}" for name, value in engine.items()))
    by_fault: dict[str, list[str]] = {}
    for entry in scenario.routers:
        if not entry.foreign and (faults := scenario.router_faults(entry).names()):
            by_fault.setdefault(", ".join(faults), []).append(entry.name)
    return lines + [f"faults of {', '.join(names)}: {faults}" for faults, names in by_fault.items()]


def _tenant_lines(scenario: Scenario) -> list[str]:
    tenants = scenario.workload.get("tenants", 1)
    return [f"{tenants} tenants, none of which shares a block with another"] if tenants != 1 else []


def _never(scenario: Scenario, trials: tuple[Trial, ...]) -> list[str]:
    """What is due after the last request of an arm has ended, by the trials: it will not be done."""
    shortest = min(trials, key=lambda trial: trial.model_s)
    late = [event for event in scenario.churn if event.at_us > shortest.model_s * 1e6]
    if not late:
        return []
    more = f" and {len(late) - 1} more" if len(late) > 1 else ""
    return [
        f"! {late[0].describe()}{more}: not reached, an arm of {shortest.router} ends at about "
        f"{shortest.model_s:.1f} s; let it happen earlier, or give the arm more to do"
    ]


def estimate_lines(found: Estimate, cores: int, name: str, refused: Mapping[str, str] = NONE_REFUSED) -> list[str]:
    """Load, then time and memory of each mode, or why it is `refused`."""
    busiest = max(found.trials, key=lambda trial: trial.tokens_per_s)
    lines = [
        f"load, by a trial in virtual time: {_span([trial.in_flight for trial in found.trials])} requests in flight "
        f"(peak {max(trial.in_flight_peak for trial in found.trials):,}), "
        f"{_span([trial.requests_per_s for trial in found.trials], 1)} requests/s, "
        f"{_span([trial.tokens_per_s for trial in found.trials])} output tokens/s"
        + (
            f"; told from the first {min(t.share for t in found.trials):.0%} of an arm"
            if any(t.share < 1 for t in found.trials)
            else ""
        ),
        *_mode_lines(found, refused),
    ]
    if busiest.tokens_per_s > TOKENS_PER_S_PER_CORE * cores and "live" not in refused:
        lines.append(
            f"! {busiest.tokens_per_s:,.0f} tokens/s is likely more than {cores} cores stream live: use --mode sim, or "
            f"ask `routebench doctor {name}`"
        )
    return lines


def _mode_lines(found: Estimate, refused: Mapping[str, str]) -> list[str]:
    """One line where both can."""
    costs = {
        "sim": f"about {seconds(found.sim_s)} and {mib(found.sim_mib)}",
        "live": f"about {seconds(found.live_s)} and {mib(found.live_mib)} in {found.processes} processes",
    }
    said = [f"--mode {mode}: {costs[mode]}" for mode in MODES if mode not in refused]
    return ["; ".join(said)] * bool(said) + [f"--mode {mode} refuses it: {why}" for mode, why in refused.items()]


def _span(values: list[float], decimals: int = 0) -> str:
    """Lowest to highest over the routers."""
    texts = dict.fromkeys(f"{value:,.{decimals}f}" for value in (min(values), max(values)))
    return " to ".join(texts)


def seconds(value: float) -> str:
    """Two digits are all that an estimate has."""
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def mib(value: float) -> str:
    return f"{value:,.0f} MiB" if value < 1024 else f"{value / 1024:,.1f} GiB"
