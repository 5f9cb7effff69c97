"""`routebench check`: what a scenario will ask for and what it will take, without starting anything."""

from __future__ import annotations

import os

from rich.console import Console

from harness.census import census
from harness.estimate import Estimate, estimate
from harness.scenario import Scenario

TOKENS_PER_S_PER_CORE = 400
"""Streamed tokens that a core carries with replicas, router and reader on it; above it a live run is likely to measure
its machine, which `routebench doctor` finds out."""
CHURN_SHOWN = 8


def check_command(scenario: Scenario) -> int:
    """Prints the counts and the estimates; the scenario is checked already."""
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
    for line in [*_setups(scenario), *_churn_lines(scenario)]:
        say.print(f"  {line}")
    cores = os.cpu_count() or 1
    for line in estimate_lines(estimate(scenario, counted, cores), cores, scenario.name):
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


def estimate_lines(found: Estimate, cores: int, name: str) -> list[str]:
    """Load, then time and memory of each mode."""
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
        f"--mode sim: about {seconds(found.sim_s)} and {mib(found.sim_mib)}; --mode live: about "
        f"{seconds(found.live_s)} and {mib(found.live_mib)} in {found.processes} processes",
    ]
    if busiest.tokens_per_s > TOKENS_PER_S_PER_CORE * cores:
        lines.append(
            f"! {busiest.tokens_per_s:,.0f} tokens/s is likely more than {cores} cores stream live: use --mode sim, or "
            f"ask `routebench doctor {name}`"
        )
    return lines


def _span(values: list[float], decimals: int = 0) -> str:
    """Lowest to highest over the routers."""
    texts = dict.fromkeys(f"{value:,.{decimals}f}" for value in (min(values), max(values)))
    return " to ".join(texts)


def seconds(value: float) -> str:
    """Two digits are all that an estimate has."""
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def mib(value: float) -> str:
    return f"{value:,.0f} MiB" if value < 1024 else f"{value / 1024:,.1f} GiB"
