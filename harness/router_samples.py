"""Samples of the routers themselves, every half second: how much they remember, and what they count as under way.

In virtual time a router is asked directly; live, our router processes are asked at `/router/state`, and what they
said is appended to a file at once, so that a killed arm keeps it. Law: a sample never disturbs a run, so a router that
does not answer in time leaves a gap, and one that is not ours is not asked at all. One that stays silent is told of
once, with what its log says of it: nothing else would, until the requests' own limits are over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.json_lines import read_json_lines
from harness.processes import get_json
from routers import Router

SPACING_S = 0.5
"""As of fleet samples."""
ANSWER_S = 0.5
"""A router busier than this is left alone until the next time."""
SILENT_S = 12.0
"""A router that decides for longer than `routers.deciding.PATIENCE_S` has said so in its log by then."""
_WARNING = "warning: "
FILE = "samples-of-routers.jsonl"


def sample_of(router: Router, ingress: str, t_us: int) -> dict[str, Any]:
    """What a router of the simulation would say now; the arm's own columns come on top."""
    return {"ingress": ingress, "t_us": t_us, "index_size": router.index_size(), "in_flight": router.in_flight}


class RouterWatch:
    """Asks the router processes of a live arm; `urls` by ingress, with their logs in `folder`."""

    def __init__(self, urls: Mapping[str, str], folder: Path, *, silent_s: float = SILENT_S) -> None:
        self._urls = dict(urls)
        self._folder = folder
        self._path = folder / FILE
        self._due_s = 0.0
        self._silent_s = silent_s
        self._heard_s = dict.fromkeys(self._urls, time.monotonic())
        self._told: set[str] = set()

    def sample(self) -> list[str]:
        """Takes a sample of each if one is due. Returns what there is to tell of routers that have fallen silent."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return []
        self._due_s = now_s + SPACING_S
        tell = []
        for ingress, url in self._urls.items():
            try:
                said = get_json(f"{url}/router/state", ANSWER_S)
                line = {"t_us": said["now_us"], "index_size": said["index_size"], "in_flight": said["in_flight"]}
            except (OSError, KeyError, TypeError):
                silent_s = now_s - self._heard_s[ingress]
                if silent_s >= self._silent_s and ingress not in self._told:
                    self._told.add(ingress)
                    tell.append(f"ingress {ingress} has not answered for {silent_s:.0f} s{self._why(ingress)}")
                continue
            self._heard_s[ingress] = now_s
            self._told.discard(ingress)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode({"ingress": ingress, **line}) + b"\n")
        return tell

    def _why(self, ingress: str) -> str:
        """The last warning in its log."""
        own = self._folder / f"router-{ingress}.log"
        log = own if own.exists() else self._folder / "router.log"
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
        warnings = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
        return f": {warnings[-1]}" if warnings else ""


def watched(folder: Path) -> list[dict[str, Any]]:
    """The samples of an arm, in the order in which they were taken."""
    return read_json_lines([folder / FILE]) if (folder / FILE).exists() else []
