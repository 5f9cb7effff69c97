"""One arm of a run: one router in front of one cold fleet under one repeat of the workload.

The seeds of everything that happens by chance follow from the scenario's seed, the repeat and a name, so that
every arm of a repeat meets the same sessions and a further draw somewhere never shifts another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.ingress import RouterSetup
from harness.router_entry import RouterEntry
from harness.scenario import Scenario
from workloads import Streams

ROUTER_SEED_STREAM = "routers.policy"


@dataclass(frozen=True, slots=True)
class Arm:
    """What is to be run; `repeat` counts from 0."""

    scenario: Scenario
    router: RouterEntry
    repeat: int

    @property
    def setup(self) -> RouterSetup:
        """How the router is run."""
        return self.router.setup(self.scenario.router)

    @property
    def workload_seed(self) -> int:
        """Seed of the sessions: the same for every router of a repeat, another in every repeat."""
        return self.scenario.seed + self.repeat

    @property
    def label(self) -> str:
        """A name for folders and logs that is unique within the run, also where case does not count."""
        own = _plain(self.router.name)
        twins = [entry.name for entry in self.scenario.routers if _plain(entry.name).casefold() == own.casefold()]
        number = f"~{twins.index(self.router.name) + 1}" if len(twins) > 1 else ""
        return f"{own}{number}.{self.repeat}"

    def seed_for(self, stream: str) -> int:
        """A whole number below 2**31 for something that must be seeded from outside, such as a process."""
        return Streams(self.workload_seed)[stream].randrange(2**31)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)


@dataclass(slots=True)
class ArmRows:
    """What an arm measured, as rows of `requests.parquet`, `fleet.parquet` and `router.parquet`."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    fleet: list[dict[str, Any]] = field(default_factory=list)
    router: list[dict[str, Any]] = field(default_factory=list)
    ceiling_cached_tokens: int | None = None
    """Prompt tokens that one cache without a limit would have served; None when that is unknown."""
    distinct_prompts: int | None = None
    """Different prompts among the measured successes."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What health and the run's file need besides rows: CPU seconds, warnings, cold-start check, lost processes."""


def arms_of(scenario: Scenario) -> list[Arm]:
    """All arms in the order in which they run: repeats are interleaved, so that drift meets every router alike."""
    return [Arm(scenario, router, repeat) for repeat in range(scenario.repeats) for router in scenario.routers]


def row_order(row: dict[str, Any]) -> tuple[bool, int, str]:
    """Requests in the order in which they were sent; those never sent come last."""
    sent = row.get("sent_us")
    return sent is None, sent or 0, row["request_id"]
