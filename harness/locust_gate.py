"""The gate at the end of a Locust test: raw rows become a run folder, which is judged as `routebench gate` judges one.

Knows nothing of Locust. Law: only rows that are all there are judged, so the shares of all load processes must have
an end in the folder; a share without one (its worker was lost, or wrote on another machine) makes the run invalid.
What only our own engines tell is unknown here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.arm import Arm
from harness.environment import environment
from harness.errors import OutputError, UsageError
from harness.gate_command import gate_command
from harness.json_lines import read_json_lines
from harness.load_plan import LoadPlan
from harness.merge import merge_rows
from harness.router_entry import RouterEntry
from harness.run import write_results
from harness.scenario import Scenario
from reports import ReportError, default_rules, read_figures, read_rules

ROUTER = "router"
"""Name of the router under test where no baseline has one for it."""
LOOK_S = 0.1
ENDS_WAIT_S = 15.0
"""How long load processes may take, above Locust's own stop timeout, to write their last line."""


@dataclass(frozen=True, slots=True)
class Judge:
    """What one test is judged by. Making it reads everything, so that a wrong name is found before the test."""

    rules: str
    baseline: str
    router: str

    @classmethod
    def of(cls, options: Any, scenario: Scenario) -> Judge | None:
        """As the command line or the form says; None when neither rules nor a baseline are named. Raises UsageError."""
        rules_file, baseline = options.gate.strip(), options.gate_baseline.strip()
        if not (rules_file or baseline):
            if options.gate_router.strip():
                raise UsageError("--gate-router names a router of the baseline: give --gate-baseline, too")
            return None
        try:
            rules = read_rules(Path(rules_file)) if rules_file else default_rules()
            names = list(read_figures(baseline).routers) if baseline else []
        except ReportError as error:
            raise UsageError(str(error)) from error
        for rule in rules.rules:
            if rule.kind != "bound" and not baseline and rule.applies_to(scenario.name, "live"):
                raise UsageError(
                    f"{rules_file}: {rule.kind} rule {rule.text!r} compares with a baseline: give --gate-baseline, or "
                    "only [bounds]"
                )
        router = options.gate_router.strip()
        if names and router not in names and (router or len(names) > 1):
            said = f"has no router {router!r}" if router else f"has {len(names)} routers"
            raise UsageError(f"the baseline {baseline} {said}: give --gate-router, one of {', '.join(names)}")
        return cls(rules_file, baseline, router or (names[0] if names else ROUTER))

    def trial(self, scenario: Scenario, plan: LoadPlan, host: str, *, shares: int) -> Trial:
        """A test that begins now. Raises UsageError for a folder with rows of another: they would be judged as
        part of this one."""
        if any(Path(plan.rows_dir).glob("locust-*.jsonl")):
            raise UsageError(
                f"--rows-dir {plan.rows_dir} holds rows of another test, and the gate judges a whole folder: name a "
                "new one"
            )
        return Trial(self, _as_tested(scenario, plan, self.router, host), Path(plan.rows_dir), shares, time.monotonic())


@dataclass(frozen=True, slots=True)
class Trial:
    """One test from its start to its verdict."""

    judge: Judge
    scenario: Scenario
    folder: Path
    shares: int
    began_s: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def verdict(self, ended: Literal["whole", "limit", "stopped"], stop_timeout_s: float) -> int:
        """Waits for the ends of all shares, writes the run's files beside the rows, prints the verdict and returns the
        gate's exit code. `limit`: a time limit or a shape was to end the test, whatever was left to send. Raises
        HarnessError."""
        wall_s = self.seconds
        began = datetime.now(UTC) - timedelta(seconds=wall_s)
        lost = [] if ended == "stopped" else _missing(self.folder, self.shares, stop_timeout_s)
        facts: dict[str, Any] = {"lost": lost, "limited": ended == "limit"}
        arm = Arm(self.scenario, self.scenario.routers[0], 0)
        header = {
            "scenario": self.scenario.resolved(),
            "mode": "live",
            "seed": self.scenario.seed,
            "environment": environment(),
            "started_at": began.isoformat(timespec="seconds"),
            "wall_s": round(wall_s, 3),
            "status": "partial" if ended == "stopped" else "complete",
        }
        try:
            write_results(self.scenario, self.folder, header, [(arm, merge_rows(arm, self.folder, facts))])
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the figures could not be written ({error.strerror or error}): make room, and run the "
                "test again"
            ) from error
        judge = self.judge
        code = gate_command(self.folder, judge.baseline or None, Path(judge.rules) if judge.rules else None)
        print(f"routebench: gate exits {code}; the run is in {self.folder}", flush=True)
        return code


def _as_tested(scenario: Scenario, plan: LoadPlan, router: str, host: str) -> Scenario:
    """The scenario as this test ran it."""
    drive: dict[str, Any] = plan.drive()
    load = msgspec.structs.replace(scenario.load, **drive, api=plan.api, model=plan.model)
    entry = RouterEntry(name=router, url=host)
    return msgspec.structs.replace(scenario, seed=plan.seed, repeats=1, load=load, routers=(entry,), expect=())


def _missing(folder: Path, shares: int, wait_s: float) -> list[str]:
    """A line for every share of the sessions that has no end after the wait."""
    limit_s = time.monotonic() + wait_s + ENDS_WAIT_S
    while True:
        ended = {e["rank"] for e in _events(folder) if e["event"] == "end"}
        missing = [rank for rank in range(shares) if rank not in ended]
        if not missing or time.monotonic() > limit_s:
            break
        time.sleep(LOOK_S)
    return [
        f"load process {rank + 1} of {shares}, whose rows have no end in {folder} (on another machine? give --rows-dir "
        "a folder that all share)"
        for rank in missing
    ]


def _events(folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(folder.glob("locust-*.events.jsonl"))
