"""A baseline: the figures of a run as a small JSON that lives in a user's git, and is read back as a run without rows.

It holds what the gate needs and nothing else: scenario, health, every figure that is known, pooled and per repeat. What
is left out is unknown, so a figure that a later version adds is not taken for 0. Nothing in it depends on when it was
saved, so saving the same simulation again changes no byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.errors import BaselineError, RunFolderError
from reports.run import RunResult, all_metrics, read_run
from reports.shapes import ShapeError, check_figures, parse_json

KIND = "routebench-baseline"
SCHEMA_VERSION = 1
FOLDER = "baselines"  # where `baseline save` writes and `gate` looks for a bare name
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_KEPT = ("scenario", "mode", "seed", "health")
_MACHINE = ("python", "platform", "cores", "commit", "packages")


def baseline_document(run: RunResult) -> dict[str, Any]:
    several = len(run.repeats) > len(run.routers)
    figures = run.to_json()  # rounded, as a run folder holds them
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        **{key: figures[key] for key in _KEPT},
        # Of a live run, what machine it was; a simulation is the same everywhere.
        "environment": {key: run.environment.get(key) for key in _MACHINE} if run.mode == "live" else {},
        "routers": {name: _known(metrics) for name, metrics in figures["routers"].items()},
        "repeats": [{**each, "metrics": _known(each["metrics"])} for each in figures["repeats"]] if several else [],
    }


def save_baseline(
    run: RunResult, name: str, folder: Path | str = FOLDER, *, replace: bool = False, force: bool = False
) -> Path:
    """Writes `folder/name.json`. Refuses a run that is no measure for others, unless forced."""
    if not NAME.fullmatch(name):
        raise BaselineError(f"baseline name {name!r}: use letters, digits and . _ -, so that it can be a file name")
    if run.status != "complete" or run.health.get("verdict") == "invalid":
        why = f"it is {run.status}" if run.status != "complete" else f"its health is invalid: {_first(run)}"
        if not force:
            raise BaselineError(f"{run.folder} is no baseline, since {why}; run it again, or use --force")
    path = Path(folder) / f"{name}.json"
    if path.exists() and not replace:
        raise BaselineError(f"{path} exists already: choose another --name, or --replace it")
    text = json.dumps(baseline_document(run), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise BaselineError(f"{path}: cannot be written ({error.strerror}): choose another --dir") from error
    return path


def list_baselines(folder: Path | str = FOLDER) -> dict[str, RunResult]:
    """Every baseline of a folder by name, sorted; other JSON files are left out."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        document = _document(path)
        if isinstance(document, dict) and document.get("kind") == KIND:
            found[path.stem] = _run_of(document, path)
    return found


def read_figures(place: Path | str, folder: Path | str = FOLDER) -> RunResult:
    """A run folder, a baseline's file, or the name of a baseline in `folder`, as a run; a baseline has no rows.

    A run's rows are read to see that they are sound and its own, though only its figures are asked for.
    """
    path = Path(place)
    if path.is_dir():
        if not (path / "run.json").exists() and (path / "live" / "run.json").exists():
            raise RunFolderError(f"{path} holds a run of each mode: give {path / 'live'} or {path / 'sim'}")
        run = read_run(path)
        run.check_rows()
        return run
    named = Path(folder) / f"{path.name}.json"
    if not path.exists() and path.name == str(place) and named.exists():
        path = named
    if not path.exists():
        raise BaselineError(
            f"{place}: no run folder, no file, and no baseline of that name in {folder}/: "
            "see `routebench baseline list`, or make one with `routebench baseline save RUN`"
        )
    document = _document(path)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        hint = "give its folder" if path.name == "run.json" else "make one with `routebench baseline save RUN`"
        raise BaselineError(f"{path} is no baseline: {hint}")
    return _run_of(document, path)


def _document(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BaselineError(f"{path}: cannot be read ({error}): restore it, or save it again") from error


def _run_of(document: Mapping[str, Any], path: Path) -> RunResult:
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BaselineError(
            f"{path}: schema_version {version!r} where {SCHEMA_VERSION} is read: use the version of routebench that "
            "wrote it, or save it again"
        )
    try:
        check_figures(document)
    except ShapeError as error:
        raise BaselineError(f"{path}: {error}: the file was changed; restore it, or save it again") from error
    routers = {name: all_metrics(metrics) for name, metrics in document["routers"].items()}
    repeats = [{**each, "metrics": all_metrics(each["metrics"])} for each in document["repeats"]] or [
        {"router": name, "repeat": 0, "metrics": metrics} for name, metrics in routers.items()
    ]
    kept = {key: document[key] for key in (*_KEPT, "environment")}
    return RunResult(folder=path, status="complete", routers=routers, repeats=repeats, **kept)


def _known(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _known(part) if isinstance(part, Mapping) else part for key, part in value.items() if part is not None}


def _first(run: RunResult) -> str:
    return next(iter(run.health.get("reasons", ())), "no reason given")
