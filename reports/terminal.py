"""The result on the terminal: health on top, routers as columns, the winner of each row, and why, in 100 columns.

As many routers stand beside each other as the terminal is wide, at most four; the others follow in tables with the same
rows and winners, so that no name or figure is cut off. Two modes of one scenario are compared by the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from reports.compare import HEADLINE_ADDRESSES, ROLLOUT_ADDRESSES
from reports.display import UNKNOWN, cell, label, percent, row_label, shares
from reports.load_line import load_line
from reports.metrics_table import lookup
from reports.why import has_rollouts

if TYPE_CHECKING:
    from reports.run import RunResult

COLUMNS_MAX = 100
ROUTERS_A_TABLE = 4
NAME_WIDTH = 14
HEALTH_STYLE = {"ok": "bold green", "degraded": "bold yellow", "invalid": "bold red"}
PLACEMENT_ROW = "placement"


def table_addresses(run: RunResult) -> list[str]:
    """Rows of the comparison: RL figures first where there are any, SLO figures last where bounds are set."""
    addresses = [*(ROLLOUT_ADDRESSES if has_rollouts(run.routers) else ()), *HEADLINE_ADDRESSES]
    addresses.insert(addresses.index("hit_rate") + 1, PLACEMENT_ROW)
    if any(metrics.get("slo_attainment") is not None for metrics in run.routers.values()):
        addresses.append("slo_attainment")
    return addresses


def terminal_table(run: RunResult) -> RenderableType:
    """Everything that `routebench run` prints at the end, at most 100 columns wide."""
    parts: list[RenderableType] = [heading(run), health_text(run.health)]
    if line := load_line(run):
        parts.append(Text(line, style="dim"))
    names = list(run.routers)
    parts.append(_Fitting(names, lambda some: _table(run, some)))
    if not names:
        parts.append(Text("No figures: the run did not come to its end.", style="yellow"))
    parts.extend(Text(sentence) for sentence in run.verdict.get("sentences", ()))
    parts.extend(Text(f"! {flag['text']}", style="yellow") for flag in run.verdict.get("flags", ()))
    return Constrain(Group(*parts), COLUMNS_MAX)


def mode_comparison(live: RunResult, sim: RunResult) -> RenderableType:
    """The same scenario in both modes: live, sim, and live - sim as a share of sim."""
    names = [name for name in live.routers if name in sim.routers]
    parts: list[RenderableType] = [
        Text.assemble((live.name, "bold"), ": live beside simulation, difference in percent of the simulation"),
        health_text(live.health),
    ]
    parts.append(_Fitting(names, lambda some: _modes_table(live, sim, some)))
    only = [name for name in (*live.routers, *sim.routers) if name not in names]
    if only:
        parts.append(Text(f"In one mode only, so not compared: {', '.join(only)}", style="yellow"))
    return Constrain(Group(*parts), COLUMNS_MAX)


def difference(live: float | None, sim: float | None) -> float | None:
    """(live - sim) / sim; None where one is unknown or the simulation has 0 and the live run has not."""
    if live is None or sim is None or (sim == 0 and live != 0):
        return None
    return (live - sim) / sim if sim else 0.0


def heading(run: RunResult) -> Text:
    requests = sum(metrics["requests"] for metrics in run.routers.values())
    repeats = 1 + max((repeat["repeat"] for repeat in run.repeats), default=0)
    facts = [f"{run.mode}", f"seed {run.seed}", f"{requests:,} requests"]
    if repeats > 1:
        facts.append(f"{repeats} repeats")
    if run.wall_s is not None:
        facts.append(f"{run.wall_s:.1f} s")
    text = Text.assemble((run.name, "bold"), " · ", " · ".join(facts))
    if run.status != "complete":
        text.append(f" · {run.status}", style="bold yellow")
    return text


def health_text(health: Mapping[str, Any]) -> Text:
    verdict = health.get("verdict", "invalid")
    text = Text.assemble("health ", (verdict, HEALTH_STYLE.get(verdict, "bold red")))
    for reason in health.get("reasons", ()):
        text.append(f"\n  - {reason}")
    return text


@dataclass(frozen=True, slots=True)
class _Fitting:
    """As few tables as hold all names without cutting a name or a figure, in whatever width there is."""

    names: Sequence[str]
    table_of: Callable[[Sequence[str]], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = Console(width=1_000)
        for size in range(min(ROUTERS_A_TABLE, len(self.names)), 0, -1):
            tables = [self.table_of(self.names[start : start + size]) for start in range(0, len(self.names), size)]
            if size == 1 or all(wide.measure(table).maximum <= options.max_width for table in tables):
                yield from tables
                return


def _table(run: RunResult, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(folded(name), justify="right", no_wrap=True)
    table.add_column("winner", no_wrap=True)
    winners = run.verdict.get("winners", {})
    for address in table_addresses(run):
        if address == PLACEMENT_ROW:
            cells = [Text(folded(shares(run.routers[name]["placement"]))) for name in names]
            table.add_row(Text.assemble("Placement", (" % each", "dim")), *cells, "")
            continue
        found = winners.get(address, {})
        best = found.get("winner")
        cells = [Text(cell(run.routers[name], address), style="bold green" if name == best else "") for name in names]
        title, shown = row_label(address)
        table.add_row(Text.assemble(title, (f" {shown}" if shown else "", "dim")), *cells, winner_text(found))
    return table


def winner_text(found: Mapping[str, Any]) -> Text:
    """Of one row: a name; "too close" where nobody is better beyond doubt; nothing where nobody can win."""
    if found.get("winner"):
        return Text(folded(found["winner"]), style="bold green")
    return Text("too close" if found.get("best") else found.get("basis", ""), style="dim")


def _modes_table(live: RunResult, sim: RunResult, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for _ in names:
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="dim")
    heads = [folded(name, width=8).split("\n") for name in names]
    for line in range(max(map(len, heads))):
        table.add_row(
            "", *(text for head in heads for text in ("", head[line] if line < len(head) else "", "")), style="bold"
        )
    table.add_row("", *("live", "sim", "diff") * len(names), style="bold")
    for address in table_addresses(live):
        if address != PLACEMENT_ROW:
            table.add_row(label(address), *_modes_cells(live, sim, names, address))
    return table


def _modes_cells(live: RunResult, sim: RunResult, names: Sequence[str], address: str) -> Iterator[str]:
    for name in names:
        one, two = live.routers[name], sim.routers[name]
        gap = difference(lookup(one, address), lookup(two, address))
        yield cell(one, address)
        yield cell(two, address)
        yield UNKNOWN if gap is None else percent(gap, signed=True)


def folded(name: str, width: int = NAME_WIDTH) -> str:
    """A long name broken after its hyphens, dots and the like, and within a word only where nothing else helps."""
    lines, line = [], ""
    for piece in re.findall(r"[^-_./:@+]*[-_./:@+]?", name):
        while len(piece) > width:
            lines += [line, piece[:width]] if line else [piece[:width]]
            line, piece = "", piece[width:]
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = ""
        line += piece
    return "\n".join([*lines, line])
