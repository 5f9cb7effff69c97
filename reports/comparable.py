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
from reports.unfinished import account, lost
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
SHOWN_MAX = 6  # differences of one part of a scenario
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
            if (two := baseline.environment.get(key)) not in (None, one := current.environment.get(key))
        ]
        if other:
            yield f"another machine: {', '.join(other)}"


def _unfit(run: RunResult, name: str, errors_max: float) -> Iterator[Complaint]:
    if run.status != "complete":
        yield Complaint("partial", f"{name} is {run.status}, not complete: run it to its end")
    for router, metrics in run.routers.items():
        asked = metrics["requests"]
        failed = lost(metrics)
        if not asked or failed == asked:
            yield Complaint("nothing-completed", f"{name}: no request of {router} completed: see logs/ of that run")
        elif failed > errors_max * asked:
            yield Complaint(
                "errors-above-bound",
                f"{name}: {router}: {account(metrics)}, {percent(failed / asked)} where {percent(errors_max)} is "
                "allowed, and latency over the rest would flatter it: see error_class in its rows",
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


def different(current: RunResult, baseline: RunResult, other: str = "the baseline") -> Iterator[tuple[str, str]]:
    """Why two runs are not the same experiment: a code and a sentence each, in which `other` stands for the second."""
    if current.mode != baseline.mode:
        yield "other-mode", f"this run is {current.mode} and {other} {baseline.mode}: compare runs of one mode"
    if current.seed != baseline.seed:
        yield "other-seed", f"seed {current.seed} where {other} has {baseline.seed}: the sessions are others"
    held = _held(current, baseline)
    for part, code in ASKED.items():
        changed = list(_changed(current.scenario.get(part), baseline.scenario.get(part), part, other))
        if changed:
            text = "; ".join(changed[:SHOWN_MAX])
            more = f"; and {len(changed) - SHOWN_MAX} more" if len(changed) > SHOWN_MAX else ""
            yield code, f"{text}{more}{held if part in ('workload', 'load') else ''}"
            held = "" if part in ("workload", "load") else held  # told once
    counts = [len({each["repeat"] for each in run.repeats}) for run in (baseline, current)]
    if current.mode == "sim" and counts[0] != counts[1] and current.routers:
        yield "other-repeats", f"{counts[1]} repeats where {other} has {counts[0]}: other sessions are pooled"


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


def _changed(now: Any, before: Any, path: str, other: str, *, options: bool = True) -> Iterator[str]:
    """What differs. An option (a key of the part itself) that only one side knows came with another version, and two
    kinds of a thing have different options anyway."""
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        if now.get("kind") != before.get("kind"):
            yield from _changed(now.get("kind"), before.get("kind"), f"{path}.kind", other)
            return
        for key in dict.fromkeys((*before, *now)):
            if not options or (key in now and key in before):
                yield from _changed(now.get(key), before.get(key), f"{path}.{key}", other, options=False)
    elif _plain(now) != _plain(before) and (now or before):
        yield f"{path} is {_shown(now)} where {other} has {_shown(before)}"


def _known_to_one(now: Any, before: Any, path: str) -> Iterator[str]:
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        for key in dict.fromkeys((*before, *now)):
            value = now.get(key, before.get(key))
            if (key in now) != (key in before) and value:
                yield f"{path}.{key} = {_shown(value)}"


def _shown(value: Any) -> str:
    """A value of a scenario as a person would say it: `crash r1 at 10 s`, `{dist uniform, low 2, high 5}`, `none`."""
    if isinstance(value, Mapping):
        if "do" in value and "at_s" in value:
            event = " ".join(str(part) for part in (value["do"], value.get("replica")) if part)
            rest = {
                key: part for key, part in value.items() if key not in ("do", "replica", "at_s") and part is not None
            }
            return f"{event} at {_shown(value['at_s'])} s" + "".join(f", {key} {_shown(rest[key])}" for key in rest)
        return "{" + ", ".join(f"{key} {_shown(part)}" for key, part in value.items() if part is not None) + "}"
    if isinstance(value, list | tuple):
        return "; ".join(map(_shown, value)) if value else "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"{value:.12g}" if isinstance(value, float) else str(value)


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
