"""The gate's verdict for people and for CI: a table of at most 100 columns, Markdown for a job summary, JUnit XML.

In the XML a suite is the run and a case is one rule for one router. A run that cannot be judged is an `error` and not a
`failure`, and what is inconclusive is `skipped`, so a dashboard keeps the three apart. No time stamp goes in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from reports.display import in_markdown
from reports.gate import GateResult, Line
from reports.injections import Injection
from reports.rules import rule_lines
from reports.terminal import COLUMNS_MAX, folded

STYLES = {"pass": "green", "better": "bold green", "regression": "bold red", "inconclusive": "yellow", "invalid": "red"}
_ALLOWED = re.compile(", allowed [^;]*")  # stands beside it as the rule
ROUTER_WIDTH = 24  # of 100 columns: `my_router.py:MyPolicy` on one line
_ORDER = ("invalid", "regression", "inconclusive", "better", "pass")
_ILLEGAL = {code: "\ufffd" for code in range(32) if code not in (9, 10, 13)}  # what XML 1.0 cannot hold


def gate_table(result: GateResult) -> RenderableType:
    """Worst first; what cannot be judged stands instead of the table."""
    head = Text.assemble(
        "gate ",
        (result.outcome.upper(), STYLES.get(result.outcome, "bold")),
        f" · {result.scenario} · {result.mode} · seed {result.seed} · {result.rules.source}",
    )
    parts: list[RenderableType] = [head]
    for complaint in result.complaints:
        mark, style = ("!", "yellow") if complaint.forced else ("x", "red")
        forced = " (forced)" if complaint.forced else ""
        parts.append(Text(f"{mark} {complaint.code}{forced}: {complaint.text}", style=style))
    if result.lines:
        parts.append(_lines_table(_worst_first(result.lines)))
    parts.extend(Text(f"- {note}", style="dim") for note in result.notes)
    return Constrain(Group(*parts), COLUMNS_MAX)


def rules_text(result: GateResult) -> RenderableType:
    lines = rule_lines(result.rules)
    return Constrain(
        Group(Text(f"{result.rules.source}:"), *(Text(f"  {line}", style="dim") for line in lines)), COLUMNS_MAX
    )


def self_test_table(found: Sequence[Injection]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("injected", overflow="fold")
    table.add_column("expected", no_wrap=True)
    table.add_column("found", no_wrap=True)
    for one in found:
        style = "green" if one.caught else "bold red"
        table.add_row(Text(one.fault), one.expected, Text(one.found, style=style))
    missed = [one for one in found if not one.caught]
    words = f"self-test: {len(found) - len(missed)} of {len(found)} as expected"
    parts: list[RenderableType] = [table, Text(words, style="bold red" if missed else "bold green")]
    parts.extend(Text(f"x {one.fault}: {one.reason}", style="red") for one in missed)
    return Constrain(Group(*parts), COLUMNS_MAX)


def gate_markdown(result: GateResult) -> str:
    """For a job summary or a comment."""
    lines = [
        f"## Gate: {result.outcome}",
        "",
        f"{in_markdown(result.scenario)}, {result.mode}, seed {result.seed}.",
        "",
    ]
    lines += [
        f"- **{one.code}**{' (forced)' if one.forced else ''}: {in_markdown(one.text)}" for one in result.complaints
    ]
    if result.complaints:
        lines.append("")
    if result.lines:
        lines += ["| | router | rule | found |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {'' if line.outcome == 'pass' else '**'}{line.outcome}{'' if line.outcome == 'pass' else '**'} "
            f"| {in_markdown(line.router)} | `{in_markdown(line.rule)}` | {in_markdown(line.detail)} |"
            for line in _worst_first(result.lines)
        ]
        lines.append("")
    lines += [f"- {in_markdown(note)}" for note in result.notes]
    return "\n".join([*lines, ""])


def junit(result: GateResult) -> str:
    counts = Counter(line.outcome for line in result.lines)
    standing = [one for one in result.complaints if not one.forced]
    unjudged = result.outcome == "invalid" and not standing and not counts["invalid"]
    errors = counts["invalid"] + len(standing) + unjudged
    tests = len(result.lines) + len(standing) + unjudged
    numbers = {"tests": tests, "failures": counts["regression"], "errors": errors, "skipped": counts["inconclusive"]}
    suites = Xml.Element("testsuites", {key: str(value) for key, value in numbers.items()})
    attributes = {"name": f"{result.scenario} ({result.mode})"} | {key: str(value) for key, value in numbers.items()}
    suite = Xml.SubElement(suites, "testsuite", {key: _xml(value) for key, value in attributes.items()})
    properties = Xml.SubElement(suite, "properties")
    facts = {"commit": result.commit, "seed": result.seed, "mode": result.mode, "rules": result.rules.source}
    for name, value in facts.items():
        if value is not None:
            Xml.SubElement(properties, "property", {"name": name, "value": _xml(str(value))})
    for complaint in standing:
        case = Xml.SubElement(suite, "testcase", {"classname": _xml(result.scenario), "name": complaint.code})
        _child(case, "error", complaint.code, complaint.text)
    if unjudged:
        case = Xml.SubElement(suite, "testcase", {"classname": _xml(result.scenario), "name": "something is judged"})
        _child(case, "error", "no-rule-judged", result.reason)
    for line in result.lines:
        names = {"classname": _xml(result.scenario), "name": _xml(f"{line.router}: {line.rule}")}
        case = Xml.SubElement(suite, "testcase", names)
        if line.outcome in _CHILDREN:
            _child(case, _CHILDREN[line.outcome], line.outcome, line.detail)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


_CHILDREN = {"regression": "failure", "invalid": "error", "inconclusive": "skipped"}


def _child(case: Xml.Element, tag: str, kind: str, text: str) -> None:
    Xml.SubElement(case, tag, {"type": kind, "message": _xml(text)})


def _lines_table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True)
    names = [folded(line.router, ROUTER_WIDTH) for line in lines]
    table.add_column("router", no_wrap=True)
    table.add_column("rule", overflow="fold", max_width=30)
    table.add_column("found", overflow="fold")
    for line, name in zip(lines, names, strict=True):
        outcome = Text(line.outcome, style=STYLES[line.outcome])
        table.add_row(outcome, *map(Text, (name, line.rule, _ALLOWED.sub("", line.detail))))
    return table


def _worst_first(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: _ORDER.index(line.outcome))


def _xml(text: str) -> str:
    return text.translate(_ILLEGAL)
