"""CSV forms: Azure LLM inference (2023, 2024) and BurstGPT (old and new headers). Both hold lengths only.

Nothing says which prompts share text, so a prompt is text of its own, and only BurstGPT's newer files with
`Session ID` have history. Columns are found by the header's names, never by place; without a header the documented
order stands. Rows with a length of 0 are failed requests: they are left out and counted.
"""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime

from workloads.errors import TraceError, choose_from
from workloads.traces.forms import LineForm, Reading
from workloads.traces.index import Member
from workloads.traces.rows import Row, digest, us


class _Table(LineForm):
    """Base: a header, columns by name, one request a line."""

    columns: tuple[str, ...]
    """Those of a file without a header."""
    needed: tuple[str, ...]
    inputs: str
    outputs: str

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._width = 0

    def begin(self, first_line: bytes, reading: Reading) -> bool:
        cells = _cells(first_line, 1, reading)
        header = self.needed[0].lower() in [cell.lower() for cell in cells]
        names = cells if header else list(self.columns[: len(cells)])
        self._place = {name.lower(): place for place, name in enumerate(names)}
        self._width = len(names)
        for name in self.needed:
            if name.lower() not in self._place:
                raise TraceError(f"{reading.path}:1", f"no column {name!r} in the header: {choose_from(name, names)}")
        return header

    def rows(self, session: list[tuple[int, bytes]], reading: Reading) -> list[Row]:
        found = (self._row(number, line, reading) for number, line in session)
        return [row for row in found if row is not None]

    def _row(self, number: int, line: bytes, reading: Reading) -> Row | None:
        cells = _cells(line, number, reading)
        if len(cells) != self._width:
            raise TraceError(f"{reading.path}:{number}", f"{len(cells)} columns where {self._width} belong")
        inputs, outputs = (self._count(cells, name, number, reading) for name in (self.inputs, self.outputs))
        if reading.failed(number, inputs, outputs):
            return None
        return Row(
            path=reading.path,
            line=number,
            session=self._session(cells) or f"row{number}",
            input_tokens=inputs,
            output_tokens=outputs,
            at_us=self._instant(cells, number, reading),
        )

    def _count(self, cells: list[str], name: str, number: int, reading: Reading) -> int:
        cell = cells[self._place[name.lower()]]
        try:
            value = float(cell)
            if value < 0 or value != int(value):
                raise ValueError
        except (ValueError, OverflowError) as error:
            raise TraceError(
                f"{reading.path}:{number}", f"{name} = {cell!r}: a whole number of tokens belongs there"
            ) from error
        return int(value)

    def _session(self, cells: list[str]) -> str | None:
        return None

    def _instant(self, cells: list[str], number: int, reading: Reading) -> int:
        """Microseconds."""
        raise NotImplementedError


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")


class Azure(_Table):
    """`azure`."""

    name = "azure"
    columns = needed = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    inputs, outputs = "ContextTokens", "GeneratedTokens"

    def _instant(self, cells: list[str], number: int, reading: Reading) -> int:
        cell = cells[self._place["timestamp"]]
        match = _STAMP.fullmatch(cell)
        try:
            if match is None:
                raise ValueError
            whole = datetime.fromisoformat(f"{match[1]}T{match[2]}{(match[4] or '').replace('Z', '+00:00')}")
        except ValueError as error:
            raise TraceError(
                f"{reading.path}:{number}",
                f"TIMESTAMP = {cell!r}: a time such as 2023-11-16 18:00:00.1000000 belongs there",
            ) from error
        if whole.tzinfo is None:
            whole = whole.replace(tzinfo=UTC)
        fraction = (match[3] or "0")[:6].ljust(6, "0")
        return int(whole.timestamp()) * 1_000_000 + int(fraction)


class BurstGpt(_Table):
    """`burstgpt`."""

    name = "burstgpt"
    columns = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
    needed = ("Timestamp", "Request tokens", "Response tokens")
    inputs, outputs = "Request tokens", "Response tokens"

    def member(self, line: bytes, number: int, reading: Reading) -> Member | None:
        if "session id" not in self._place:
            return None
        cells = _cells(line, number, reading)
        if len(cells) != self._width:
            raise TraceError(f"{reading.path}:{number}", f"{len(cells)} columns where {self._width} belong")
        return Member(
            session=digest(self._session(cells) or f"row{number}"), at_us=self._instant(cells, number, reading)
        )

    def _session(self, cells: list[str]) -> str | None:
        place = self._place.get("session id")
        return (cells[place].strip() or None) if place is not None else None

    def _instant(self, cells: list[str], number: int, reading: Reading) -> int:
        cell = cells[self._place["timestamp"]]
        try:
            return us(float(cell), 1e6)
        except (ValueError, OverflowError) as error:
            raise TraceError(f"{reading.path}:{number}", f"Timestamp = {cell!r}: seconds belong there") from error


def _cells(line: bytes, number: int, reading: Reading) -> list[str]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{reading.path}:{number}", "is not UTF-8 text: convert it") from error
    if '"' not in text:
        return [cell.strip() for cell in text.split(",")]
    return [cell.strip() for cell in next(csv.reader([text]))]
