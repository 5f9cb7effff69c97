"""A run as files: assembled once at the end by `finish_run`, read back by `read_run`.

run.json holds the figures, the parquet files the rows they came from, and `digests` tells whether they still do.
Floats are rounded to six decimals, which is a nanosecond in a figure of milliseconds: beyond that, figures are an
accident of the order of additions. Nothing but `environment`, `started_at` and `wall_s` depends on when or where a
simulation ran, and report.md shows none of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from reports.arms import arm_metrics, arms_of
from reports.compare import DECIMALS, call, make_arms
from reports.digests import digest
from reports.errors import RecordError, RunFolderError
from reports.health import HealthFacts, health
from reports.html import write_html
from reports.markdown import write_markdown
from reports.metrics_table import METRICS
from reports.records import (
    OFF_RATE,
    Table,
    check_order,
    fleet_frame,
    read_parquet,
    requests_frame,
    router_frame,
    write_parquet,
)
from reports.shapes import STATUSES, ShapeError, check_run, parse_json
from reports.stages import stages_of, without_off_rate
from reports.table_rows import PLACEMENT_ROW, table_addresses
from reports.unfinished import unfinished
from reports.why import OUTCOMES, ROLLOUT_OUTCOMES, has_rollouts, sentences, told_flags

SCHEMA_VERSION = 1
REQUESTS_FILE, FLEET_FILE, ROUTER_FILE = "requests.parquet", "fleet.parquet", "router.parquet"
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
    stages: Sequence[Mapping[str, Any]] = ()  # of an open loop: what was asked and what was sent
    churn: Sequence[Mapping[str, Any]] = ()  # {"router", "repeat", "at_s", "do", "replica", "done_at_s"}
    digests: Mapping[str, str] = field(default_factory=dict)  # file -> digest of its rows; none in earlier versions

    @property
    def name(self) -> str:
        return str(self.scenario.get("name") or self.folder.name)

    @cached_property
    def requests(self) -> pd.DataFrame:
        found = self._rows(REQUESTS_FILE, requests_frame)
        steady = found.loc[found["phase"] == "steady", "router"].value_counts()
        for name, metrics in self.routers.items():
            if steady.get(name, 0) != metrics["requests"]:
                raise RecordError(
                    f"{self.folder / REQUESTS_FILE}: has {steady.get(name, 0):,} measured requests of {name} "
                    f"where run.json counts {metrics['requests']:,}: the two are not of one run; restore them, or run "
                    "it again"
                )
        try:
            check_order(found)
        except RecordError as error:
            raise RecordError(f"{self.folder / REQUESTS_FILE}: {error}") from error
        return found

    @cached_property
    def fleet(self) -> pd.DataFrame:
        return self._rows(FLEET_FILE, fleet_frame)

    @cached_property
    def router_samples(self) -> pd.DataFrame:
        """Empty where no router was sampled, and then without a file."""
        there = ROUTER_FILE in self.digests or (self.folder / ROUTER_FILE).exists()
        return self._rows(ROUTER_FILE, router_frame) if there else router_frame([])

    def _rows(self, file: str, frame_of: Callable[[Table], pd.DataFrame]) -> pd.DataFrame:
        """Rows of a finished run must be there; of one that was killed there may be none."""
        path, empty = self.folder / file, frame_of([])
        if not path.exists() and not self.routers:
            return empty
        found = read_parquet(path)
        if list(found.columns) != list(empty.columns):
            raise RecordError(f"{path}: holds another table of the run: give the file its own name, or run it again")
        strange = sorted(set(found["router"]) - set(self.routers)) if self.routers else []
        if strange:
            raise RecordError(
                f"{path}: has rows of {strange[0]!r}, and run.json knows no such router: the two are not of one run; "
                "restore them, or run it again"
            )
        if (kept := self.digests.get(file)) is not None and kept != digest(found):
            raise RecordError(
                f"{path}: holds other rows than run.json was computed from: the file was changed or is of another run; "
                "restore it, or run it again"
            )
        return found

    def check_rows(self) -> None:
        """Reads every row of a finished run, for whoever relies on figures alone. Raises RecordError for rows that
        cannot be, or are not those that the figures came from."""
        if self.status == "complete":
            _ = self.requests, self.fleet, self.router_samples

    def with_rows(
        self, requests: pd.DataFrame, fleet: pd.DataFrame, router_samples: pd.DataFrame, verdict: Mapping[str, Any]
    ) -> RunResult:
        """A copy that holds its rows already and need not read them."""
        tables = {REQUESTS_FILE: requests, FLEET_FILE: fleet, ROUTER_FILE: router_samples}
        kept = {file: digest(table) for file, table in tables.items() if file != ROUTER_FILE or len(table)}
        copy = replace(self, verdict=verdict, digests=kept)
        copy.__dict__.update(requests=requests, fleet=fleet, router_samples=router_samples)
        return copy

    def write_rows(self) -> None:
        write_parquet(self.requests, self.folder / REQUESTS_FILE)
        write_parquet(self.fleet, self.folder / FLEET_FILE)
        if len(self.router_samples):
            write_parquet(self.router_samples, self.folder / ROUTER_FILE)

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
            **({"stages": _rounded(list(self.stages))} if self.stages else {}),
            **({"churn": _rounded(list(self.churn))} if self.churn else {}),
            **({"digests": self.digests} if self.digests else {}),
            **({"unfinished": found} if (found := unfinished(self.requests)) else {}),
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
    router_samples: Table = (),
    distinct_prompts: Mapping[tuple[str, int], int] | None = None,
    churn: Sequence[Mapping[str, Any]] = (),
    facts: HealthFacts | None = None,
    reports: bool = True,
) -> RunResult:
    """Computes every figure and writes run.json, the parquet files and, with `reports`, report.md and report.html.

    `header` has the keys HEADER_KEYS; bounds come from its scenario's `slo`. `routers` gives their order and lists arms
    that left no row; `ceilings` holds, per (router, repeat), the tokens that one infinite cache would hit on the
    requests of the hit rate and how many prompt tokens these have (None: as the rows say); `distinct_prompts`, per
    arm, the different prompts of its steady successes. `replicas` names those that may never show up in the rows;
    `churn` lists replicas that came and went.
    """
    folder = Path(folder)
    values = _header(header)
    load = values["scenario"].get("load") or {}
    rows = requests_frame(requests)
    stages = stages_of(rows, values["scenario"])
    rows, samples, processes = without_off_rate(rows, stages, load), fleet_frame(fleet), router_frame(router_samples)
    slo = dict(values["scenario"].get("slo") or {})
    known = _Known(slo, ceilings or {}, distinct_prompts or {}, tuple(replicas))
    pooled, each = _figures(rows, samples, processes, routers, known)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunResult(
        folder=folder,
        routers=pooled,
        repeats=each,
        health=health(rows, samples, facts, stages),
        churn=churn,
        stages=stages,
        **values,
    ).with_rows(rows, samples, processes, verdict(rows, samples, pooled, each, values["scenario"]))
    run.write_rows()
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
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(f"{folder}: no run.json: give the folder that `run` wrote") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error}): the run was killed while writing it, or the file was changed; run it "
            "again"
        ) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version {version!r} where {SCHEMA_VERSION} is read: use the version of "
            "routebench that wrote it"
        )
    try:
        check_run(document)
    except ShapeError as error:
        raise RunFolderError(f"{path}: {error}: the file was changed; restore it, or run it again") from error
    kept = (*HEADER_KEYS, "routers", "repeats", "health", "verdict", "stages", "churn", "digests")
    fields = {key: document[key] for key in kept if key in document}
    fields["verdict"] = {key: value for key, value in fields["verdict"].items() if value is not None}
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
    scenario: Mapping[str, Any],
) -> dict[str, Any]:
    """Who wins each figure of the table, in numbers and in words, and what to beware of."""
    arms = make_arms(requests, fleet, routers, repeats)
    slo = dict(scenario.get("slo") or {})
    outcomes = ROLLOUT_OUTCOMES if has_rollouts(routers) else OUTCOMES
    addresses = dict.fromkeys((*table_addresses(scenario, routers), *outcomes, *(("request_goodput",) if slo else ())))
    calls = {address: call(address, arms, slo) for address in addresses if address != PLACEMENT_ROW}
    return {
        "winners": {address: _call_json(found) for address, found in calls.items()},
        "sentences": sentences(routers, calls),
        "flags": [asdict(flag) for flag in told_flags(routers)],
    }


@dataclass(frozen=True, slots=True)
class _Known:
    """What figures need besides rows."""

    slo: Mapping[str, float]
    ceilings: Mapping[tuple[str, int], tuple[int, int | None]]
    distinct: Mapping[tuple[str, int], int]
    replicas: tuple[str, ...]

    def ceiling(self, router: str, repeats: Sequence[int]) -> tuple[int | None, int | None]:
        """Of all these repeats together; unknown where one of them is."""
        known = [self.ceilings[router, repeat] for repeat in repeats if (router, repeat) in self.ceilings]
        if not known or len(known) < len(repeats):
            return None, None
        prompts = [prompt for _, prompt in known]
        return sum(cached for cached, _ in known), None if None in prompts else sum(filter(None, prompts))

    def distinct_prompts(self, router: str, repeats: Sequence[int]) -> int | None:
        """Every repeat has prompts of its own."""
        known = [self.distinct[router, repeat] for repeat in repeats if (router, repeat) in self.distinct]
        return sum(known) if known and len(known) == len(repeats) else None


def _figures(
    rows: pd.DataFrame, samples: pd.DataFrame, processes: pd.DataFrame, names: Sequence[str], known: _Known
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arms = arms_of(rows, samples)
    pooled: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    for router in dict.fromkeys((*names, *(router for router, _ in arms))):
        own = [frame[frame["router"] == router] for frame in (rows, samples, processes)]
        repeats = [repeat for name, repeat in arms if name == router]
        pooled[router] = _metrics(own, router, repeats, known)
        for repeat in repeats:
            metrics = pooled[router]
            if len(repeats) > 1:
                metrics = _metrics([frame[frame["repeat"] == repeat] for frame in own], router, [repeat], known)
            each.append({"router": router, "repeat": repeat, "metrics": metrics})
    return pooled, each


def _metrics(frames: Sequence[pd.DataFrame], router: str, repeats: Sequence[int], known: _Known) -> dict[str, Any]:
    rows, samples, processes = frames
    whole = not (rows["phase"] == OFF_RATE).any()  # what was left out is in these two
    ceiling = known.ceiling(router, repeats) if whole else (None, None)
    return arm_metrics(
        rows,
        samples,
        slo=known.slo,
        ceiling_cached_tokens=ceiling[0],
        ceiling_prompt_tokens=ceiling[1],
        distinct_prompts=known.distinct_prompts(router, repeats) if whole else None,
        replicas=known.replicas,
        router_samples=processes,
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
