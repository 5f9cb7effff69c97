"""What a trace form is to the rest: a name, a way to recognise it, and how its lines or documents become rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from workloads.errors import TraceError
from workloads.traces.index import Member
from workloads.traces.rows import Row

StructType = TypeVar("StructType", bound=msgspec.Struct)


@dataclass(slots=True)
class Reading:
    """What a loader needs beside the file; counts what it leaves out."""

    path: str
    block_size: int | None
    """As the table or the sidecar says; None: the form's own."""
    chars_per_token: float
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str) -> None:
        """Counts a row that is no request."""
        self.skipped[why] = self.skipped.get(why, 0) + 1

    def failed(self, line: int, inputs: int, outputs: int) -> bool:
        """Whether a request failed when it was recorded, as a length of 0 says; then it is counted. Raises TraceError
        for less than that."""
        if min(inputs, outputs) < 0:
            raise TraceError(
                f"{self.path}:{line}", f"{min(inputs, outputs)} tokens: lengths are 0 (a failed request) or more"
            )
        if inputs and outputs:
            return False
        self.skip("length 0, a failed request")
        return True


class LineForm:
    """A form with one event a line."""

    name: str

    def begin(self, first_line: bytes, reading: Reading) -> bool:
        """Told the file's first line before any other; True: the line is a header and no event."""
        return False

    def member(self, line: bytes, number: int, reading: Reading) -> Member | None:
        """The session of a line, for the index; None: the line alone is a session. Raises TraceError."""
        return None

    def rows(self, session: list[tuple[int, bytes]], reading: Reading) -> list[Row]:
        """The requests of one session's lines, (number, line) each. Raises TraceError."""
        raise NotImplementedError


class DocumentForm:
    """A form with one JSON document for one or more conversations."""

    name: str

    def conversations(self, document: Any, line: int, reading: Reading) -> Iterator[list[Row]]:
        """The rows of each session of a document, those that are waited for first. Raises TraceError."""
        raise NotImplementedError


def decode(line: bytes, struct: type[StructType], number: int, reading: Reading) -> StructType:
    """A JSON line as the struct says; further keys are the form's business, not ours. Raises TraceError."""
    try:
        return msgspec.json.decode(line, type=struct)
    except msgspec.ValidationError as error:
        raise _misfit(error, number, reading) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{reading.path}:{number}", f"is not JSON: {error}") from error
    except RecursionError as error:
        raise TraceError(f"{reading.path}:{number}", "has too deep nesting: is it a trace?") from error


def convert(document: Any, struct: type[StructType], line: int, reading: Reading) -> StructType:
    """As `decode`, of a document that was parsed already."""
    try:
        return msgspec.convert(document, struct)
    except msgspec.ValidationError as error:
        raise _misfit(error, line, reading) from error


def _misfit(error: msgspec.ValidationError, line: int, reading: Reading) -> TraceError:
    what = str(error).replace("Object missing required field", "has no")
    return TraceError(f"{reading.path}:{line}", f"{what.replace(' - at `$.', ', at `')}: is the format right?")
