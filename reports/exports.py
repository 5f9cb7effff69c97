"""A run in the shapes that other tools read, one set of files for each arm.

`vllm`: the JSON of `vllm bench serve`. `aiperf`: its profile as JSON and CSV and its lines per request.
`github-action-benchmark`: two files, since that action takes one direction a file; names are stable from run to run.
What a format does not have is left out; a format whose fields nobody here can check is refused with the way round.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.compare import HEADLINE_ADDRESSES, ROLLOUT_ADDRESSES
from reports.display import label, unit
from reports.errors import ExportError
from reports.export_aiperf import aiperf_csv, aiperf_document, aiperf_lines
from reports.export_vllm import vllm_document
from reports.metrics_table import direction_of, lookup

if TYPE_CHECKING:
    from reports.run import RunResult


def export_run(run: RunResult, name: str, folder: Path | str) -> list[Path]:
    """Writes the files of one format into `folder` and names them."""
    if name in NOT_EXPORTED:
        raise ExportError(f"no export {name!r}: {NOT_EXPORTED[name]}")
    if name not in EXPORTS:
        raise ExportError(f"no export format {name!r}: choose one of {', '.join(EXPORTS)}")
    if not run.repeats:
        raise ExportError(f"{run.folder}: holds no figures, so there is nothing to export: run it to its end")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for file, text in EXPORTS[name](run):
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


def benchmark_entries(run: RunResult, direction: str) -> list[dict[str, Any]]:
    """github-action-benchmark's custom format: headline figures of one direction, `range` from three repeats on."""
    entries = []
    for router, metrics in run.routers.items():
        for address in (*ROLLOUT_ADDRESSES, *HEADLINE_ADDRESSES, "slo_attainment"):
            value = lookup(metrics, address)
            if value is None or direction_of(address) != direction:
                continue
            entry: dict[str, Any] = {
                "name": f"{run.name} / {run.mode} / {router} / {label(address)}",
                "unit": unit(address),
            }
            shown = 100 if entry["unit"] == "%" else 1
            each = [lookup(repeat["metrics"], address) for repeat in run.repeats if repeat["router"] == router]
            known = [shown * found for found in each if found is not None]
            entries.append(entry | {"value": round(shown * value, 6)} | _range(known))
    return entries


def _range(values: list[float]) -> dict[str, str]:
    if len(values) < 3:
        return {}
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return {"range": f"± {deviation:.6g}"}


def _benchmark(run: RunResult) -> Iterator[tuple[str, str]]:
    for file, direction in (
        ("benchmark-smaller-is-better.json", "lower"),
        ("benchmark-bigger-is-better.json", "higher"),
    ):
        yield file, _json(benchmark_entries(run, direction))


def _vllm(run: RunResult) -> Iterator[tuple[str, str]]:
    for stem, router, repeat in _arms(run):
        yield f"vllm-{stem}.json", _json(vllm_document(run, router, repeat))


def _aiperf(run: RunResult) -> Iterator[tuple[str, str]]:
    for stem, router, repeat in _arms(run):
        yield f"{stem}/profile_export_aiperf.json", _json(aiperf_document(run, router, repeat))
        yield f"{stem}/profile_export_aiperf.csv", aiperf_csv(run, router, repeat)
        yield f"{stem}/profile_export.jsonl", "".join(f"{line}\n" for line in aiperf_lines(run, router, repeat))


EXPORTS: dict[str, Callable[[RunResult], Iterator[tuple[str, str]]]] = {
    "vllm": _vllm,
    "aiperf": _aiperf,
    "github-action-benchmark": _benchmark,
}


NOT_EXPORTED = {
    "llm-d": "the fields and units of its report v0.2.1 are its converters' to decide; export vllm or aiperf and let "
    "llm-d-benchmark's own converter read that"
}


def _arms(run: RunResult) -> Iterator[tuple[str, str, int]]:
    """A file name for each arm; the repeat is in it where there are several."""
    several = len(run.repeats) > len(run.routers)
    used: set[str] = set()
    for each in run.repeats:
        router, repeat = each["router"], each["repeat"]
        stem = re.sub(r"[^\w.-]+", "_", router) + (f".{repeat}" if several else "")
        while stem in used:
            stem += "_"
        used.add(stem)
        yield stem, router, repeat


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
