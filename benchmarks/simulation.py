"""Requests per second of the simulation on quickstart-like traffic, jumping against stepping.

    python benchmarks/simulation.py [--sessions 400] [--concurrency 64] [--replicas 8] [--output-tokens N]

Quickstart's answers are short, so that prompts and blocks are what costs; a jump pays with long answers, which
`--output-tokens 1024` shows.

Both columns do the same work and must give the same rows; this is checked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.arm import Arm
from harness.scenario import load_scenario
from harness.sim import Simulation
from mock_engine import Engine


def measure(arm: Arm, engine: Callable[..., Engine]) -> tuple[float, list[dict[str, Any]]]:
    start = time.perf_counter()
    rows = Simulation(arm, make_engine=engine).run()
    return time.perf_counter() - start, rows.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, help="length of every answer (default: the scenario's)")
    args = parser.parse_args()
    scenario = load_scenario(
        "quickstart",
        overrides=[
            f"workload.sessions={args.sessions}",
            f"load.concurrency={args.concurrency}",
            f"fleet.replicas={args.replicas}",
            *([f"workload.output_tokens={args.output_tokens}"] if args.output_tokens else []),
        ],
    )
    print(f"{args.sessions} sessions, {args.concurrency} slots, {args.replicas} replicas, {scenario.preset.name}")
    print(f"{'router':20}{'requests/s':>12}{'stepping':>12}{'ratio':>8}   output tokens/s")
    for entry in scenario.routers:
        arm = Arm(scenario, entry, 0)
        jumped_s, jumped = measure(arm, Engine)
        stepped_s, stepped = measure(arm, partial(Engine, jumping=False))
        keys = ("request_id", "replica", "cached_tokens", "first_token_us", "last_token_us", "end_us")
        same = [[row[k] for k in keys] for row in jumped] == [[row[k] for k in keys] for row in stepped]
        if not same:
            raise SystemExit(f"{entry.name}: jumping and stepping differ, so their speeds cannot be compared")
        tokens = sum(row["output_tokens"] for row in jumped)
        fast, slow, tokens_s = len(jumped) / jumped_s, len(stepped) / stepped_s, tokens / jumped_s
        print(f"{entry.name:20}{fast:12.0f}{slow:12.0f}{fast / slow:8.1f}   {tokens_s:,.0f}")


if __name__ == "__main__":
    main()
