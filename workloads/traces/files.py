"""Reading files that do not fit into memory: lines with their places, and JSON documents one after the other.

Memory is one line or one document, and a document is refused above a limit: a file without an end of its first
document is a wrong file, not a reason to read ten gigabytes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.errors import TraceError

CHUNK = 1 << 18
LINE_BYTES_MAX = 1 << 26
DOCUMENT_CHARS_MAX = 1 << 28


def trace_files(path: str) -> list[Path]:
    """The file, or the `.json`, `.jsonl` and `.csv` files of a folder by name. Raises TraceError."""
    place = Path(path)
    if place.is_dir():
        found = sorted(p for p in place.iterdir() if p.suffix in (".json", ".jsonl", ".csv") and not is_sidecar(p))
        if not found:
            raise TraceError(path, "the folder has no .json, .jsonl or .csv file: give one that holds a trace")
        return found
    if not place.exists():
        raise TraceError(path, "there is no such file: check the path")
    return [place]


def is_sidecar(path: Path) -> bool:
    return path.name.endswith(".meta.json")


def sidecar_of(path: Path) -> Path:
    """Where the file that states block size and rounding of a converted trace lies."""
    return path.with_name(path.name + ".meta.json")


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(byte offset, line number from 1, line without its end); blank lines are left out."""
    try:
        with path.open("rb") as file:
            offset = number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(line) == LINE_BYTES_MAX:
                    raise TraceError(
                        f"{path}:{number}",
                        f"a line of more than {LINE_BYTES_MAX >> 20} MiB: one request a line is read",
                    )
                if stripped := line.strip(b"\xef\xbb\xbf \t\r\n" if number == 1 else None):
                    yield offset, number, stripped
                offset += len(line)
    except OSError as error:
        raise TraceError(str(path), f"cannot be read: {error.strerror}") from error


def _line_of_no_text(path: Path) -> int:
    """The first line with bytes that are no UTF-8; text is decoded a piece at a time, so whoever met it knows only that
    it is somewhere behind."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            try:
                decoder.decode(piece)
            except UnicodeDecodeError as error:
                return number + error.object.count(b"\n", 0, error.start)
            number += piece.count(b"\n")
    return number


_DECODER = json.JSONDecoder()


def documents(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number of its start, value) of each JSON document: those in a row, or the members of one array."""
    buffer, line, array = "", 1, False
    want = CHUNK
    try:
        with path.open("r", encoding="utf-8-sig", errors="strict") as file:
            ended = False
            while True:
                trimmed = buffer.lstrip(" \t\r\n,") if array else buffer.lstrip()
                line += buffer.count("\n", 0, len(buffer) - len(trimmed))
                buffer = trimmed
                if buffer.startswith("[") and not array:
                    array, buffer = True, buffer[1:]
                    continue
                if array and buffer.startswith("]"):
                    buffer, array = buffer[1:], False
                    continue
                if buffer:
                    try:
                        value, end = _DECODER.raw_decode(buffer)
                    except json.JSONDecodeError as error:
                        if ended or (error.pos < len(buffer) - CHUNK and not error.msg.startswith("Unterminated")):
                            at = line + buffer.count("\n", 0, error.pos)
                            raise TraceError(f"{path}:{at}", f"is not JSON: {error.msg}") from error
                        if len(buffer) > DOCUMENT_CHARS_MAX:
                            raise TraceError(
                                f"{path}:{line}",
                                f"one document has more than {DOCUMENT_CHARS_MAX >> 20} Mi characters: split the file",
                            ) from error
                    except (ValueError, RecursionError) as error:
                        what = (
                            "a number of thousands of digits" if isinstance(error, ValueError) else "too deep nesting"
                        )
                        raise TraceError(f"{path}:{line}", f"this document has {what}: is it a trace?") from error
                    else:
                        yield line, value
                        line += buffer.count("\n", 0, end)
                        buffer = buffer[end:]
                        want = CHUNK
                        continue
                elif ended:
                    if array:
                        raise TraceError(f"{path}:{line}", "the file ends inside an array: it is cut")
                    return
                more = file.read(want)
                want = max(CHUNK, len(buffer))  # twice as much each time, so a long document is not tried too often
                ended = not more
                buffer += more
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{_line_of_no_text(path)}", "is not UTF-8 text: convert it") from error
    except OSError as error:
        raise TraceError(str(path), f"cannot be read: {error.strerror}") from error
