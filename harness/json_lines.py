"""Reads the JSON lines that processes append while they run; a last line that a kill cut short is left out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec


def read_json_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All whole lines of all files, files in name order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(paths):
        with path.open("rb") as file:
            for line in file:
                with suppress(msgspec.DecodeError):
                    rows.append(msgspec.json.decode(line))
    return rows
