"""Shows how far a run is: a bar on a terminal, a plain line every few seconds elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_LINE_S = 5.0
"""Spacing of progress lines when the output is not a terminal."""


class Reporter(Protocol):
    """Receives how far the run is; `done` of `total` requests of the present arm; `warn` of what cannot wait."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def arm(self, number: int, of: int, label: str, total: int) -> None: ...
    def phase(self, name: str) -> None: ...
    def done(self, requests: int) -> None: ...
    def warn(self, line: str) -> None: ...


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def arm(self, number: int, of: int, label: str, total: int) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def done(self, requests: int) -> None:
        pass

    def warn(self, line: str) -> None:
        pass


class _Bar(_Silent):
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[arm]}"),
            TextColumn("{task.fields[phase]}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("run", total=None, arm="", phase="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def arm(self, number: int, of: int, label: str, total: int) -> None:
        self._progress.reset(self._task, total=total, arm=f"arm {number}/{of} {label}", phase="starting")

    def phase(self, name: str) -> None:
        self._progress.update(self._task, phase=name)

    def done(self, requests: int) -> None:
        self._progress.update(self._task, completed=requests)

    def warn(self, line: str) -> None:
        self._progress.console.print(f"! {line}", highlight=False, markup=False)


class _Lines(_Silent):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = 0.0
        self._arm = self._phase = ""
        self._total = 0

    def arm(self, number: int, of: int, label: str, total: int) -> None:
        self._arm, self._total = f"arm {number}/{of} {label}", total

    def phase(self, name: str) -> None:
        self._phase = name
        self._say(f"{self._arm}: {name}" if self._arm else name)

    def done(self, requests: int) -> None:
        if time.monotonic() - self._said >= PLAIN_LINE_S:
            self._say(f"{self._arm}: {self._phase}, {requests} of {self._total} requests")

    def warn(self, line: str) -> None:
        self._say(f"! {line}")

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self._console.print(line, highlight=False, markup=False)


def reporter(console: Console, *, quiet: bool) -> Reporter:
    """The reporter that suits where the output goes."""
    if quiet:
        return _Silent()
    return _Bar(console) if console.is_terminal else _Lines(console)
