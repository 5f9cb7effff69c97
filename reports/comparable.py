"""Whether a run may be judged at all, and against this baseline: what speaks against it, each with a code of its own.

A run that is partial, unhealthy, warm or full of errors says nothing about a router. Two runs that asked for different
things say nothing about each other; that one a user may overrule, since he may know better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reports.display import number, percent
from reports.health import UNACCOUNTED, WARM
from reports.why import flags

if TYPE_CHECKING:
    from reports.run import RunResult

# Parts of a scenario that say what was asked; its name, words, routers, repeats and bounds do not.
ASKED = {
    "workload": "other-workload",
    "load": "other-load",
    "engine": "other-engine",
    "fleet": "other-fleet",
    "faults": "other-faults",
    "churn": "other-churn",
}
_TOLD = {WARM: "warm-start", UNACCOUNTED: "missing-records"}  # reasons of health that have a code of their own
RECORDS_SHARE_MIN = 0.95  # of the baseline's requests; below, records are missing


@dataclass(frozen=True, slots=True)
class Complaint:
    code: str
    text: str
    forced: bool = False  # overruled by the user


def complaints(
    current: RunResult, baseline: RunResult | None, errors_max: float, *, force: bool = False
) -> Iterator[Complaint]:
    yield from _unfit(current, "this run", errors_max)
    if baseline is None:
        return
    yield from _unfit(baseline, "the baseline", errors_max)
    apart = list(different(current, baseline))
    yield from (
        Complaint(code, f"{text}: run the same scenario, or save a new baseline", force) for code, text in apart
    )
    gone = [name for name in baseline.routers if name not in current.routers]
    if gone and current.routers:
        text = f"the baseline has {', '.join(gone)} and this run has not: run them too"
        yield Complaint("router-missing", text, force)
    if not apart:
        yield from _missing(current, baseline)


def notes(current: RunResult, baseline: RunResult | None) -> Iterator[str]:
    """What a reader should know although it decides nothing."""
    for run, name in ((current, "this run"), (baseline, "the baseline")):
        if run is not None and run.health.get("verdict") == "degraded":
            yield f"{name} is degraded: {'; '.join(run.health.get('reasons', ()))}"
    for flag in flags(current.routers):
        yield flag.text
    if baseline is None:
        return
    unknown = [
        found
        for part in ASKED
        for found in _known_to_one(current.scenario.get(part), baseline.scenario.get(part), part)
    ]
    if unknown and not any(different(current, baseline)):
        yield f"only one side knows {', '.join(unknown[:4])}: it was made by another version"
    new = [name for name in current.routers if name not in baseline.routers]
    if new:
        yield f"not in the baseline, so only bounds hold for {', '.join(new)}"
    if current.mode == "sim" and not any(different(current, baseline)):
        moved = [
            name
            for name, metrics in current.routers.items()
            if name in baseline.routers and metrics.get("placement") != baseline.routers[name].get("placement")
        ]
        if moved:
            yield f"placement is not what it was in the baseline: {', '.join(moved)}"
    if current.mode == "live":
        other = [
            f"{key} {one} where the baseline has {two}"
            for key in ("platform", "cores", "python")
            if (one := current.environment.get(key)) != (two := baseline.environment.get(key))
        ]
        if other:
            yield f"another machine: {', '.join(other)}"


def _unfit(run: RunResult, name: str, errors_max: float) -> Iterator[Complaint]:
    if run.status != "complete":
        yield Complaint("partial", f"{name} is {run.status}, not complete: run it to its end")
    for router, metrics in run.routers.items():
        asked = metrics["requests"]
        failed = metrics["errors"] + metrics["incomplete"]
        if not asked or failed == asked:
            yield Complaint("nothing-completed", f"{name}: no request of {router} completed: see logs/ of that run")
        elif failed > errors_max * asked:
            yield Complaint(
                "errors-above-bound",
                f"{name}: {failed:,} of {asked:,} requests of {router} failed ({percent(failed / asked)}, allowed "
                f"{percent(errors_max)}), and latency over the rest would flatter it: see error_class in its rows",
            )
    reasons = list(run.health.get("reasons", ()))
    if run.health.get("verdict") not in ("ok", "degraded"):
        why = reasons[0] if reasons else "no reason is given"
        code = next((code for words, code in _TOLD.items() if any(words in reason for reason in reasons)), "")
        yield Complaint(code or "invalid-health", f"{name} is invalid: {why}")
    if run.status == "complete" and not run.routers:
        yield Complaint("no-figures", f"{name} holds no figures: run it again")
    for flag in flags(run.routers):
        if flag.kind == "warm-start":
            yield Complaint("warm-start", f"{name}: {flag.text}; start every arm with empty caches")


def different(current: RunResult, baseline: RunResult) -> Iterator[tuple[str, str]]:
    """Why two runs are not the same experiment: a code and a sentence each."""
    if current.mode != baseline.mode:
        yield "other-mode", f"this run is {current.mode} and the baseline {baseline.mode}: compare runs of one mode"
    if current.seed != baseline.seed:
        yield "other-seed", f"seed {current.seed} where the baseline has {baseline.seed}: the sessions are others"
    for part, code in ASKED.items():
        changed = list(_changed(current.scenario.get(part), baseline.scenario.get(part), part))
        if changed:
            text = "; ".join(changed[:4])
            held = _held(current, baseline) if part in ("workload", "load") else ""
            yield code, f"{text}{held}"
    counts = [len({each["repeat"] for each in run.repeats}) for run in (baseline, current)]
    if current.mode == "sim" and counts[0] != counts[1] and current.routers:
        yield "other-repeats", f"{counts[1]} repeats where the baseline has {counts[0]}: other sessions are pooled"


def _held(current: RunResult, baseline: RunResult) -> str:
    """What was really in flight says more than what was configured."""
    means = [
        [metrics["in_flight_mean"] for metrics in run.routers.values() if metrics.get("in_flight_mean") is not None]
        for run in (baseline, current)
    ]
    if not all(means):
        return ""
    before, now = (number(sum(each) / len(each), 0) for each in means)
    return f"; load differs: about {before} against {now} in flight" if before != now else ""


def _changed(now: Any, before: Any, path: str, *, options: bool = True) -> Iterator[str]:
    """What differs. An option (a key of the part itself) that only one side knows came with another version."""
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        for key in dict.fromkeys((*before, *now)):
            if not options or (key in now and key in before):
                yield from _changed(now.get(key), before.get(key), f"{path}.{key}", options=False)
    elif _plain(now) != _plain(before) and (now or before):
        yield f"{path} {before} there, {now} here"


def _known_to_one(now: Any, before: Any, path: str) -> Iterator[str]:
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        for key in dict.fromkeys((*before, *now)):
            value = now.get(key, before.get(key))
            if (key in now) != (key in before) and value:
                yield f"{path}.{key} = {value}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _missing(current: RunResult, baseline: RunResult) -> Iterator[Complaint]:
    for router in current.routers:
        before, now = (_per_repeat(run, router) for run in (baseline, current))
        if before and now is not None and now < RECORDS_SHARE_MIN * before:
            yield Complaint(
                "missing-records",
                f"{router} has {number(now, 0)} requests a repeat where the baseline has {number(before, 0)}: "
                "the run was cut, or rows were lost; run it again",
            )


def _per_repeat(run: RunResult, router: str) -> float | None:
    counts = [each["metrics"]["requests"] for each in run.repeats if each["router"] == router]
    return sum(counts) / len(counts) if counts else None
