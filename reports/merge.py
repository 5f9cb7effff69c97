"""Several runs as one comparison: their routers side by side, each with the figures that its own run computed.

Nothing is computed anew but who wins. A router name that two runs share gets its run's folder as a suffix. Where runs
asked for different things, sessions of one name are not the same sessions, so they are kept apart and the difference is
told as a reason to call the comparison degraded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from reports.comparable import ASKED, different
from reports.display import join
from reports.errors import ReportError
from reports.load_line import load_line
from reports.loops import compare_loops, loop_of, loop_sentences
from reports.records import fleet_frame, requests_frame, router_frame
from reports.run import RunResult, render_reports, verdict, write_run

VERDICTS = ("ok", "degraded", "invalid")
_ASKED = set(ASKED.values())


def merge_runs(runs: Sequence[RunResult], folder: Path | str, *, reports: bool = True) -> RunResult:
    """Writes a run folder that holds the arms of all `runs`, the first one's scenario, and the worst health."""
    if len(runs) < 2:
        raise ReportError("one run alone is no comparison of runs: name at least two run folders")
    labels = _labels(runs)
    names = Counter(name for run in runs for name in run.routers)
    modes = {run.mode for run in runs}
    apart = [list(different(run, runs[0], labels[0])) for run in runs]
    requests, fleets, samples, repeats, reasons = [], [], [], [], []
    renamings: list[dict[str, str]] = []
    routers: dict[str, Any] = {}
    for run, label, gaps in zip(runs, labels, apart, strict=True):
        renamed = {name: name if names[name] == 1 else f"{name}@{label}" for name in run.routers}
        renamings.append(renamed)
        rows = run.requests.assign(router=run.requests["router"].map(renamed))
        if gaps:
            rows["session"] = f"{label}/" + rows["session"]
        requests.append(requests_frame(rows))
        fleets.append(fleet_frame(run.fleet.assign(router=run.fleet["router"].map(renamed))))
        samples.append(router_frame(run.router_samples.assign(router=run.router_samples["router"].map(renamed))))
        routers |= {renamed[name]: metrics for name, metrics in run.routers.items()}
        repeats += [{**each, "router": renamed[each["router"]]} for each in run.repeats]
        reasons += [f"{label}: {reason}" for reason in run.health["reasons"]]
        reasons += [f"{label} is not the same experiment as {labels[0]}: {text}" for _, text in gaps]
    worst = max((run.health["verdict"] for run in runs), key=VERDICTS.index)
    merged = RunResult(
        folder=Path(folder),
        status="complete" if all(run.status == "complete" for run in runs) else "partial",
        scenario={**runs[0].scenario, "name": " + ".join(dict.fromkeys(run.name for run in runs))},
        mode=runs[0].mode if len(modes) == 1 else " and ".join(sorted(modes)),
        seed=runs[0].seed,
        environment={label: run.environment for label, run in zip(labels, runs, strict=True)},
        routers=routers,
        repeats=repeats,
        health={"verdict": "degraded" if worst == "ok" and any(apart) else worst, "reasons": reasons},
        churn=[
            {**each, "router": names_of[each["router"]]}
            for run, names_of in zip(runs, renamings, strict=True)
            for each in run.churn
        ],
    )
    rows, fleet = _joined(requests, requests_frame), _joined(fleets, fleet_frame)
    found = verdict(rows, fleet, routers, repeats, merged.scenario)
    lines = {label: load_line(run) for run, label in zip(runs, labels, strict=True)}
    if len(set(lines.values())) > 1:
        found["loads"] = [f"{label}: {line}" for label, line in lines.items()]
    if loops := compare_loops(runs, labels):
        open_names = {
            names_of[name]
            for run, names_of in zip(runs, renamings, strict=True)
            if loop_of(run.scenario) == "open"
            for name in run.routers
        }
        primary = {name: metrics for name, metrics in routers.items() if name in open_names}
        own = verdict(rows, fleet, primary, repeats, merged.scenario)["sentences"]
        found |= {"loops": loops, "sentences": [*loop_sentences(loops), *own]}
    elif other := [name for name, gaps in zip(labels, apart, strict=True) if {code for code, _ in gaps} & _ASKED]:
        are = "is another experiment" if len(other) == 1 else "are other experiments"
        told = f"Beware: {join(other)} {are} than {labels[0]}: this compares what was asked as much as who was asked."
        found["sentences"] = [told, *found["sentences"]]
    merged = merged.with_rows(rows, fleet, _joined(samples, router_frame), found)
    merged.folder.mkdir(parents=True, exist_ok=True)
    merged.write_rows()
    write_run(merged)
    if reports:
        render_reports(merged)
    return merged


def _joined(frames: Sequence[pd.DataFrame], empty: Any) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    joined: pd.DataFrame = pd.concat(filled, ignore_index=True) if filled else empty([])
    return joined


def _labels(runs: Sequence[RunResult]) -> list[str]:
    """The shortest end of each path that tells the folders apart."""
    paths = [run.folder.resolve().parts for run in runs]
    if len(set(paths)) < len(paths):
        raise ReportError("a run folder is named twice: name each once")
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path[-depth:]) for path in paths]
