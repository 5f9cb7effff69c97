"""The gate: rules and two runs in, one verdict out, with the reason for every line of it.

A figure that a run cannot vouch for is never judged: an unhealthy, partial or incomparable run is refused before any
rule is looked at. In a simulation every figure is exact for its seed, so a rule is a plain comparison. A wall-clock
figure counts as worse only beyond its tolerance and beyond the noise between repeats; too few repeats or samples are
inconclusive, never a regression. A router that sends nearly everything to one replica fails whatever its latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from reports.comparable import Complaint, complaints, notes
from reports.display import percent, shares, unit, value_text, with_unit
from reports.errors import RuleError
from reports.metrics_table import METRICS, lookup
from reports.repeats import beyond_chance, changes
from reports.rules import OPERATORS, Rule, Rules
from reports.why import flags

if TYPE_CHECKING:
    from reports.run import RunResult

Outcome = Literal["pass", "better", "regression", "inconclusive", "invalid"]
EXIT_CODES = {"pass": 0, "regression": 1, "invalid": 3, "inconclusive": 4}
_EXACT_LIVE = ("requests", "errors", "incomplete")  # what even wall-clock runs must repeat exactly
_SLACK = 1e-9  # figures are rounded to six decimals; a tolerance must not fail on the rounding of a product


@dataclass(frozen=True, slots=True)
class Line:
    """One rule for one router."""

    router: str
    rule: str
    kind: str  # bound, relative, exact, placement
    address: str
    outcome: Outcome
    detail: str  # what was found and what was allowed, in words
    baseline: float | None = None
    current: float | None = None
    change: float | None = None  # relative rules: for the worse, share of the baseline or in the unit
    interval: tuple[float, float] | None = None  # of the change; None where it is exact

    def json(self) -> dict[str, Any]:
        keys = ("router", "rule", "kind", "address", "outcome", "detail", "baseline", "current", "change", "interval")
        return {key: _rounded(getattr(self, key)) for key in keys}


@dataclass(frozen=True, slots=True)
class GateResult:
    outcome: str  # a key of EXIT_CODES
    scenario: str
    mode: str
    seed: int | None
    commit: str | None
    rules: Rules
    lines: tuple[Line, ...] = ()
    complaints: tuple[Complaint, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def code(self) -> str:
        """Why a run cannot be judged, in a word that a program can rely on; else the outcome."""
        return next((complaint.code for complaint in self.complaints if not complaint.forced), self.outcome)

    @property
    def reason(self) -> str:
        """The verdict in one line."""
        standing = [complaint for complaint in self.complaints if not complaint.forced]
        if standing:
            more = f" (and {len(standing) - 1} more)" if len(standing) > 1 else ""
            return f"{standing[0].code}: {standing[0].text}{more}"
        word = self.outcome
        decisive = [line for line in self.lines if line.outcome == word]
        if word == "pass":
            better = sum(line.outcome == "better" for line in self.lines)
            return f"pass: {len(self.lines)} rules hold" + (f", {better} of them for the better" if better else "")
        if not decisive:
            return f"{word}: no rule could be judged, so nothing is known"
        first = decisive[0]
        more = f" (and {len(decisive) - 1} more)" if len(decisive) > 1 else ""
        return f"{word}: {first.router}, {first.rule}: {first.detail}{more}"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "code": self.code,
            "reason": self.reason,
            "scenario": self.scenario,
            "mode": self.mode,
            "seed": self.seed,
            "rules": self.rules.source,
            "complaints": [{"code": one.code, "text": one.text, "forced": one.forced} for one in self.complaints],
            "lines": [line.json() for line in self.lines],
            "notes": list(self.notes),
        }


def gate(current: RunResult, baseline: RunResult | None, rules: Rules, *, force: bool = False) -> GateResult:
    """Judges `current`. Without a baseline only bounds can be judged. `force` overrules that runs differ in what was
    asked of them, never that one is unhealthy."""
    chosen = _chosen(current, rules)
    if baseline is None and any(rule.kind != "bound" for rule in chosen):
        needing = next(rule for rule in chosen if rule.kind != "bound")
        raise RuleError(f"{needing.kind} rule {needing.text!r} needs a baseline: give --baseline, or only bounds")
    found = tuple(complaints(current, baseline, rules.errors_max, force=force))
    result = GateResult(
        "invalid",
        current.name,
        current.mode,
        current.seed,
        current.environment.get("commit"),
        rules,
        complaints=found,
        notes=tuple(notes(current, baseline)),
    )
    if any(not complaint.forced for complaint in found):
        return result
    lines = (*_placement_lines(current, rules), *_lines(current, baseline, chosen, rules))
    outcomes = {line.outcome for line in lines}
    outcome = next((word for word in ("invalid", "regression", "inconclusive") if word in outcomes), "pass")
    return replace(result, outcome=outcome if lines else "invalid", lines=lines)


def _chosen(run: RunResult, rules: Rules) -> list[Rule]:
    """Rules for this scenario and mode; each must be about a router that ran."""
    chosen = [rule for rule in rules.rules if rule.applies_to(run.name, run.mode)]
    for rule in chosen:
        if run.routers and not any(fnmatchcase(name, rule.router) for name in run.routers):
            raise RuleError(
                f"rule {rule.text!r} is about router {rule.router!r} and none of {', '.join(run.routers)} is that: "
                "it would pass for ever; mend the name or remove the rule"
            )
        if rule.kind == "exact" and run.mode != "sim" and rule.address not in _EXACT_LIVE:
            raise RuleError(
                f"exact rule {rule.text!r} cannot hold in a {run.mode} run, where {rule.address} depends on wall time: "
                'put it into a [[rule]] with mode = "sim", or write a relative rule'
            )
    return chosen


def _placement_lines(run: RunResult, rules: Rules) -> Iterator[Line]:
    for flag in flags(run.routers):
        if flag.kind == "degenerate-placement" and not rules.may_degenerate(flag.router, run.name, run.mode):
            share = lookup(run.routers[flag.router], "placement.max_share")
            text = flag.text.removeprefix(f"{flag.router}: ")
            rule = "no degenerate placement"
            yield Line(flag.router, rule, "placement", "placement.max_share", "regression", text, current=share)


def _lines(current: RunResult, baseline: RunResult | None, rules: Sequence[Rule], limits: Rules) -> list[Line]:
    lines: list[Line] = []
    chances: dict[int, float] = {}  # place of a line that chance may explain
    for rule in rules:
        names = [name for name in current.routers if fnmatchcase(name, rule.router)]
        if rule.kind == "bound":
            lines += filter(None, (_bound(rule, name, current, limits) for name in names))
            continue
        assert baseline is not None
        known = [name for name in names if name in baseline.routers]
        if rule.kind == "exact":
            lines += [_exact(rule, name, current, baseline) for name in known]
        elif current.mode == "sim":
            lines += filter(None, (_relative(rule, name, current, baseline) for name in known))
        else:
            for line, chance in _statistical(rule, known, current, baseline, limits):
                if chance is not None:
                    chances[len(lines)] = chance
                lines.append(line)
    certain = dict(zip(chances, beyond_chance(list(chances.values())), strict=True))
    return [_certain(line, certain[place]) if place in certain else line for place, line in enumerate(lines)]


def _certain(line: Line, beyond: bool) -> Line:
    if line.outcome != "regression" or beyond:
        return line
    return replace(line, outcome="inconclusive", detail=f"{line.detail}; the repeats differ too much to tell: add some")


def _bound(rule: Rule, name: str, current: RunResult, limits: Rules) -> Line | None:
    value = lookup(current.routers[name], rule.address)
    if value is None:
        return _unknown(rule, name, "this run")
    kept = OPERATORS[rule.compare](value, rule.value)
    found = f"found {with_unit(rule.address, value)}"
    samples = current.routers[name]["requests"]
    if not kept and current.mode != "sim" and samples < limits.samples_min:
        found += f" from {samples:,} requests, fewer than {limits.samples_min}: too few to tell"
        return Line(name, rule.text, rule.kind, rule.address, "inconclusive", found, current=value)
    return Line(name, rule.text, rule.kind, rule.address, "pass" if kept else "regression", found, current=value)


def _exact(rule: Rule, name: str, current: RunResult, baseline: RunResult) -> Line:
    old, new = baseline.routers[name], current.routers[name]
    if rule.address in METRICS and METRICS[rule.address].kind == "mapping":
        before, after = old.get(rule.address), new.get(rule.address)
        if before is None or after is None:
            return _lost(rule, name, before)
        words = f"{_mapping(rule.address, before)} -> {_mapping(rule.address, after)}"
        same = _filled(before) == _filled(after)
        return Line(
            name,
            rule.text,
            rule.kind,
            rule.address,
            "pass" if same else "regression",
            "the same" if same else f"changed: {words}",
        )
    one, two = lookup(old, rule.address), lookup(new, rule.address)
    if one is None or two is None:
        return _lost(rule, name, one)
    worse = (two - one) if rule.worse == "higher" else (one - two)
    neither = METRICS[rule.address.split(".")[0]].direction == "none"
    outcome: Outcome = "pass" if one == two else "regression" if worse > 0 or neither else "better"
    detail = "the same" if one == two else f"{_moved(rule, one, two)}, allowed none"
    return Line(name, rule.text, rule.kind, rule.address, outcome, detail, one, two, worse)


def _relative(rule: Rule, name: str, current: RunResult, baseline: RunResult) -> Line | None:
    one, two = (lookup(run.routers[name], rule.address) for run in (baseline, current))
    if one is None and two is None:
        return _unknown(rule, name, "either run")
    if one is None or two is None:
        return _lost(rule, name, one)
    change, allowed = _worse(rule, one, two, one), _tolerance(rule, one)
    outcome: Outcome = "regression" if change > allowed + _SLACK else "better" if -change > allowed else "pass"
    detail = f"{_moved(rule, one, two)}, allowed {_allowed(rule)}"
    return Line(name, rule.text, rule.kind, rule.address, outcome, detail, one, two, change)


def _statistical(
    rule: Rule, names: Sequence[str], current: RunResult, baseline: RunResult, limits: Rules
) -> Iterator[tuple[Line, float | None]]:
    pairs = {name: _pairs(rule.address, name, current, baseline) for name in names}
    scale = {name: sum(one for one, _ in each) / len(each) for name, each in pairs.items() if each}
    gaps = {
        name: [_worse(rule, one, two, scale[name]) for one, two in each]
        for name, each in pairs.items()
        if len(each) >= limits.repeats_min
    }
    judged = changes(gaps) if gaps else {}
    for name in names:
        one, two = (lookup(run.routers[name], rule.address) for run in (baseline, current))
        if one is None or two is None:
            line = _unknown(rule, name, "either run") if one is two else _lost(rule, name, one)
            if line is not None:
                yield line, None
            continue
        samples = min(run.routers[name]["requests"] for run in (baseline, current))
        if name not in judged or samples < limits.samples_min:
            few = (
                f"{len(pairs[name])} repeats on both sides, {limits.repeats_min} are needed"
                if name not in judged
                else f"{samples:,} requests, {limits.samples_min} are needed"
            )
            detail = f"{_moved(rule, one, two)}, from too little to tell: {few}"
            yield Line(name, rule.text, rule.kind, rule.address, "inconclusive", detail, one, two), None
            continue
        before = scale[name]
        after = sum(value for _, value in pairs[name]) / len(pairs[name])
        found, allowed = judged[name], _tolerance(rule, before)
        better = -found.worse > allowed and found.high < 0
        outcome: Outcome = "regression" if found.worse > allowed + _SLACK else "better" if better else "pass"
        spread = _spread(rule, found.low, found.high)
        detail = f"{_moved(rule, before, after)}, {spread}, allowed {_allowed(rule)}"
        interval = (found.low, found.high)
        line = Line(name, rule.text, rule.kind, rule.address, outcome, detail, before, after, found.worse, interval)
        yield line, None if found.low == found.high else found.chance  # without any noise there is no chance


def _pairs(address: str, name: str, current: RunResult, baseline: RunResult) -> list[tuple[float, float]]:
    """A figure in the repeats that both runs have, baseline first."""
    sides = [
        {each["repeat"]: lookup(each["metrics"], address) for each in run.repeats if each["router"] == name}
        for run in (baseline, current)
    ]
    both = [(sides[0][repeat], sides[1][repeat]) for repeat in sides[0] if repeat in sides[1]]
    return [(one, two) for one, two in both if one is not None and two is not None]


def _worse(rule: Rule, one: float, two: float, base: float) -> float:
    gap = (two - one) if rule.worse == "higher" else (one - two)
    return gap / abs(base) if rule.percent and base else gap


def _tolerance(rule: Rule, base: float) -> float:
    """A share of 0 is 0: what the baseline did not have at all may not appear."""
    return 0.0 if rule.percent and not base else rule.value


def _unknown(rule: Rule, name: str, where: str) -> Line | None:
    """A default rule says nothing about a figure that nobody has; a user's rule must not pass unseen."""
    if rule.default:
        return None
    text = f"{rule.address} is unknown in {where}, so nothing was checked: remove the rule or make the run tell it"
    return Line(name, rule.text, rule.kind, rule.address, "invalid", text)


def _lost(rule: Rule, name: str, before: object) -> Line:
    where = "the baseline does not know it" if before is None else "this run does not know it any more"
    return Line(name, rule.text, rule.kind, rule.address, "invalid", f"{rule.address}: {where}; save a new baseline")


def _moved(rule: Rule, one: float, two: float) -> str:
    """From, to, and the change in the measure of the rule: a share of the old value, or its own unit."""
    gap = _in_unit(rule, two - one)
    if rule.percent or rule.kind == "exact":
        gap = percent((two - one) / abs(one), signed=True) if one else ""
    return f"{value_text(rule.address, one)} -> {with_unit(rule.address, two)}{f' ({gap})' if gap else ''}"


def _in_unit(rule: Rule, gap: float) -> str:
    """A signed difference with its unit: of two shares it is points, not percent."""
    text = value_text(rule.address, gap)
    word = "points" if unit(rule.address) == "%" else unit(rule.address)
    return f"{'+' if gap > 0 else ''}{text} {word}"


def _spread(rule: Rule, low: float, high: float) -> str:
    """The interval as a signed change of the figure itself."""
    ends = (low, high) if rule.worse == "higher" else (-high, -low)
    if rule.percent:
        return f"95 % from {percent(ends[0], signed=True)} to {percent(ends[1], signed=True)}"
    return f"95 % from {_in_unit(rule, ends[0])} to {_in_unit(rule, ends[1])}"


def _allowed(rule: Rule) -> str:
    sign = "+" if rule.worse == "higher" else "-"
    if rule.percent:
        return f"{sign}{percent(rule.value)}"
    return sign + _in_unit(rule, rule.value).removeprefix("+")


def _mapping(address: str, value: Mapping[str, Any]) -> str:
    if address == "placement":
        return f"{shares(value)} %"
    return ", ".join(f"{key} {value_text(f'{address}.{key}', part)}" for key, part in value.items())


def _filled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in value.items() if part is not None}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) + 0.0
    return [_rounded(part) for part in value] if isinstance(value, tuple) else value
