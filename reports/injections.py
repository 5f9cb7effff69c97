"""Whether the gate would notice: a known fault is put into a run, and the gate must refuse the copy.

Each rule gets a fault of its own, twice as bad as it allows, so a rule that cannot catch anything (too few repeats, a
figure nobody knows) is found before it is relied on. The untouched run is judged against itself first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from reports.display import with_unit
from reports.gate import GateResult, gate
from reports.metrics_table import lookup
from reports.rules import Rule, Rules

if TYPE_CHECKING:
    from reports.run import RunResult

_FAULT = 2.0  # times the tolerance


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault, what the gate must say to it, and what it said."""

    fault: str
    expected: str
    found: str
    reason: str

    @property
    def caught(self) -> bool:
        return self.found == self.expected


def self_test(run: RunResult, rules: Rules) -> list[Injection]:
    """The untouched run first, which must not be called worse; then one fault a rule and router, and three at large."""
    same = gate(run, run, rules)
    found = [_of("nothing changed", "pass", same, same.outcome)]
    if any(not complaint.forced for complaint in same.complaints):
        return found  # a run that cannot be judged proves nothing about rules
    for rule in rules.rules:
        if rule.applies_to(run.name, run.mode):
            names = [name for name in run.routers if fnmatchcase(name, rule.router)]
            found += [injection for name in names for injection in _rule_fault(run, rules, rule, name)]
    first = next(iter(run.routers))
    placement = run.routers[first].get("placement") or {}
    if len(placement) > 1 and not rules.may_degenerate(first, run.name, run.mode):
        spoilt = {name: sum(placement.values()) if not place else 0 for place, name in enumerate(placement)}
        result = gate(_with(run, first, "placement", spoilt), run, rules)
        found.append(_of(f"{first}: everything on one replica", "regression", result, result.outcome))
    asked = run.routers[first]["requests"]
    broken = gate(_with(run, first, "errors", int(rules.errors_max * asked) + 1), run, rules)
    found.append(_of(f"{first}: errors above the bound", "invalid", broken, broken.outcome))
    workload = {**run.scenario.get("workload", {}), "kind": "another"}
    other = gate(replace(run, scenario={**run.scenario, "workload": workload}), run, rules)
    found.append(_of("another workload", "invalid", other, other.outcome))
    return found


def _rule_fault(run: RunResult, rules: Rules, rule: Rule, name: str) -> Iterator[Injection]:
    if rule.address == "placement" or rule.address == "load_cv":
        value = run.routers[name].get(rule.address)
        if value:
            spoilt: Any = {key: (part or 0) + 1 + place for place, (key, part) in enumerate(value.items())}
            yield _judged(
                run, rules, rule, name, _with(run, name, rule.address, spoilt), f"{name}: {rule.text} changed"
            )
        return
    value = lookup(run.routers[name], rule.address)
    if value is None:
        return
    if rule.kind == "bound":
        spoilt = _beyond(rule)
    else:
        step = _FAULT * rule.value * (abs(value) if rule.percent else 1) or 1
        spoilt = value + step if rule.worse == "higher" else value - step
    share = (spoilt - value) if rule.kind == "bound" else None
    copy = (
        _with(run, name, rule.address, spoilt)
        if share is not None
        else _moved(run, name, rule.address, 1 + (spoilt - value) / value if value else None, spoilt)
    )
    fault = f"{name}: {rule.address} {with_unit(rule.address, value)} -> {with_unit(rule.address, spoilt)}"
    yield _judged(run, rules, rule, name, copy, fault)


def _judged(run: RunResult, rules: Rules, rule: Rule, name: str, copy: RunResult, fault: str) -> Injection:
    result = gate(copy, run, rules)
    line = next((line for line in result.lines if line.router == name and line.rule == rule.text), None)
    return _of(fault, "regression", result, line.outcome if line else result.outcome)


def _of(fault: str, expected: str, result: GateResult, found: str) -> Injection:
    return Injection(fault, expected, "pass" if found == "better" else found, result.reason)


def _beyond(rule: Rule) -> float:
    """A value that breaks the bound."""
    size = max(abs(rule.value), 1.0)
    return {"<": rule.value + size, ">": rule.value - size}.get(
        rule.compare[0], rule.value + (rule.compare != "!=") * size
    )


def _with(run: RunResult, router: str, address: str, value: Any) -> RunResult:
    """A copy with one figure replaced, over all repeats and in each."""
    routers = {
        name: _set(metrics, address, value) if name == router else metrics for name, metrics in run.routers.items()
    }
    repeats = [
        {**each, "metrics": _set(each["metrics"], address, value)} if each["router"] == router else each
        for each in run.repeats
    ]
    return replace(run, routers=routers, repeats=repeats)


def _moved(run: RunResult, router: str, address: str, factor: float | None, value: float) -> RunResult:
    """A copy with one figure moved by a factor in each repeat, which keeps the noise between them."""
    copy = _with(run, router, address, value)
    if factor is None:
        return copy
    repeats = []
    for each in run.repeats:
        old = lookup(each["metrics"], address)
        moved = each["router"] == router and old is not None
        repeats.append({**each, "metrics": _set(each["metrics"], address, old * factor)} if moved and old else each)
    return replace(copy, repeats=repeats)


def _set(metrics: Mapping[str, Any], address: str, value: Any) -> dict[str, Any]:
    name, _, key = address.partition(".")
    if not key:
        return {**metrics, name: value}
    if name == "placement":
        return {**metrics, name: _placement_with(metrics[name], key, value)}
    return {**metrics, name: {**(metrics.get(name) or {}), key: value}}


def _placement_with(placement: Mapping[str, int], key: str, value: float) -> dict[str, float]:
    if key != "max_share":
        return {**placement, key: value}
    first, total = next(iter(placement)), sum(placement.values())
    rest = max(len(placement) - 1, 1)
    return {name: total * (value if name == first else (1 - value) / rest) for name in placement}
