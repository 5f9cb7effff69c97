"""What a mode cannot carry, found before anything starts: processes outside virtual time, all-knowing routers live."""

from __future__ import annotations

import random

from harness.errors import UsageError
from harness.scenario import Scenario
from routers import RoutersError, Signal, refuse_oracle


def require_simulable(scenario: Scenario) -> None:
    """Raises UsageError for a scenario that names processes outside ours."""
    if scenario.fleet.urls:
        raise UsageError(
            "fleet.urls names engines that run outside, which virtual time cannot contain: "
            "remove urls, or use --mode live"
        )
    scenario.faults.require_simulable()
    for entry in scenario.routers:
        if entry.foreign:
            raise UsageError(
                f"router {entry.name!r} is a process of its own, which virtual time cannot contain: "
                "leave it out, or use --mode live"
            )


def require_live(scenario: Scenario) -> None:
    """Raises UsageError for a policy that cannot know live what it needs, or a fault that nobody would commit."""
    if scenario.faults and scenario.fleet.urls:
        raise UsageError("faults happen to replicas and routers that routebench starts: remove fleet.urls or [faults]")
    for entry in scenario.routers:
        if entry.foreign:
            continue
        policy = entry.build(random.Random(0), scenario.engine.block_size)
        try:
            refuse_oracle(policy, entry.name)
        except RoutersError as error:
            raise UsageError(str(error)) from error
        if Signal.TEXT in policy.needs and scenario.load.api == "completions-ids":
            raise UsageError(
                f"router {entry.name!r} reads the text of prompts and load.api = 'completions-ids' sends none: "
                "use --set load.api=completions-text (or chat), or --mode sim"
            )
