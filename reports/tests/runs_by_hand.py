"""Finished runs for the gate's tests: made of rows whose latency is set by hand, without files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from reports import RunResult, arm_metrics, fleet_frame, requests_frame

SCENARIO = {
    "name": "quickstart",
    "workload": {"kind": "multi-turn", "sessions": 72},
    "load": {"driver": "sessions", "concurrency": 16, "think_time_ms": 0},
    "engine": {"block_size": 16},
    "fleet": {"replicas": 4},
}
ROUTERS = ("round-robin", "session-ring", "dynamo-kv")


@cache
def noisy_run(
    seed: int, *, prefill: float = 1.0, repeats: int = 3, requests: int = 200, noise: float = 0.02, mode: str = "live"
) -> RunResult:
    """Every run meets the same sessions; noise is the run's own: per repeat, twice that per arm, 10 % a request."""
    routers: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    chance = np.random.default_rng(seed)
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in ROUTERS}
    for repeat in range(repeats):
        work = Random(f"sessions/{repeat}")
        hour = float(chance.lognormal(0, noise / 2))
        prompts = np.array([work.randrange(500, 4_000) for _ in range(requests)])
        for place, name in enumerate(ROUTERS):
            machine = hour * float(chance.lognormal(0, noise))
            each_us = chance.lognormal(0, 0.10, requests) * machine
            ttft_us = ((20_000 + 60 * prompts * prefill) * (1 + 0.2 * place) * each_us).astype(np.int64)
            sent = np.arange(requests) * 150_000
            last = sent + ttft_us + (30_000 * 40 * chance.lognormal(0, 0.05, requests) * machine).astype(np.int64)
            rows = {
                "router": [name] * requests,
                "repeat": [repeat] * requests,
                "request_id": [f"q{number}" for number in range(requests)],
                "session": [f"s{number // 5}" for number in range(requests)],
                "turn": [number % 5 for number in range(requests)],
                "replica": [f"r{number % 4}" for number in range(requests)],
                "sent_us": sent,
                "first_token_us": sent + ttft_us,
                "last_token_us": last,
                "end_us": last,
                "phase": ["steady"] * requests,
                "prompt_tokens": prompts,
                "cached_tokens": prompts // 2,
                "output_tokens": [41] * requests,
                "status": ["ok"] * requests,
            }
            metrics = arm_metrics(requests_frame(rows), fleet_frame([]))
            each.append({"router": name, "repeat": repeat, "metrics": metrics})
            parts[name].append(metrics)
    for name, found in parts.items():
        routers[name] = {**found[0], "requests": sum(metrics["requests"] for metrics in found)}
    return run_of(routers, each, mode=mode)


def run_of(routers: dict[str, Any], repeats: list[dict[str, Any]] | None = None, **changes: Any) -> RunResult:
    """A run with these figures; one repeat unless given."""
    own = [{"router": name, "repeat": 0, "metrics": metrics} for name, metrics in routers.items()]
    values: dict[str, Any] = {
        "folder": Path("nowhere"),
        "status": "complete",
        "scenario": SCENARIO,
        "mode": "sim",
        "seed": 42,
        "environment": {"commit": "abc", "python": "3.11", "platform": "here", "cores": 2},
        "routers": routers,
        "repeats": repeats or own,
        "health": {"verdict": "ok", "reasons": []},
    }
    return RunResult(**(values | changes))


def spoilt(run: RunResult, router: str, **figures: Any) -> RunResult:
    """A copy of a one-repeat run with some figures of one router replaced."""
    metrics = {**run.routers[router], **figures}
    return run_of({**run.routers, router: metrics}, scenario=run.scenario, mode=run.mode, health=run.health)
