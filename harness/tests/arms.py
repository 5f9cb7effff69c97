"""Small scenarios that the harness tests share."""

from __future__ import annotations

from typing import Any

from harness.arm import Arm
from harness.scenario import Scenario, check_scenario


def small(**tables: Any) -> Scenario:
    """A scenario that simulates in milliseconds; tables replace or extend the defaults."""
    base: dict[str, Any] = {
        "name": "small",
        "routers": ["round-robin"],
        "seed": 3,
        "fleet": {"replicas": 3},
        "engine": {"preset": "llama-3.1-8b-h100", "num_gpu_blocks": 400},
        "workload": {
            "kind": "multi-turn",
            "sessions": 12,
            "turns": {"dist": "uniform", "low": 1, "high": 4},
            "shared_system_prompts": 2,
            "system_prompt_tokens": 100,
            "first_input_tokens": {"dist": "uniform", "low": 20, "high": 400},
            "input_tokens": {"dist": "uniform", "low": 1, "high": 90},
            "output_tokens": {"dist": "uniform", "low": 1, "high": 120},
            "think_time_ms": 40.0,
        },
        "load": {"concurrency": 6, "ramp_s": 0.1},
    }
    for key, value in tables.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) and key != "workload" else value
    return check_scenario(base, "small")


def arm(scenario: Scenario, number: int = 0, repeat: int = 0) -> Arm:
    return Arm(scenario, scenario.routers[number], repeat)
