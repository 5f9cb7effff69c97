"""`routebench doctor`: how many streams this machine carries before it measures itself, found in real processes.

Replicas, a router and Locust run as in a live arm while the rate climbs from step to step, and each step is judged as a
run is. With a scenario the fleet, the requests and the router are its own, and the verdict says whether what it asks
for (told by a trial in virtual time) fits.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from harness.arm import Arm, ArmRows
from harness.census import census
from harness.environment import environment
from harness.errors import ProcessLost, UsageError
from harness.estimate import STAND_IN, Trial, estimate
from harness.faults import FaultTable
from harness.live import run_live_arm
from harness.progress import reporter
from harness.run import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_OK
from harness.scenario import Scenario, check_scenario, load_scenario
from harness.signals import Interruption
from reports import fleet_frame, health, requests_frame, stages_of

USUAL = "quickstart"
"""The scenario whose fleet and requests stand for a user's when none is named."""
STEPS = 8
TOKENS_PER_S, TOKENS_PER_S_TOP, TOKENS_PER_S_MAX = 100.0, 1_700.0, 8_000.0
"""Of the first step, which any laptop does, and of the last, which no two cores do well. The last is higher where a
scenario asks for more, up to what no laptop does; the steps between grow by one factor."""
ROOM = 1.1
"""The last step lies so far above what is asked."""
STEP_S = 1.6
SETTLE_S = 1.0
"""Connections open and code warms up at the first step's rate; not judged."""
DRAIN_S = 2.0
PROMPT_TOKENS_MAX, OUTPUT_TOKENS_MAX = 8_192, 48
"""Longer answers would still be on their way when their step is over; they are the lighter ones for each token."""
FAILED_STEPS = 2
"""So many steps in a row that are not well end the search: one alone may be somebody else's doing."""
SESSION_SLACK = 32
QUESTION_TOKENS = 16
"""What is new in a prompt: the rest is cached, so that the machine is full before the engines are."""
COLUMNS = (
    "tokens/s\nasked",
    "tokens/s\ncame",
    "streams",
    "requests/s",
    "requests\nlate ms",
    "tokens\nlate ms",
    "health",
)
LEGEND = (
    "streams: requests in flight, the mean; requests late: sent so long after they were due; tokens late: left a "
    "replica so long after its model said (p99 of each). Late is this machine's doing, no router's."
)
HEARING = "dynamo-kv"
"""Stands for all routers that hear events and hash prompts, which costs this machine the most; it spreads load evenly
also where a scenario's own would not."""


@dataclass(frozen=True, slots=True)
class StepFound:
    """One rate of the climb and what became of it."""

    requests_per_s: float
    tokens_per_s_asked: float
    tokens_per_s: float
    streams: float
    """Mean requests in flight."""
    lag_ms_p99: float | None
    late_ms_p99: float | None
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What this machine carries, and whether a scenario fits."""

    steps: tuple[StepFound, ...]
    carried: StepFound | None
    """The highest step that was well; None if not even the first was."""
    bearable: StepFound | None
    """The highest step that was not invalid."""
    asked: Trial | None
    """The busiest router of the scenario that was named."""

    @property
    def fits(self) -> Literal["well", "degraded", "no"] | None:
        if self.asked is None:
            return None
        for step, word in ((self.carried, "well"), (self.bearable, "degraded")):
            if step is not None and self.asked.tokens_per_s <= step.tokens_per_s_asked:
                return word  # type: ignore[return-value]
        return "no"

    def at_least(self, step: StepFound | None) -> bool:
        """The climb ended with this step, and there may be more above it."""
        return step is not None and step is self.steps[-1]


def doctor_command(name: str | None, overrides: Sequence[str], *, as_json: bool, quiet: bool) -> int:
    """Measures, prints and returns the exit code: 3 for a scenario that would measure this machine."""
    scenario = load_scenario(name or USUAL, overrides=overrides)
    if scenario.fleet.urls:
        raise UsageError(
            "fleet.urls names engines that run elsewhere, and doctor measures this machine with replicas of ours: "
            "use --set fleet.urls=[] to ask about a fleet of mocks"
        )
    with (
        tempfile.TemporaryDirectory(prefix="routebench-doctor-") as folder,
        Interruption() as interruption,
        reporter(Console(stderr=True), quiet=quiet or as_json) as progress,
    ):
        asked = _asked(scenario) if name else None
        climb = climb_of(scenario, asked.tokens_per_s if asked else 0.0)
        arm = Arm(climb, climb.routers[0], 0)
        progress.arm(1, 1, "doctor", census(climb, climb.seed).requests)
        rows = run_live_arm(
            arm,
            Path(folder),
            interruption=interruption,
            on_phase=progress.phase,
            on_done=progress.done,
            on_warn=progress.warn,
        )
        if interruption.asked:
            return EXIT_INTERRUPTED
        if rows.facts["lost"]:
            raise ProcessLost(f"{rows.facts['lost'][0]}: doctor cannot say anything without it; run it again")
        progress.phase("judging")
        found = diagnose(arm, rows, asked)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(_document(found, scenario, climb)), indent=2).decode())
        sys.stdout.write("\n")
    else:
        _show(found, scenario, climb, named=name is not None)
    return EXIT_INVALID if found.fits == "no" else EXIT_OK


def climb_of(scenario: Scenario, asked_tokens_per_s: float = 0.0) -> Scenario:
    """A load of requests as long as the scenario's whose rate climbs, against its fleet."""
    counted = census(scenario, scenario.seed)
    prompt = min(max(1, counted.prompt_tokens // counted.requests), PROMPT_TOKENS_MAX)
    output = min(max(2, counted.output_tokens // counted.requests), OUTPUT_TOKENS_MAX)
    longest = (scenario.engine.num_gpu_blocks - 1) * scenario.engine.block_size
    prompt = min(prompt, longest - output, scenario.engine.max_model_len - output)
    top = max(TOKENS_PER_S_TOP, min(ROOM * asked_tokens_per_s, TOKENS_PER_S_MAX))
    growth = (top / TOKENS_PER_S) ** (1 / (STEPS - 1))
    rates = [TOKENS_PER_S * growth**step / output for step in range(STEPS)]
    stages = [{"rate_per_s": rates[0], "duration_s": SETTLE_S}]
    stages += [{"rate_per_s": rate, "duration_s": STEP_S} for rate in rates]
    sessions = round(sum(stage["rate_per_s"] * stage["duration_s"] for stage in stages)) + SESSION_SLACK
    hears = any(entry.hears_events(scenario.engine.block_size) for entry in scenario.routers)
    table = {
        **msgspec.structs.replace(scenario, faults=FaultTable(), expect=()).resolved(),
        "name": "doctor",
        "repeats": 1,
        "routers": [HEARING if hears else STAND_IN],
        "workload": {
            "kind": "shared-prefix",
            "num_groups": 1,
            "num_prompts_per_group": sessions,
            "system_prompt_len": max(1, prompt - QUESTION_TOKENS),
            "question_len": min(QUESTION_TOKENS, prompt - 1),
            "output_len": output,
        },
        "load": {
            "driver": "rate",
            "arrival": "constant",
            "stages": stages,
            "drain_s": DRAIN_S,
            **{key: getattr(scenario.load, key) for key in ("api", "session_header", "model", "processes")},
        },
    }
    table.pop("churn", None)
    return check_scenario(table, "doctor")


def diagnose(arm: Arm, rows: ArmRows, asked: Trial | None) -> Diagnosis:
    """Judges each step of the climb by itself, with the rules that a run is judged by."""
    stages = arm.scenario.load.stages
    begins_us = min((r["scheduled_us"] for r in rows.requests if r.get("scheduled_us") is not None), default=0)
    start_us = begins_us + round(SETTLE_S * 1e6)
    steps = []
    for stage in stages[1:]:
        end_us = start_us + round(stage.duration_s * 1e6)
        steps.append(_step(arm, rows, stage.rate_per_s, start_us, end_us))
        start_us = end_us
    return Diagnosis(tuple(steps), highest(steps, ("ok",)), highest(steps, ("ok", "degraded")), asked)


def _step(arm: Arm, rows: ArmRows, rate: float, start_us: int, end_us: int) -> StepFound:
    def inside(key: str) -> Callable[[dict[str, Any]], bool]:
        return lambda row: row.get(key) is not None and start_us <= row[key] < end_us

    sent = list(filter(inside("scheduled_us"), rows.requests))
    samples = list(filter(inside("t_us"), rows.fleet))
    requests = requests_frame(sent)
    judged = health(requests, fleet_frame(samples), stages=stages_of(requests, {"load": {"driver": "rate"}}))
    lags = sorted(row["sent_us"] - row["scheduled_us"] for row in sent if row.get("sent_us") is not None)
    late = sorted(s["late_us_p99"] for s in samples if s["late_us_p99"] is not None)
    seconds = (end_us - start_us) / 1e6
    asked_tokens = rate * arm.scenario.workload["output_len"]
    return StepFound(
        requests_per_s=rate,
        tokens_per_s_asked=asked_tokens,
        tokens_per_s=sum(_tokens_within(row, start_us, end_us) for row in rows.requests) / seconds,
        streams=sum(_held_us(row, start_us, end_us) for row in rows.requests) / 1e6 / seconds,
        lag_ms_p99=lags[-(-99 * len(lags) // 100) - 1] / 1000 if lags else None,
        late_ms_p99=late[-(-90 * len(late) // 100) - 1] / 1000 if late else None,
        verdict=judged["verdict"],
        reasons=(*judged["reasons"],),
    )


def highest(steps: Sequence[StepFound], good: Collection[str]) -> StepFound | None:
    """The highest step of a good verdict before several in a row were not."""
    best, failed = None, 0
    for step in steps:
        failed = 0 if step.verdict in good else failed + 1
        if failed == FAILED_STEPS:
            break
        best = step if step.verdict in good else best
    return best


def _held_us(row: dict[str, Any], start_us: int, end_us: int) -> int:
    if row.get("sent_us") is None or row.get("end_us") is None:
        return 0
    return max(0, min(int(row["end_us"]), end_us) - max(int(row["sent_us"]), start_us))


def _tokens_within(row: dict[str, Any], start_us: int, end_us: int) -> int:
    """Tokens of an answer that came in this span, from the gaps between its chunks."""
    at, count = row.get("first_token_us"), 0
    if at is None:
        return 0
    for gap in (0, *(row.get("chunk_gaps_us") or ())):
        at += gap
        count += start_us <= at < end_us
    return count


def _asked(scenario: Scenario) -> Trial:
    """Of the scenario's routers, the one under which it asks the most of the machine."""
    return max(estimate(scenario).trials, key=lambda found: found.tokens_per_s)


# -- what is said -----------------------------------------------------------------------------------------------------


def _show(found: Diagnosis, scenario: Scenario, climb: Scenario, *, named: bool) -> None:
    say = Console(highlight=False, markup=False)
    say.print(
        f"{os.cpu_count()} cores, load average {environment()['load_average']}; {len(climb.fleet.names)} replicas of "
        f"{climb.preset.name} behind {climb.routers[0].name}, {climb.load.processes} load process"
        f"{'es' if climb.load.processes > 1 else ''}; requests of {_prompt(climb):,} prompt and "
        f"{climb.workload['output_len']:,} output tokens"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "health" else "right", vertical="bottom")
    for step in found.steps:
        late = [_ms(step.lag_ms_p99), _ms(step.late_ms_p99)]
        figures = [step.tokens_per_s_asked, step.tokens_per_s, step.streams]
        table.add_row(*(f"{f:,.0f}" for f in figures), f"{step.requests_per_s:.1f}", *late, step.verdict)
    say.print(table)
    say.print(LEGEND, style="dim")
    for line in verdict_lines(found, scenario, named=named):
        say.print(line)


def verdict_lines(found: Diagnosis, scenario: Scenario, *, named: bool) -> list[str]:
    """The outcome in words, and what to set."""
    best, worse = found.carried, found.bearable
    lines = []
    if best is not None:
        about = "at least" if found.at_least(best) else "about"
        lines.append(f"this machine carries {about} {_amount(best)} at once with this fleet")
    else:
        lines.append(
            f"no step was well (load average {environment()['load_average']} on {os.cpu_count()} cores): close what "
            "else runs here, or use --mode sim, which does not depend on the machine"
        )
    beyond = next((s for s in found.steps if s.verdict != "ok" and (best is None or s.streams > best.streams)), None)
    if beyond is not None:
        lines.append(f"at {beyond.tokens_per_s_asked:,.0f} tokens/s: {beyond.reasons[0]}")
    if worse is not None and worse is not best:
        about = "at least up to" if found.at_least(worse) else "up to"
        lines.append(f"{about} {_amount(worse)} a run is degraded, not invalid: differences must be larger to count")
    if found.asked is None:
        lines.append("`routebench doctor SCENARIO` says whether a scenario fits; larger ones belong in --mode sim")
        return lines
    asked = found.asked
    asks = (
        f"{scenario.name} asks for {asked.in_flight:,.0f} streams (peak {asked.in_flight_peak:,}) and "
        f"{asked.tokens_per_s:,.0f} tokens/s with {asked.router}"
    )
    if found.fits == "well":
        assert best is not None
        close = asked.tokens_per_s_peak > best.tokens_per_s_asked and not found.at_least(best)
        lines.append(
            asks + ": it fits" + (f"; watch health, its busiest second asks {asked.tokens_per_s_peak:,.0f}" * close)
        )
    else:
        word = "it fits, but is likely to be degraded" if found.fits == "degraded" else "it does not fit"
        lines.append(f"{asks}: {word}; {mend(found, scenario)}")
    return lines


def _amount(step: StepFound) -> str:
    return f"{step.streams:,.0f} streams ({step.tokens_per_s:,.0f} tokens/s, {step.requests_per_s:.1f} requests/s)"


def mend(found: Diagnosis, scenario: Scenario) -> str:
    """What to set so that the scenario asks no more than was carried."""
    assert found.asked is not None
    if found.carried is None or scenario.load.arrival == "trace":
        return "use --mode sim"
    share = found.carried.tokens_per_s_asked / found.asked.tokens_per_s
    load = scenario.load
    if load.stages:
        return f"multiply the rates of its stages by {share:.2f}, or use --mode sim"
    if load.rate_per_s is not None:
        return f"--set load.rate_per_s={load.rate_per_s * share:.2g}, or --mode sim"
    slots = max(1, int((load.concurrency or 1) * share))
    processes = f" --set load.processes={slots}" if load.processes > slots else ""
    return f"--set load.concurrency={slots}{processes}, or --mode sim"


def _document(found: Diagnosis, scenario: Scenario, climb: Scenario) -> dict[str, Any]:
    where = environment()
    document: dict[str, Any] = {
        "machine": {key: where[key] for key in ("platform", "python", "cores", "load_average")},
        "fleet": {
            "replicas": len(climb.fleet.names),
            "preset": climb.preset.name,
            "router": climb.routers[0].name,
            "prompt_tokens": _prompt(climb),
            "output_tokens": climb.workload["output_len"],
        },
        "steps": [asdict(step) for step in found.steps],
        "carried": asdict(found.carried) if found.carried else None,
        "bearable": asdict(found.bearable) if found.bearable else None,
        "at_least": found.at_least(found.carried),
        "scenario": None,
    }
    if found.asked is not None:
        document["scenario"] = {
            "name": scenario.name,
            "asks": asdict(found.asked),
            "fits": found.fits,
            "mend": None if found.fits == "well" else mend(found, scenario),
        }
    return document


def _prompt(climb: Scenario) -> int:
    return int(climb.workload["system_prompt_len"]) + int(climb.workload["question_len"])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
