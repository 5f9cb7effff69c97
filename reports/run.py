"""A run as files: assembled once at the end by `finish_run`, read back by `read_run`.

run.json holds the figures, the parquet files the rows they came from. Floats are rounded to six decimals, which is a
nanosecond in a figure of milliseconds: beyond that, figures are an accident of the order of additions. Nothing but
`environment`, `started_at` and `wall_s` depends on when or where a simulation ran, and report.md shows none of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from reports.arms import arm_metrics, arms_of
from reports.compare import DECIMALS, HEADLINE_ADDRESSES, ROLLOUT_ADDRESSES, call, make_arms
from reports.errors import RecordError, RunFolderError
from reports.health import HealthFacts, health
from reports.html import write_html
from reports.markdown import write_markdown
from reports.metrics_table import METRICS
from reports.records import Table, fleet_frame, read_parquet, requests_frame, write_parquet
from reports.why import OUTCOMES, ROLLOUT_OUTCOMES, flags, has_rollouts, sentences

SCHEMA_VERSION = 1
STATUSES = ("running", "complete", "partial")
HEADER_KEYS = ("status", "scenario", "mode", "seed", "environment", "started_at", "wall_s")

Status = Literal["running", "complete", "partial"]


@dataclass(frozen=True)
class RunResult:
    folder: Path
    status: Status
    scenario: Mapping[str, Any]
    mode: str
    seed: int | None
    environment: Mapping[str, Any]
    routers: Mapping[str, Mapping[str, Any]]  # metrics over all repeats
    repeats: Sequence[Mapping[str, Any]]  # {"router", "repeat", "metrics"}
    health: Mapping[str, Any]
    verdict: Mapping[str, Any] = field(default_factory=dict)  # winners, sentences, flags
    started_at: str | None = None
    wall_s: float | None = None

    @property
    def name(self) -> str:
        return str(self.scenario.get("name") or self.folder.name)

    @cached_property
    def requests(self) -> pd.DataFrame:
        path = self.folder / "requests.parquet"
        return read_parquet(path) if path.exists() else requests_frame([])

    @cached_property
    def fleet(self) -> pd.DataFrame:
        path = self.folder / "fleet.parquet"
        return read_parquet(path) if path.exists() else fleet_frame([])

    def with_rows(self, requests: pd.DataFrame, fleet: pd.DataFrame, verdict: Mapping[str, Any]) -> RunResult:
        """A copy that holds its rows already and need not read them."""
        copy = replace(self, verdict=verdict)
        copy.__dict__["requests"], copy.__dict__["fleet"] = requests, fleet
        return copy

    def to_json(self) -> dict[str, Any]:
        """The content of run.json, keys in a fixed order."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "scenario": self.scenario,
            "mode": self.mode,
            "seed": self.seed,
            "environment": self.environment,
            "routers": _rounded(self.routers),
            "repeats": _rounded(self.repeats),
            "health": self.health,
            "verdict": _rounded(self.verdict),
            "started_at": self.started_at,
            "wall_s": _rounded(self.wall_s),
        }


def start_run(folder: Path | str, header: Mapping[str, Any]) -> None:
    """Writes a run.json with status `running`, so that whatever a killed run leaves behind can be read."""
    values = _header({**header, "status": "running"})
    pending = {"verdict": "invalid", "reasons": ["the run has not ended, or was killed: run it again to the end"]}
    write_run(RunResult(folder=Path(folder), routers={}, repeats=[], health=pending, **values))


def finish_run(
    folder: Path | str,
    header: Mapping[str, Any],
    requests: Table,
    fleet: Table,
    *,
    routers: Sequence[str] = (),
    ceilings: Mapping[tuple[str, int], tuple[int, int | None]] | None = None,
    replicas: Iterable[str] = (),
    facts: HealthFacts | None = None,
    reports: bool = True,
) -> RunResult:
    """Computes every figure and writes run.json, the two parquet files and, with `reports`, report.md and report.html.

    `header` has the keys HEADER_KEYS; bounds come from its scenario's `slo`. `routers` gives their order and lists arms
    that left no row; `ceilings` holds, per (router, repeat), the tokens that one infinite cache would hit on the steady
    requests and how many prompt tokens these have. `replicas` names those that may never show up in the rows.
    """
    folder = Path(folder)
    values = _header(header)
    rows, samples, known_replicas = requests_frame(requests), fleet_frame(fleet), tuple(replicas)
    slo = dict(values["scenario"].get("slo") or {})
    pooled, each = _figures(rows, samples, routers, slo, ceilings or {}, known_replicas)
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(rows, folder / "requests.parquet")
    write_parquet(samples, folder / "fleet.parquet")
    run = RunResult(
        folder=folder,
        routers=pooled,
        repeats=each,
        health=health(rows, samples, facts),
        **values,
    ).with_rows(rows, samples, verdict(rows, samples, pooled, each, slo))
    if reports:
        render_reports(run)
    write_run(run)  # last: whatever stops this before leaves a run that does not call itself complete
    return run


def render_reports(run: RunResult) -> None:
    """report.md and report.html, also for a run that was read back."""
    write_markdown(run, run.folder / "report.md")
    write_html(run, run.folder / "report.html")


def read_run(folder: Path | str) -> RunResult:
    """A run of any status; where it was killed, figures are absent and the rows written so far are there."""
    path = Path(folder) / "run.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(f"{folder}: no run.json: give the folder that `run` wrote") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error}): the run was killed while writing it; run it again"
        ) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version {version!r} where {SCHEMA_VERSION} is read: use the version of "
            "routebench that wrote it"
        )
    try:
        fields = {key: document[key] for key in (*HEADER_KEYS, "routers", "repeats", "health", "verdict")}
    except KeyError as error:
        raise RunFolderError(f"{path}: no key {error}: the file was edited; run it again") from error
    fields["routers"] = {name: all_metrics(metrics) for name, metrics in fields["routers"].items()}
    fields["repeats"] = [{**each, "metrics": all_metrics(each["metrics"])} for each in fields["repeats"]]
    return RunResult(folder=Path(folder), **fields)


def all_metrics(known: Mapping[str, Any]) -> dict[str, Any]:
    """Every metric of the table, in its order; what a file of an earlier version does not have is unknown."""
    return {name: known.get(name) for name in METRICS}


def verdict(
    requests: pd.DataFrame,
    fleet: pd.DataFrame,
    routers: Mapping[str, Mapping[str, Any]],
    repeats: Sequence[Mapping[str, Any]],
    slo: Mapping[str, float],
) -> dict[str, Any]:
    """Who wins each headline figure, in numbers and in words, and what to beware of."""
    arms = make_arms(requests, fleet, routers, repeats)
    rollouts = has_rollouts(routers)
    addresses = dict.fromkeys(
        (*(ROLLOUT_ADDRESSES if rollouts else ()), *HEADLINE_ADDRESSES, *(ROLLOUT_OUTCOMES if rollouts else OUTCOMES))
    )
    if slo:
        addresses |= dict.fromkeys(("slo_attainment", "request_goodput"))
    calls = {address: call(address, arms, slo) for address in addresses}
    return {
        "winners": {address: _call_json(found) for address, found in calls.items()},
        "sentences": sentences(routers, calls),
        "flags": [asdict(flag) for flag in flags(routers)],
    }


def _figures(
    rows: pd.DataFrame,
    samples: pd.DataFrame,
    names: Sequence[str],
    slo: dict[str, float],
    ceilings: Mapping[tuple[str, int], tuple[int, int | None]],
    replicas: tuple[str, ...],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arms = arms_of(rows, samples)
    order = list(dict.fromkeys((*names, *(router for router, _ in arms))))
    pooled: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    for router in order:
        own, own_samples = rows[rows["router"] == router], samples[samples["router"] == router]
        repeats = [repeat for name, repeat in arms if name == router]
        known = [ceilings[router, repeat] for repeat in repeats if (router, repeat) in ceilings]
        total: tuple[int | None, int | None] = (None, None)
        if known and len(known) == len(repeats):
            prompts = [prompt for _, prompt in known]
            total = (sum(cached for cached, _ in known), None if None in prompts else sum(filter(None, prompts)))
        pooled[router] = _metrics(own, own_samples, slo, total, replicas)
        for repeat in repeats:
            ceiling = ceilings.get((router, repeat), (None, None))
            own_repeat, its_samples = own[own["repeat"] == repeat], own_samples[own_samples["repeat"] == repeat]
            metrics = pooled[router] if len(repeats) == 1 else _metrics(own_repeat, its_samples, slo, ceiling, replicas)
            each.append({"router": router, "repeat": repeat, "metrics": metrics})
    return pooled, each


def _metrics(
    rows: pd.DataFrame,
    samples: pd.DataFrame,
    slo: dict[str, float],
    ceiling: tuple[int | None, int | None],
    replicas: tuple[str, ...],
) -> dict[str, Any]:
    return arm_metrics(
        rows, samples, slo=slo, ceiling_cached_tokens=ceiling[0], ceiling_prompt_tokens=ceiling[1], replicas=replicas
    )


def _header(header: Mapping[str, Any]) -> dict[str, Any]:
    unknown, missing = set(header) - set(HEADER_KEYS), set(HEADER_KEYS) - set(header) - {"started_at", "wall_s"}
    if unknown or missing:
        raise RecordError(
            f"run header: {_named('unknown', unknown)}{_named('missing', missing)}keys are {', '.join(HEADER_KEYS)}"
        )
    if header["status"] not in STATUSES:
        raise RecordError(f"run status {header['status']!r} is not known: use one of {', '.join(STATUSES)}")
    return {"started_at": None, "wall_s": None, **header}


def _named(what: str, names: set[str]) -> str:
    return f"{what} {', '.join(sorted(names))}; " if names else ""


def _call_json(found: Any) -> dict[str, Any]:
    document = asdict(found)
    del document["address"]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in document.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DECIMALS) + 0.0  # no negative zero
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


def write_run(run: RunResult) -> None:
    """run.json, in one rename, so that a reader never finds half a file."""
    run.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    part = run.folder / "run.json.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(run.folder / "run.json")
