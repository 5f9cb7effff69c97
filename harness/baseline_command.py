"""`routebench baseline save | list | show`: baselines as small JSON files that live in a user's git."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from harness.errors import UsageError
from reports import ReportError, console, list_baselines, read_figures, save_baseline, terminal_table


def save_command(run: Path, name: str | None, folder: Path, *, replace: bool, force: bool) -> int:
    """Saves the figures of a run; the name is the scenario's and the mode unless given."""
    try:
        figures = read_figures(run, folder)
        chosen = name or f"{figures.name}-{figures.mode}"
        path = save_baseline(figures, chosen, folder, replace=replace, force=force)
    except ReportError as error:
        raise UsageError(str(error)) from error
    print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB); commit it, then: ", end="")
    print(f"routebench gate --baseline {path} --current RUN")
    return 0


def list_command(folder: Path) -> int:
    """A line for each baseline of a folder."""
    try:
        found = list_baselines(folder)
    except ReportError as error:
        raise UsageError(str(error)) from error
    if not found:
        print(f"no baseline in {folder}/: make one with `routebench baseline save RUN`")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("name", "scenario", "mode", "seed", "repeats", "health", "routers"):
        table.add_column(head)
    for name, run in found.items():
        repeats = len({each["repeat"] for each in run.repeats})
        facts = (run.name, run.mode, str(run.seed), str(repeats), str(run.health.get("verdict")))
        table.add_row(*map(Text, (name, *facts, ", ".join(run.routers))))
    console().print(table)
    return 0


def show_command(name: str, folder: Path) -> int:
    """The figures of one baseline; it holds no rows, so it names no winners."""
    try:
        run = read_figures(name, folder)
    except ReportError as error:
        raise UsageError(str(error)) from error
    console().print(terminal_table(run))
    return 0
