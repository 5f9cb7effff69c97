"""report.md: the comparison as a page that fits a pull-request comment.

Only what the rows and the scenario decide is shown, no time of day and no machine, so the same simulation gives the
same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reports.compare import outcome
from reports.display import cell, in_markdown, label, shares, unit
from reports.ingresses import INGRESS_HEADS, INGRESS_NOTE, ingress_rows
from reports.load_line import load_lines
from reports.loops import loop_rows
from reports.metrics_table import METRICS, metric_of
from reports.stages import STAGE_HEADS, stage_rows
from reports.table_rows import PLACEMENT_ROW, table_addresses
from reports.unfinished import WHERE_LOST, where_unfinished

if TYPE_CHECKING:
    from reports.run import RunResult


def write_markdown(run: RunResult, path: Path | str) -> None:
    Path(path).write_text(markdown(run), encoding="utf-8", newline="\n")


def markdown(run: RunResult) -> str:
    names = list(run.routers)
    lines = [f"# {run.name}", ""]
    if about := run.scenario.get("about"):
        lines += [f"{about}", ""]
    lines += [f"Mode {run.mode}, seed {run.seed}, {run.status}. Health: **{run.health['verdict']}**.", ""]
    for line in load_lines(run):
        lines += [f"Load: {line}.", ""]
    lines += [f"- {reason}" for reason in run.health["reasons"]] + ([""] if run.health["reasons"] else [])
    for sentence in run.verdict.get("sentences", ()):
        lines += [sentence, ""]
    lines += [f"- Beware: {flag['text']}" for flag in run.verdict.get("flags", ())]
    if run.verdict.get("flags"):
        lines.append("")
    if counted := where_unfinished(run.requests):
        lines += [f"{WHERE_LOST} (`unfinished` in run.json): {counted}.", ""]
    if not names:
        return "\n".join([*lines, "No figures: the run did not come to its end.", ""])
    lines.append(f"| | unit | {' | '.join(map(in_markdown, names))} | winner |")
    lines.append(f"| --- | --- | {' | '.join('---:' for _ in names)} | --- |")
    winners = run.verdict.get("winners", {})
    addresses = table_addresses(run.scenario, run.routers)
    for address in addresses:
        if address == PLACEMENT_ROW:
            cells = [shares(run.routers[name]["placement"]) for name in names]
            lines.append(f"| Placement | % each | {' | '.join(cells)} | |")
            continue
        found = winners.get(address, {})
        best = found.get("winner")
        cells = [
            f"**{cell(run.routers[name], address)}**" if name == best else cell(run.routers[name], address)
            for name in names
        ]
        won = in_markdown(outcome(found))
        lines.append(f"| {label(address)} | {unit(address)} | {' | '.join(cells)} | {won} |")
    lines += _ingresses(run) + _stages(run) + _loops(run)
    shown = dict.fromkeys(metric_of(address).name for address in addresses if address != PLACEMENT_ROW)
    lines += ["", "<details><summary>What the figures mean</summary>", ""]
    lines += [f"- **{METRICS[name].title}** ({METRICS[name].unit}): {METRICS[name].formula}." for name in shown]
    lines += [
        "",
        "A winner is named only where the difference is larger than its 95 % interval and above half a percent. "
        "A router that lost clearly more requests than another wins no time against it. "
        "Figures come from raw samples; a load tool's own rounded table is for watching and may differ.",
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def _ingresses(run: RunResult) -> list[str]:
    rows = ingress_rows(run)
    if not rows:
        return []
    head = ["", f"| {' | '.join(INGRESS_HEADS)} |", f"| --- | --- |{' ---: |' * (len(INGRESS_HEADS) - 2)}"]
    return [*head, *(f"| {' | '.join(map(in_markdown, row))} |" for row in rows), "", INGRESS_NOTE]


def _stages(run: RunResult) -> list[str]:
    if not run.stages:
        return []
    head = ["", f"| {' | '.join(STAGE_HEADS)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    return [*head, *(f"| {' | '.join(map(in_markdown, row))} |" for row in stage_rows(run.stages))]


def _loops(run: RunResult) -> list[str]:
    rows = loop_rows(run.verdict.get("loops"))
    if not rows:
        return []
    head = ["", "| ratio | | open loop (primary) | closed loop |", "| --- | --- | ---: | ---: |"]
    return [
        *head,
        *(
            f"| {title} | {in_markdown(pair)} | {one} | {two}{' **!**' if apart else ''} |"
            for title, pair, one, two, apart in rows
        ),
    ]
