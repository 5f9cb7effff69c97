"""report.html: one file that opens anywhere, offline, in light and dark.

The verdict and the health of the run stand on top in words, then the table, then plots with hover, then every figure
with its formula. plotly.js travels inside, packed (it is most of the page), and the page unpacks it in the browser;
nothing is fetched.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports.compare import CONFIDENCE, LOST_MORE, MEANINGFUL, make_arms, outcome
from reports.display import cell, label, number, percent, shares, unit, value_text
from reports.ingresses import INGRESS_HEADS, INGRESS_NOTE, ingress_rows
from reports.intervals import COMPARED_AS_SHARE
from reports.load_line import load_lines
from reports.loops import loop_rows
from reports.metric import DISTRIBUTION_KEYS
from reports.metrics_table import METRICS, direction_of, lookup
from reports.plots import plots
from reports.stages import STAGE_HEADS, stage_rows
from reports.table_rows import PLACEMENT_ROW, table_addresses
from reports.unfinished import WHERE_LOST, where_unfinished

if TYPE_CHECKING:
    from reports.run import RunResult

SECTIONS = {
    "rollouts": ("Rollouts", "Reinforcement learning waits for the slowest member of every step."),
    "latency": ("Latency", "Share of successes that were at least as fast as the value below; further left is better."),
    "sessions": ("Sessions", "What single conversations went through, and what their time was spent on."),
    "cache": ("Cache and placement", "Where requests went, and how much of their prompts was already there."),
    "load": (
        "Load of each replica over time",
        "One panel per router, the same scale in all; lines far apart mean an uneven load.",
    ),
}


def write_html(run: RunResult, path: Path | str) -> None:
    Path(path).write_text(html(run), encoding="utf-8", newline="\n")


def html(run: RunResult) -> str:
    drawn = plots(make_arms(run.requests, run.fleet, run.routers), run.router_samples, run.churn) if run.routers else []
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            names=list(run.routers),
            loads=load_lines(run),
            standing=standing(run),
            where_lost=WHERE_LOST,
            lost=where_unfinished(run.requests),
            ingress_heads=INGRESS_HEADS,
            ingress_note=INGRESS_NOTE,
            ingresses=ingress_rows(run),
            stage_heads=STAGE_HEADS,
            stages=stage_rows(run.stages),
            loops=loop_rows(run.verdict.get("loops")),
            requests=number(sum(metrics["requests"] for metrics in run.routers.values()), 0),
            repeats=1 + max((repeat["repeat"] for repeat in run.repeats), default=0),
            comparison=list(comparison_rows(run)),
            distributions=[
                (metric, _statistics(run, metric.name)) for metric in METRICS.values() if metric.kind == "distribution"
            ],
            numbers=list(_numbers(run)),
            statistic_names=DISTRIBUTION_KEYS,
            metrics=METRICS.values(),
            sections=[(key, *SECTIONS[key], [plot for plot in drawn if plot.section == key]) for key in SECTIONS],
            figures=script_json([asdict(plot) for plot in drawn]),
            scenario=json.dumps(run.scenario, indent=2, ensure_ascii=False),
            environment=json.dumps(run.environment, indent=2, ensure_ascii=False),
            confidence=f"{CONFIDENCE:.0%}",
            meaningful=f"{MEANINGFUL:.1%}",
            style=asset("report.css"),
            code=asset("report.js"),
            plotly=Markup(packed_plotly()),
        )
    )


def standing(run: RunResult) -> str:
    """What the verdict on the run's health means for its figures; a simulation has no machine that could disturb it."""
    verdict = run.health["verdict"]
    if verdict == "ok":
        beware = run.verdict.get("flags")
        return "The run measured what it should; beware of what follows." if beware else "Nothing speaks against it."
    if verdict == "degraded":
        exact = run.mode == "sim"
        return "Exact, but read this first." if exact else "Small differences may not come from the routers."
    return "Do not trust these figures."


def page_environment() -> Environment:
    """Where this package's templates are filled in."""
    return Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def comparison_rows(run: RunResult) -> Iterator[dict[str, Any]]:
    """Rows of the main table: texts, a bar for each value, the winner, and how sure that is."""
    winners = run.verdict.get("winners", {})
    for address in table_addresses(run.scenario, run.routers):
        if address == PLACEMENT_ROW:
            texts = [shares(metrics["placement"]) for metrics in run.routers.values()]
            yield {
                "label": "Placement",
                "unit": "% each",
                "cells": [(text, None, False) for text in texts],
                "winner": "",
                "won": False,
                "detail": "",
                "arrow": "",
            }
            continue
        values = [lookup(metrics, address) for metrics in run.routers.values()]
        most = max((abs(value) for value in values if value is not None), default=0)
        found = winners.get(address, {})
        cells = [
            (
                cell(run.routers[name], address),
                None if value is None or not most else round(100 * abs(value) / most),
                found.get("winner") == name,
            )
            for name, value in zip(run.routers, values, strict=True)
        ]
        yield {
            "label": label(address),
            "unit": unit(address),
            "cells": cells,
            "winner": outcome(found),
            "won": bool(found.get("winner")),
            "detail": _detail(address, found),
            "arrow": {"lower": "lower is better", "higher": "higher is better", "none": ""}[direction_of(address)],
        }


def _detail(address: str, found: Mapping[str, Any]) -> str:
    if not found.get("best"):
        return ""
    if found.get("basis") == LOST_MORE:
        return f"{found['best']} is ahead, but lost more requests, which are in no time"
    if not found.get("winner"):
        return f"{found['best']} or {found['runner_up']}"
    text = f"{percent(found['gain'])} better than {found['runner_up']}"
    if found.get("interval"):
        least = min(abs(bound) for bound in found["interval"])
        if address in COMPARED_AS_SHARE:
            text += f"; by at least {number(100 * least, 1)} points of the requests"
        else:
            text += f"; by at least {value_text(address, least)} {points(address)}"
    return text


def points(address: str) -> str:
    """The unit of a difference: of two shares it is points, not percent."""
    own = unit(address)
    return "points" if own == "%" else own


def _statistics(run: RunResult, name: str) -> list[tuple[str, list[str]]]:
    found = [(router, metrics[name]) for router, metrics in run.routers.items()]
    return [
        (router, [value_text(f"{name}.{key}", values[key]) for key in DISTRIBUTION_KEYS])
        for router, values in found
        if values
    ]


def _numbers(run: RunResult) -> Iterator[tuple[str, str, list[str]]]:
    for metric in METRICS.values():
        if metric.kind == "distribution":
            continue
        for address in metric.addresses():
            yield label(address), unit(address), [cell(metrics, address) for metrics in run.routers.values()]


def script_json(value: Any) -> Markup:
    """JSON that can stand inside a script element whatever the names in it are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@cache
def packed_plotly() -> str:
    """plotly.js as the installed package ships it, gzip in base64."""
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, 9, mtime=0)).decode("ascii")


def asset(name: str) -> Markup:
    """A file of the page as it is."""
    return Markup(resources.files("reports").joinpath("templates", name).read_text(encoding="utf-8"))
