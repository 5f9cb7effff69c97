"""The result on the terminal: health on top, routers as columns, the winner of each row, and why, in 100 columns.

As many routers stand beside each other as the terminal is wide, at most six; the others follow in tables with the same
rows and winners, so that no figure is cut off. Names are broken as narrow as that takes, between words. Two modes of
one scenario are compared by the same rows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from reports.compare import LOST_MORE, TOO_CLOSE, outcome
from reports.display import UNKNOWN, cell, percent, row_label, shares
from reports.load_line import load_lines
from reports.loops import loop_rows
from reports.metrics_table import lookup
from reports.table_rows import PLACEMENT_ROW, table_addresses

if TYPE_CHECKING:
    from reports.run import RunResult

COLUMNS_MAX = 100
ROUTERS_A_TABLE = 6
NAME_WIDTHS = (14, 12, 11, 10, 9, 8)
WINNER_WIDTH = 12
HEALTH_STYLE = {"ok": "bold green", "degraded": "bold yellow", "invalid": "bold red"}


def console() -> Console:
    """Prints to the terminal; where there is none, as in a CI log, as wide as everything fits."""
    fixed = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(highlight=False, width=None if fixed else COLUMNS_MAX)


def terminal_table(run: RunResult) -> RenderableType:
    """Everything that `routebench run` prints at the end, at most 100 columns wide."""
    parts: list[RenderableType] = [heading(run), health_text(run.health)]
    parts.extend(Text(line, style="dim") for line in load_lines(run))
    names = list(run.routers)
    parts.append(_Fitting(names, lambda some, width: _table(run, some, width)))
    parts.extend(_loops_table(run))
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
    parts.append(_Fitting(names, lambda some, width: _modes_table(live, sim, some, width)))
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
    """As few tables as hold all names, these broken no narrower than needed, in whatever width there is."""

    names: Sequence[str]
    table_of: Callable[[Sequence[str], int], Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = Console(width=1_000)
        count = len(self.names)
        if not count:
            return
        fewest = -(-count // ROUTERS_A_TABLE)
        for size in dict.fromkeys(-(-count // tables) for tables in range(fewest, count + 1)):
            for width in NAME_WIDTHS:
                parts = [self.names[start : start + size] for start in range(0, count, size)]
                tables = [self.table_of(part, width) for part in parts]
                fits = all(wide.measure(table).maximum <= options.max_width for table in tables)
                if fits or (size, width) == (1, NAME_WIDTHS[-1]):
                    yield from tables
                    return


def _table(run: RunResult, names: Sequence[str], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(folded(name, width)), justify="right", no_wrap=True)
    table.add_column("winner", no_wrap=True)
    winners = run.verdict.get("winners", {})
    for address in table_addresses(run.scenario, run.routers):
        if address == PLACEMENT_ROW:
            cells = [Text(folded(shares(run.routers[name]["placement"]), width)) for name in names]
            table.add_row(Text.assemble("Placement", (" % each", "dim")), *cells, "")
            continue
        found = winners.get(address, {})
        best = found.get("winner")
        cells = [Text(cell(run.routers[name], address), style="bold green" if name == best else "") for name in names]
        title, shown = row_label(address)
        table.add_row(Text.assemble(title, (f" {shown}" if shown else "", "dim")), *cells, winner_text(found, width))
    return table


def _loops_table(run: RunResult) -> Iterator[Table]:
    rows = loop_rows(run.verdict.get("loops"))
    if rows:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1), title_justify="left")
        for head, justify in (("ratio", "left"), ("", "left"), ("open loop", "right"), ("closed loop", "right")):
            table.add_column(head, justify="right" if justify == "right" else "left")
        for title, pair, one, two, apart in rows:
            table.add_row(title, Text(pair), one, two, style="yellow" if apart else "")
        yield table


def winner_text(found: Mapping[str, Any], width: int) -> Text:
    """Of one row: a name; "too close" where nobody is better beyond doubt, "lost more" where who is ahead lost
    more requests, too; nothing where nobody can win."""
    if found.get("winner"):
        return Text(folded(found["winner"], max(width, WINNER_WIDTH)), style="bold green")
    words = outcome(found)
    return Text({TOO_CLOSE: "too close", LOST_MORE: "lost more"}.get(words, words), style="dim")


def _modes_table(live: RunResult, sim: RunResult, names: Sequence[str], width: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for _ in names:
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="dim")
    heads = [folded(name, width).split("\n") for name in names]
    for line in range(max(map(len, heads))):
        cells = [Text(head[line] if line < len(head) else "") for head in heads]
        table.add_row("", *(text for cell_ in cells for text in ("", cell_, "")), style="bold")
    table.add_row("", *("live", "sim", "diff") * len(names), style="bold")
    for address in table_addresses(live.scenario, live.routers):
        if address != PLACEMENT_ROW:
            title, shown = row_label(address)
            table.add_row(f"{title} {shown}".rstrip(), *_modes_cells(live, sim, names, address))
    return table


def _modes_cells(live: RunResult, sim: RunResult, names: Sequence[str], address: str) -> Iterator[str]:
    for name in names:
        one, two = live.routers[name], sim.routers[name]
        gap = difference(lookup(one, address), lookup(two, address))
        yield cell(one, address)
        yield cell(two, address)
        yield UNKNOWN if gap is None else percent(gap, signed=True)


def folded(name: str, width: int = NAME_WIDTHS[0]) -> str:
    """A long name broken after its hyphens, dots and the like; within a word only if that is longer than any width."""
    lines, line = [], ""
    pieces = re.findall(r"[^-_./:@+]*[-_./:@+]?", name)
    width = max(width, min(NAME_WIDTHS[0], max(map(len, pieces))))
    for piece in pieces:
        while len(piece) > width:
            lines += [line, piece[:width]] if line else [piece[:width]]
            line, piece = "", piece[width:]
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = ""
        line += piece
    return "\n".join([*lines, line])
