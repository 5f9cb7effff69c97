"""Rules of the gate: what must hold for a run, read from TOML or given by default.

Three kinds. A bound is absolute and in k6's grammar, short (`ttft_ms = ["p(99)<500"]`) or long. A relative rule
compares with the baseline in pytest-benchmark's style (`ttft_ms:p99:+5%`). An exact rule allows no change for the worse
at all, and none whatever where neither way is better (`placement`). A name that no metric has is an error: a rule that
matches nothing would pass for ever. Values are in the unit of the metric's table; shares count from 0 to 1.
"""

from __future__ import annotations

import difflib
import operator
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from reports.display import number, unit
from reports.errors import RuleError
from reports.metric import PERCENTILES
from reports.metrics_table import METRICS, direction_of, metric_of

ERROR_SHARE_MAX = 0.01  # as health's bound for `degraded`: latency over the survivors may flatter
REPEATS_MIN = 3  # of a wall-clock figure, on both sides
SAMPLES_MIN = 100  # requests behind one cell

Kind = Literal["bound", "relative", "exact"]

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
}
_BOUND = re.compile(r"\s*([a-z_]+(?:\(\s*[0-9.]+\s*\))?)\s*(<=|>=|===|==|!=|<|>)\s*(-?[0-9][0-9_.eE+-]*)\s*")
_RELATIVE = re.compile(
    r"\s*(?P<address>[\w.:-]+?)\s*:\s*(?P<sign>[+-]?)\s*(?P<size>[0-9.]+)\s*(?P<unit>%|[a-zA-Z/]*)\s*"
)
_AGGREGATIONS = {"avg": "mean", "med": "p50", "max": "max", "count": "count", "mean": "mean"}
_WHOLE = ("placement", "load_cv")  # metrics that an exact rule takes as a whole
FILE_KEYS = ("errors_max", "repeats_min", "samples_min", "bounds", "relative", "exact", "rule")
THRESHOLD_KEYS = ("threshold", "abortOnFail", "delayAbortEval")  # the last is of use to an abort only
RULE_KEYS = ("router", "scenario", "mode", "bounds", "relative", "exact", "allow_degenerate_placement")


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold; `router`, `scenario` and `mode` are patterns such as `dynamo-*`."""

    text: str  # as a user would write it
    kind: Kind
    address: str
    compare: str = ""  # bounds: an operator
    value: float = 0.0  # bounds: the bound; relative: the tolerance, never negative
    percent: bool = False  # the tolerance is a share of the baseline, else in the metric's unit
    worse: Literal["higher", "lower"] = "higher"
    router: str = "*"
    scenario: str = "*"
    mode: str = "*"
    default: bool = False  # a default rule is silent about a figure that nobody knows

    def applies_to(self, scenario: str, mode: str) -> bool:
        return fnmatchcase(scenario, self.scenario) and fnmatchcase(mode, self.mode)


@dataclass(frozen=True, slots=True)
class Rules:
    rules: tuple[Rule, ...]
    source: str  # "default rules" or the file
    errors_max: float = ERROR_SHARE_MAX
    repeats_min: int = REPEATS_MIN
    samples_min: int = SAMPLES_MIN
    degenerate_allowed: tuple[tuple[str, str, str], ...] = ()  # router, scenario, mode patterns

    def may_degenerate(self, router: str, scenario: str, mode: str) -> bool:
        return any(
            fnmatchcase(router, one) and fnmatchcase(scenario, two) and fnmatchcase(mode, three)
            for one, two, three in self.degenerate_allowed
        )


DEFAULT_RELATIVE = (
    "step_makespan_ms:p50:+5%",
    "group_completion_ms:p90:+5%",
    "session_e2e_ms:p99:+10%",
    "ttft_ms:mean:+5%",  # a mean moves with every request, so it shows a small change before a median does
    "ttft_ms:p99:+10%",
    "tpot_ms:mean:+5%",
    "tpot_ms:p99:+10%",
    "output_tokens_per_s:-5%",
    "hit_rate:-2points",
    "preemptions:+10%",
    "slo_attainment:-2points",
)


def default_rules() -> Rules:
    """What holds without a file: nothing that a user waits for, and no cause of it, gets noticeably worse."""
    return Rules(tuple(relative_rule(text, default=True) for text in DEFAULT_RELATIVE), "default rules")


def read_rules(path: Path | str) -> Rules:
    """Rules of a TOML file. Keys at the top hold for every router; a `[[rule]]` narrows them down."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"{path}: cannot be read ({error}): give a file of rules in TOML") from error
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{path}: not TOML ({error}): mend this line") from error
    return rules_of(document, str(path))


def rules_of(document: Mapping[str, Any], source: str) -> Rules:
    _known(document, FILE_KEYS, source)
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RuleError(f"{source}: rule must be a list of tables: write [[rule]]")
    rules = list(_rules_of_table({key: document[key] for key in RULE_KEYS if key in document}, source))
    allowed = []
    for table in tables:
        _known(table, RULE_KEYS, f"{source}, [[rule]]")
        rules += _rules_of_table(table, f"{source}, [[rule]]")
        if _flag(table, "allow_degenerate_placement", source):
            allowed.append(_scope(table, source))
    if not rules and not allowed:
        raise RuleError(f"{source}: holds no rule, so it would pass anything: add bounds, relative or exact")
    return Rules(
        tuple(rules),
        source,
        _share(document.get("errors_max", ERROR_SHARE_MAX), source),
        _count(document, "repeats_min", REPEATS_MIN, source),
        _count(document, "samples_min", SAMPLES_MIN, source),
        tuple(allowed),
    )


def _rules_of_table(table: Mapping[str, Any], source: str) -> list[Rule]:
    scope: dict[str, Any] = dict(zip(("router", "scenario", "mode"), _scope(table, source), strict=True))
    bounds = table.get("bounds", {})
    if not isinstance(bounds, dict):
        raise RuleError(f'{source}: bounds must be a table such as {{ ttft_ms = ["p(99)<500"] }}')
    rules = []
    for name, expressions in bounds.items():
        for address, text in _bound_texts(name, expressions, source):
            rules.append(bound_rule(address, text, **scope))
    rules += [relative_rule(text, **scope) for text in _texts(table, "relative", source)]
    rules += [exact_rule(text, **scope) for text in _texts(table, "exact", source)]
    return rules


def _bound_texts(name: str, expressions: Any, source: str) -> list[tuple[str, str]]:
    """A list of expressions, one alone, or a table of parts (`load_cv.decode_blocks` without quotes is one)."""
    if isinstance(expressions, dict) and "threshold" not in expressions:
        if name not in METRICS:
            raise RuleError(f'{source}: bounds.{name} is a table: write expressions such as ["p(99)<500"]')
        return [found for key, part in expressions.items() for found in _bound_texts(f"{name}.{key}", part, source)]
    each = expressions if isinstance(expressions, list) else [expressions]
    if not each or not all(isinstance(one, str | dict) for one in each):
        raise RuleError(f'{source}: bounds.{name} must be a list of expressions such as ["p(99)<500"]')
    return [(name, one if isinstance(one, str) else _threshold(name, one, source)) for one in each]


def _threshold(name: str, table: Mapping[str, Any], source: str) -> str:
    """k6's long form, `{ threshold = "p(99)<500", abortOnFail = false }`. What it says of aborting cannot be done."""
    _known(table, THRESHOLD_KEYS, f"{source}, bounds.{name}")
    text = table.get("threshold")
    if not isinstance(text, str):
        raise RuleError(f'{source}: bounds.{name}: threshold = {text!r}: write an expression such as "p(99)<500"')
    if _flag(table, "abortOnFail", f"{source}, bounds.{name}"):
        raise RuleError(
            f"{source}: bounds.{name}: abortOnFail = true: a run is over when the gate judges it, so nothing can be "
            "aborted: leave it out; the exit code 1 stops the job"
        )
    return text


def bound_rule(name: str, expression: str, **scope: Any) -> Rule:
    """`ttft_ms` and `p(99)<500`, `slo_attainment` and `rate>0.99`, `load_cv.decode_blocks` and `value<0.5`."""
    text = f"{name}: {expression.strip()}"
    found = _BOUND.fullmatch(expression)
    if not found:
        raise RuleError(f"bound {text!r} is not understood: write aggregation, operator and number, such as p(99)<500")
    aggregation, compare, value = found.groups()
    try:
        bound = float(value.replace("_", ""))
    except ValueError as error:
        raise RuleError(f"bound {text!r}: {value!r} is no number: write one such as 500 or 0.99") from error
    return Rule(text, "bound", _aggregated(name, aggregation, text), compare, bound, **scope)


def _aggregated(name: str, aggregation: str, text: str) -> str:
    metric = METRICS.get(name)
    if metric is None or metric.kind != "distribution":
        if aggregation not in ("value", "rate", "count"):
            metric_of(name)  # an unknown name is the first thing to say
            raise RuleError(f"bound {text!r}: {name} is a single number, so {aggregation} is none of it: write value")
        if aggregation == "rate" and unit(name) != "%":
            raise RuleError(f"bound {text!r}: {name} is no share, so it has no rate: write value")
        return metric_of(name).name if "." not in name else _address(name)
    percentile = re.fullmatch(r"p\(\s*([0-9.]+)\s*\)", aggregation)
    if percentile:
        wanted = float(percentile[1])
        if wanted not in PERCENTILES:
            raise RuleError(
                f"bound {text!r}: a run keeps {', '.join(f'p({kept})' for kept in PERCENTILES)}: choose one of them"
            )
        return f"{name}.p{int(wanted)}"
    if aggregation not in _AGGREGATIONS:
        raise RuleError(
            f"bound {text!r}: no aggregation {aggregation!r} of a distribution: choose avg, med, max, count or p(N)"
        )
    return f"{name}.{_AGGREGATIONS[aggregation]}"


def relative_rule(text: str, *, default: bool = False, **scope: Any) -> Rule:
    """`metric[:statistic]:tolerance`: a change by more than that is a regression, `%` of the baseline or in its unit.

    Without a sign the way is that of the metric; with one it must be the way that is worse.
    """
    found = _RELATIVE.fullmatch(text)
    if not found:
        raise RuleError(
            f"relative rule {text!r} is not understood: write metric:statistic:tolerance, as in ttft_ms:p99:+5%"
        )
    try:
        size = float(found["size"])
    except ValueError as error:
        raise RuleError(f"relative rule {text!r}: {found['size']!r} is no number") from error
    address = _address(found["address"].replace(":", "."))
    worse = _worse_way(address, found["sign"], text)
    shown, given = unit(address), found["unit"]
    percent = given == "%"
    if percent or (shown == "%" and given == "points"):
        size /= 100
    elif given and given != shown:
        right = "points" if shown == "%" else shown
        raise RuleError(f"relative rule {text!r}: {address} is in {shown}, not in {given}: write {right}, or %")
    return Rule(text.strip(), "relative", address, "", size, percent, worse, default=default, **scope)


def _worse_way(address: str, sign: str, text: str) -> Literal["higher", "lower"]:
    direction = direction_of(address)
    if direction == "none":
        if not sign:
            raise RuleError(
                f"relative rule {text!r}: neither way is better for {address}: write + or - for the worse one"
            )
        return "higher" if sign == "+" else "lower"
    wrong = "+" if direction == "higher" else "-"
    if sign == wrong:
        raise RuleError(
            f"relative rule {text!r}: for {address} {direction} is better, so {sign} would forbid an improvement: "
            f"write {'-' if sign == '+' else '+'}"
        )
    return "lower" if direction == "higher" else "higher"


def exact_rule(name: str, **scope: Any) -> Rule:
    """`placement`, `hit_rate`, `step_makespan_ms:max`: not worse by anything; where nothing is worse, not other."""
    wanted = name.strip().replace(":", ".")
    address = wanted if wanted in _WHOLE else _address(wanted)
    way = "none" if wanted in _WHOLE else direction_of(address)
    return Rule(name.strip(), "exact", address, worse="lower" if way == "higher" else "higher", **scope)


def _address(text: str) -> str:
    head, _, tail = text.partition(".")
    tail = {"avg": "mean", "med": "p50"}.get(tail, tail)
    address = f"{head}.{tail}" if tail else head
    metric_of(address)
    return address


def rule_lines(rules: Rules) -> list[str]:
    """The rules as a user may copy them into a file."""
    lines = [f"errors_max = {number(100 * rules.errors_max, 1)} % of requests, degenerate placement fails"]
    for rule in rules.rules:
        where = [f"{key} {value}" for key in ("router", "scenario", "mode") if (value := getattr(rule, key)) != "*"]
        lines.append(f"{rule.kind} {rule.text}" + (f"  ({', '.join(where)})" if where else ""))
    return lines


def _texts(table: Mapping[str, Any], key: str, source: str) -> Sequence[str]:
    texts = table.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RuleError(f'{source}: {key} must be a list of texts such as ["ttft_ms:p99:+5%"]')
    return texts


def _scope(table: Mapping[str, Any], source: str) -> tuple[str, str, str]:
    router, scenario, mode = (table.get(key, "*") for key in ("router", "scenario", "mode"))
    if not all(isinstance(value, str) for value in (router, scenario, mode)):
        raise RuleError(f"{source}: router, scenario and mode must be texts: a name, or a pattern such as 'dynamo-*'")
    return router, scenario, mode


def _known(table: Mapping[str, Any], keys: Sequence[str], source: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RuleError(f"{source}: unknown key {key!r}: {hint}keys are {', '.join(keys)}")


def _flag(table: Mapping[str, Any], key: str, source: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise RuleError(f"{source}: {key} = {value!r}: write true or false")
    return value


def _count(document: Mapping[str, Any], key: str, default: int, source: str) -> int:
    value = document.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise RuleError(f"{source}: {key} = {value!r}: give a whole number of at least 2")
    return value


def _share(value: Any, source: str) -> float:
    """0.01, or "1%"."""
    try:
        found = float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found <= 1:
        raise RuleError(f'{source}: errors_max = {value!r}: give a share such as 0.01 or "1%"')
    return found
