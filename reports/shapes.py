"""What run.json and a baseline must look like, so that whoever reads on can rely on it.

A file from elsewhere may be edited, cut, or of another version. The first thing that is not as it must be is named by
its path (`routers.dynamo-kv.ttft_ms.p99`) with what was found; keys that this version does not know are left alone, as
an earlier or later one may have written them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from reports.metric import DISTRIBUTION_KEYS
from reports.metrics_table import METRICS
from reports.records import REPEATS_MAX

STATUSES = ("running", "complete", "partial")
HEALTHS = ("ok", "degraded", "invalid")
COUNTED = ("requests", "errors", "incomplete")  # what every arm knows

Shape = Callable[[Any, str], None]  # raises ShapeError for a value that is not as it must be


class ShapeError(ValueError):
    """Where, what was found, and what must stand there."""


def parse_json(text: str) -> Any:
    """As json.loads, but NaN and infinities, which JSON does not have, are errors. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("brackets within brackets, deeper than anything in a run") from error


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def check_figures(document: Mapping[str, Any]) -> None:
    """What run.json and a baseline have in common: scenario, health and figures. Raises ShapeError."""
    for key, shape in _COMMON.items():
        if key not in document:
            raise ShapeError(f"no key {key!r}")
        shape(document[key], key)
    for place, each in enumerate(document["repeats"]):
        if each["router"] not in document["routers"]:
            raise ShapeError(f"repeats[{place}].router is {each['router']!r}, and routers has none of that name")


def check_run(document: Mapping[str, Any]) -> None:
    """All of run.json."""
    if "status" not in document:
        raise ShapeError("no key 'status'")
    one_of(*STATUSES)(document["status"], "status")
    check_figures(document)
    for key, shape in _OF_A_RUN.items():
        if key not in document:
            raise ShapeError(f"no key {key!r}")
        shape(document[key], key)
    for key, shape in _LATER.items():
        if key in document:
            shape(document[key], key)


def _wrong(value: Any, where: str, wanted: str) -> ShapeError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return ShapeError(f"{where} is {shown if len(shown) <= 40 else shown[:37] + '...'} where {wanted} must stand")


def text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(value, where, "a text")


def number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(value, where, "a number")


def whole(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise _wrong(value, where, "a whole number from 0")


def repeat(value: Any, where: str) -> None:
    whole(value, where)
    if value >= REPEATS_MAX:
        raise _wrong(value, where, f"a repeat below {REPEATS_MAX:,}")


def anything(value: Any, where: str) -> None:
    pass


def one_of(*words: str) -> Shape:
    def shape(value: Any, where: str) -> None:
        if value not in words:
            raise _wrong(value, where, f"one of {', '.join(words)}")

    return shape


def or_null(shape: Shape) -> Shape:
    def check(value: Any, where: str) -> None:
        if value is not None:
            shape(value, where)

    return check


def list_of(shape: Shape, count: int | None = None) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise _wrong(value, where, "a list" if count is None else f"a list of {count}")
        for place, each in enumerate(value):
            shape(each, f"{where}[{place}]")

    return check


def table_of(shape: Shape) -> Shape:
    """Any names, values of one shape."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for name, each in value.items():
            shape(each, f"{where}.{name}")

    return check


def fields(needed: Mapping[str, Shape] | None = None, **known: Shape) -> Shape:
    """An object with some keys; those in `known` may be absent or null."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for name, shape in (needed or {}).items():
            if name not in value:
                raise ShapeError(f"{where} has no key {name!r}")
            shape(value[name], f"{where}.{name}")
        for name, shape in known.items():
            or_null(shape)(value.get(name), f"{where}.{name}")

    return check


def metrics(value: Any, where: str) -> None:
    """One arm's figures; a metric that is not there is unknown."""
    fields(dict.fromkeys(COUNTED, whole))(value, where)
    for name, metric in METRICS.items():
        or_null(_OF_KIND[metric.kind])(value.get(name), f"{where}.{name}")
    table_of(whole)(value.get("placement") or {}, f"{where}.placement")


_OF_KIND: dict[str, Shape] = {
    "distribution": fields(dict.fromkeys(DISTRIBUTION_KEYS, number)),
    "number": number,
    "mapping": table_of(or_null(number)),
}
_SCENARIO = fields(
    name=text,
    about=text,
    slo=table_of(or_null(number)),
    workload=fields(kind=text),
    load=fields(
        driver=text,
        arrival=text,
        rate_per_s=number,
        concurrency=number,
        ramp_s=number,
        burstiness=number,
        api=text,
        model=text,
        stages=list_of(fields({"rate_per_s": number, "duration_s": number})),
    ),
    engine=fields(),
    fleet=fields(),
    faults=fields(),
    expect=list_of(fields(metric=text)),
)
_COMMON: dict[str, Shape] = {
    "scenario": _SCENARIO,
    "mode": text,
    "seed": or_null(whole),
    "environment": table_of(anything),
    "routers": table_of(metrics),
    "repeats": list_of(fields({"router": text, "repeat": repeat, "metrics": metrics})),
    "health": fields({"verdict": one_of(*HEALTHS), "reasons": list_of(text)}),
}
_OF_A_RUN: dict[str, Shape] = {
    "verdict": fields(
        winners=table_of(
            fields(winner=text, best=text, runner_up=text, gain=number, basis=text, interval=list_of(number, 2))
        ),
        sentences=list_of(text),
        flags=list_of(fields({"kind": text, "router": text, "text": text})),
        loads=list_of(text),
        loops=fields(
            {
                "open": text,
                "closed": text,
                "reference": or_null(text),
                "rows": list_of(
                    fields({"address": text, "router": text, "open": number, "closed": number, "apart": number})
                ),
            }
        ),
    ),
    "started_at": or_null(text),
    "wall_s": or_null(number),
}
_STAGE_NUMBERS = ("asked_per_s", "achieved_per_s", "delay_ms_p50", "delay_ms_p99")
_LATER: dict[str, Shape] = {
    "digests": table_of(text),
    "stages": list_of(
        fields(
            {"router": text, "repeat": repeat, "stage": whole, "name": text, "requests": whole, "valid": anything}
            | dict.fromkeys(_STAGE_NUMBERS, number)
        )
    ),
    "churn": list_of(
        fields({"at_s": number, "do": text, "replica": text}, router=text, repeat=repeat, done_at_s=number)
    ),
}
