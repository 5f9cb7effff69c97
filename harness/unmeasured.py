"""Folders of runs that never began: a router did not start, say, so there is a `run.json` and logs and not one request.

Such a folder may be used again, since a retry is what its error asks for. Law: nothing is removed but files that a run
of ours writes, and only where its own `run.json` says that it ended without a request and nothing else lies beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

RUN_FILE = "run.json"
OURS = frozenset({RUN_FILE, "requests.parquet", "fleet.parquet", "router.parquet", "logs"})
MODES = ("live", "sim")
"""Folders within that of `--mode both`."""


def holds_no_measurement(folder: Path) -> bool:
    """Whether a run ended here before its first request, and nothing else is here."""
    parts = [entry for entry in folder.iterdir() if entry.name in MODES and entry.is_dir()]
    if parts:
        return len(parts) == len(list(folder.iterdir())) and all(map(_without_a_request, parts))
    return _without_a_request(folder)


def clear(folder: Path) -> None:
    """Removes what lies in a folder that holds no measurement. Raises OSError."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _without_a_request(folder: Path) -> bool:
    names = {entry.name for entry in folder.iterdir()}
    if not names <= OURS:
        return False
    try:
        run: Any = msgspec.json.decode((folder / RUN_FILE).read_bytes())
        requests = [metrics["requests"] for metrics in run["routers"].values()]
        return run["status"] == "partial" and not any(requests)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return False
