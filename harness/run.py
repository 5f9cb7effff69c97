"""A run: all arms of a scenario in one mode, from an empty folder to its files.

The folder holds a readable `run.json` from the first second on (`status` says how far it came), the rows of what was
measured survive whatever ends the run, and the reports are made from the rows alone.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from harness.arm import Arm, ArmRows, arms_of
from harness.census import census
from harness.churn import churn_notes
from harness.environment import environment
from harness.errors import HarnessError, OutputError, PolicyError, UsageError
from harness.expect import judge
from harness.live import run_live_arm
from harness.load_health import load_notes
from harness.mode_check import require_live, require_simulable
from harness.parity import check_parity
from harness.progress import Reporter, reporter
from harness.scenario import Scenario
from harness.signals import Interruption
from harness.sim import Simulation
from harness.unmeasured import clear, holds_no_measurement
from reports import HealthFacts, RunResult, console, finish_run, mode_comparison, start_run, terminal_table
from routers import RoutersError, told
from routers.deciding import PolicyWatch

Mode = Literal["live", "sim"]
EXIT_OK, EXIT_UNEXPECTED, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 3, 130
"""Exit codes of `routebench run`; 2 is usage or start failure, raised as an error."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
"""What a disk says that takes no more."""


def run_command(scenario: Scenario, *, mode: str, out: Path | None, as_json: bool, quiet: bool) -> int:
    """What `routebench run` does; returns its exit code."""
    say = console()
    if mode != "live":
        require_simulable(scenario)
    if mode != "sim":
        require_live(scenario)
    folder = prepare_folder(out, scenario.name, datetime.now(UTC))
    modes: list[Mode] = ["live", "sim"] if mode == "both" else ["sim" if mode == "sim" else "live"]
    outcomes: list[Outcome] = []
    for each in modes:
        place = folder / each if mode == "both" else folder
        with _on_disk(folder, mode):
            place.mkdir(exist_ok=True)
        outcomes.append(run_mode(scenario, each, place, quiet=quiet or as_json))
        if outcomes[-1].interrupted or outcomes[-1].lost:
            break
    results = [outcome.result for outcome in outcomes]
    if as_json:
        for result in results:
            print((result.folder / "run.json").read_text("utf-8"), end="")
    else:
        for result in results:
            say.print(terminal_table(result))
        if len(results) == 2:
            say.print(mode_comparison(*results))
        say.print(f"files: {folder}  (open {' and '.join(str(result.folder / 'report.html') for result in results)})")
    findings = [
        finding
        for outcome in outcomes
        if outcome.result.status == "complete"
        for finding in judge(scenario.expect, outcome.result.routers)
    ]
    for finding in findings:
        print(finding, file=sys.stderr if as_json else sys.stdout)
    for lost in (lost for outcome in outcomes for lost in outcome.lost):
        print(
            f"error: {lost}; the run stopped there and what was measured is kept in {folder}: run it again",
            file=sys.stderr,
        )
    if any(outcome.interrupted for outcome in outcomes):
        for during in (outcome.during for outcome in outcomes if outcome.during):
            print(during, file=sys.stderr)
        print(f"interrupted: what was measured is kept in {folder}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if any(result.health["verdict"] == "invalid" for result in results):
        return EXIT_INVALID
    return EXIT_OK if all(finding.met for finding in findings) else EXIT_UNEXPECTED


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run, and what ended it early."""

    result: RunResult
    interrupted: bool
    lost: list[str]
    """Processes that ended by themselves, a line each."""
    during: str = ""
    """What went on for too long when the run was interrupted."""


def run_mode(scenario: Scenario, mode: Mode, folder: Path, *, quiet: bool = True) -> Outcome:
    """Runs every arm in one mode and writes the folder, also when Ctrl-C or a lost process ends it early.

    Raises StartError if an arm did not come up; `run.json` then says `partial`. Raises OutputError where the disk takes
    no more.
    """
    started = time.monotonic()
    header: dict[str, Any] = {
        "scenario": scenario.resolved(),
        "mode": mode,
        "seed": scenario.seed,
        "environment": environment(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with _on_disk(folder, mode):
        start_run(folder, header)
    during = ""
    done: list[tuple[Arm, ArmRows]] = []
    lost: list[str] = []
    complete = False
    with Interruption() as interruption:
        try:
            with reporter(Console(stderr=True), quiet=quiet) as progress:
                if mode == "live":
                    header["environment"]["parity"] = _parity(scenario, folder / "logs" / "parity", progress)
                for arm, rows in _run_arms(scenario, mode, folder, progress, interruption):
                    done.append((arm, rows))
                    lost += rows.facts.get("lost", [])
                    # a comparison is as good as its worst arm: nothing after a lost process could save it
                    if lost or interruption.asked:
                        break
                else:
                    complete = True
                progress.phase("writing reports")
        except KeyboardInterrupt as interrupted:
            complete, during = False, str(interrupted)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise _not_written(folder, mode, error) from error
        finally:  # also after an error: what was measured until then is written before it goes on
            with interruption.calm():
                header["wall_s"] = round(time.monotonic() - started, 3)
                header["status"] = "complete" if complete else "partial"
                if mode == "live":
                    header["environment"]["cpu_s"] = {arm.label: rows.facts["cpu_s"] for arm, rows in done}
                with _on_disk(folder, mode):
                    result = write_results(scenario, folder, header, done)
        return Outcome(result, interruption.asked, lost, during)


@contextmanager
def _on_disk(folder: Path, mode: str) -> Iterator[None]:
    """Raises OutputError where the disk does not take what is written in this block."""
    try:
        yield
    except OSError as error:
        raise _not_written(folder, mode, error) from error


def _not_written(folder: Path, mode: str, error: OSError) -> OutputError:
    kept = mode != "sim" and (folder / "logs").exists()
    logs = f"; what the processes wrote themselves is in {folder / 'logs'}" if kept else ""
    return OutputError(
        f"the results could not be written to {folder}: {error.strerror or error}; make room or name another "
        f"folder with --out{logs}"
    )


def _parity(scenario: Scenario, folder: Path, progress: Reporter) -> list[dict[str, Any]]:
    """Whether routers and engines speak of the same blocks; a mismatch is said before anything is measured."""
    found = check_parity(scenario, folder, progress.phase)
    for one in found:
        if one.agrees is False:
            progress.warn(one.said)
    return [one.to_json() for one in found]


def _run_arms(
    scenario: Scenario, mode: Mode, folder: Path, progress: Reporter, interruption: Interruption
) -> Iterator[tuple[Arm, ArmRows]]:
    arms = arms_of(scenario)
    totals: dict[int, int] = {}
    for number, arm in enumerate(arms, 1):
        total = totals.setdefault(arm.repeat, census(scenario, arm.workload_seed).requests)
        progress.arm(number, len(arms), arm.router.name, total)
        if mode == "sim":
            progress.phase("simulating")
            yield arm, _simulate(arm, progress, interruption)
        else:
            yield (
                arm,
                run_live_arm(
                    arm,
                    folder / "logs" / arm.label,
                    interruption=interruption,
                    on_phase=progress.phase,
                    on_done=progress.done,
                    on_warn=progress.warn,
                ),
            )


def _simulate(arm: Arm, progress: Reporter, interruption: Interruption) -> ArmRows:
    """One arm in virtual time. Raises PolicyError, with the place, where a policy's own code gave up."""
    label = f"router {arm.router.name!r}"
    watch = PolicyWatch(lambda said: progress.warn(f"{label}: {said}"))
    try:
        with watch:
            return Simulation(arm, on_done=progress.done).run()
    except HarnessError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and interruption.asked:
            raise KeyboardInterrupt(f"{label}: {watch.stuck}" if watch.stuck else "") from error
        file = arm.router.policy_name.rpartition(":")[0] if arm.router.of_a_file else None
        if file is None and not isinstance(error, RoutersError):
            raise
        raise PolicyError(f"{label}: {told(error, file)}: its policy's code must change") from error


def write_results(
    scenario: Scenario, folder: Path, header: dict[str, Any], done: list[tuple[Arm, ArmRows]]
) -> RunResult:
    """Makes the run's files from the rows of its arms."""
    return finish_run(
        folder,
        header,
        [row for _, rows in done for row in rows.requests],
        [sample for _, rows in done for sample in rows.fleet],
        routers=[entry.name for entry in scenario.routers],
        ceilings={
            (arm.router.name, arm.repeat): (rows.ceiling_cached_tokens, None)
            for arm, rows in done
            if rows.ceiling_cached_tokens is not None
        },
        replicas=scenario.replica_names,
        router_samples=[sample for _, rows in done for sample in rows.router],
        distinct_prompts={
            (arm.router.name, arm.repeat): rows.distinct_prompts
            for arm, rows in done
            if rows.distinct_prompts is not None
        },
        facts=health_facts(scenario, header["mode"], done, header["environment"].get("parity", ())),
        churn=[
            {"router": arm.router.name, "repeat": arm.repeat, **line}
            for arm, rows in done
            for line in rows.facts.get("churn", ())
        ],
        reports=bool(done),  # a run that did not start has nothing to show but its error
    )


def health_facts(
    scenario: Scenario, mode: Mode, done: list[tuple[Arm, ArmRows]], parity: Sequence[Mapping[str, Any]] = ()
) -> HealthFacts:
    """What the rows cannot tell of a run's health, gathered over its arms."""
    seeds = [arm.workload_seed for arm in arms_of(scenario)]
    per_seed = {seed: census(scenario, seed).requests for seed in set(seeds)}
    limited = any(rows.facts.get("limited") for _, rows in done)
    asked = None if limited else sum(per_seed[seed] for seed in seeds)
    notes = tuple(note for arm, rows in done for note in load_notes(arm, rows.requests, rows.facts, rows.fleet))
    notes += tuple(
        note
        for arm, rows in done
        for note in churn_notes(arm.label, rows.facts.get("churn", ()), last_end_s(rows.requests))
    )
    notes += tuple(said for _, rows in done for said in rows.facts.get("silent", ()))
    notes += tuple(one["said"] for one in parity if one["agrees"] is False)
    load: dict[str, Any] = {
        "asked_requests": asked,
        "notes": notes,
    }
    if mode == "sim":
        return HealthFacts(**load)
    facts = [(arm, rows.facts) for arm, rows in done]
    return HealthFacts(
        **load,
        cpu_warnings=tuple(w for arm, fact in facts for w in load_warnings(arm, fact)),
        lost_processes=tuple(f"{arm.label}: {lost}" for arm, fact in facts for lost in fact["lost"]),
        warm_arms={arm.label: fact["cached_blocks"] for arm, fact in facts if fact.get("cached_blocks")},
        unverified_arms=tuple(arm.label for arm, fact in facts if fact.get("cached_blocks") is None),
        checked_answers=sum(fact.get("answers_checked", 0) for _, fact in facts),
        wrong_answers=sum(fact.get("answers_wrong", 0) for _, fact in facts),
    )


def last_end_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """When the last request of an arm ended, on the rows' axis; 0 when none did."""
    return max((row["end_us"] for row in rows if row.get("end_us") is not None), default=0) / 1e6


def load_warnings(arm: Arm, facts: dict[str, Any]) -> list[str]:
    """The load generator's own warnings of one arm."""
    return [
        f"{arm.label}: {event.get('message') or 'CPU usage above 90 %'}"
        for event in facts.get("load_events", ())
        if event.get("event") == "cpu_warning"
    ]


def prepare_folder(out: Path | None, name: str, now: datetime) -> Path:
    """The folder of a run: the given one, which must be empty, new or of a run that never began, or
    `results/<name>-<time>`."""
    if out is None:
        base = Path("results") / f"{name}-{now.astimezone():%Y%m%d-%H%M%S}"
        out, n = base, 1
        while out.exists():
            n += 1
            out = base.with_name(f"{base.name}-{n}")
    try:
        if out.is_dir() and holds_no_measurement(out):
            clear(out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(
                f"--out {out} is not an empty folder, and a run never writes over another: "
                "name a new folder or remove this one"
            )
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--out {str(out)[:80]!r} cannot be made: {why}; name a folder you may write to") from error
    return out
