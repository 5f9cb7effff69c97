"""What was asked of the routers and what was really in flight, in one line: a configured number of users says little.

Think time and slots are the scenario's; in flight and rate are measured, from the first steady request to the last end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from reports.display import number

if TYPE_CHECKING:
    from reports.run import RunResult


def load_lines(run: RunResult) -> list[str]:
    """One line, or one for each run that a comparison joined where they differ."""
    return run.verdict.get("loads") or [line for line in (load_line(run),) if line]


def load_line(run: RunResult) -> str:
    """Such as: sessions driver, 36 slots, think time 100 to 500 ms (uniform); measured 21 to 24 in flight (peak 36)."""
    load = run.scenario.get("load") or {}
    asked = [_loop(load)] if load.get("driver") else []
    rates = [stage.get("rate_per_s") for stage in load.get("stages") or ()] or [load.get("rate_per_s")]
    if known := [f"{rate:g}" for rate in rates if rate is not None]:
        asked.append(f"{', then '.join(known)} sessions/s asked")
    if load.get("concurrency"):
        held = "requests in flight at most" if load.get("driver") in ("requests", "rate") else "slots"
        asked.append(f"{load['concurrency']} {held}")
    think = _distribution((run.scenario.get("workload") or {}).get("think_time_ms"))
    if think:
        asked.append(f"think time {think}")
    if load.get("ramp_s"):
        asked.append(f"ramp {load['ramp_s']} s")
    measured = []
    if held := _span(run, "in_flight_mean", 0):
        peak = max((metrics.get("in_flight_peak") or 0) for metrics in run.routers.values())
        measured.append(f"{held} in flight (peak {peak:,})")
    if rate := _span(run, "requests_per_s", 1):
        measured.append(f"{rate} requests/s")
    parts = [", ".join(asked)] if asked else []
    if measured:
        parts.append(f"measured {', '.join(measured)}")
    return "; ".join(parts)


def _loop(load: Mapping[str, Any]) -> str:
    """The driver, and which kind of loop that is: a closed one waits for answers before it asks on."""
    if load["driver"] != "rate":
        return f"{load['driver']} driver (closed loop)"
    return f"rate driver (open loop{', ' + load['arrival'] if load.get('arrival') else ''})"


def _span(run: RunResult, name: str, decimals: int) -> str:
    """Lowest to highest over the routers."""
    values = [metrics[name] for metrics in run.routers.values() if metrics.get(name) is not None]
    texts = list(dict.fromkeys(number(value, decimals) for value in (min(values), max(values)))) if values else []
    return " to ".join(texts)


def _distribution(value: Any) -> str:
    """A length of time as the scenario writes it: a number, or a distribution with its parameters."""
    if not isinstance(value, Mapping):
        return f"{value:g} ms" if isinstance(value, int | float) and value else "0 ms" if value == 0 else ""
    low, high = value.get("low"), value.get("high")
    if low is not None and high is not None:
        return f"{low} to {high} ms ({value.get('dist', 'uniform')})"
    return f"{value.get('dist', '')} {_parameters(value.items())}".strip()


def _parameters(items: Iterable[tuple[Any, Any]]) -> str:
    return "(" + ", ".join(f"{key} {part}" for key, part in items if key != "dist" and part is not None) + ") ms"
