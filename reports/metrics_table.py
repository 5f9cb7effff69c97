"""The one table of metrics: name, unit, direction, formula, when it is null.

Terminal, JSON, HTML, gate and glossary are all fed from here, so a figure has the same name, unit and meaning wherever
it is shown. Latency metrics are taken over successes of the steady phase; S is the instant a request was sent, F its
first token, L its last token, E the end of its stream, n its output tokens. Words whose meaning differs between
load tools ("ITL", "latency") are not used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from reports.errors import UnknownMetricError
from reports.latency_metrics import LATENCY_METRICS
from reports.metric import Direction, Metric
from reports.number_metrics import NUMBER_METRICS

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*LATENCY_METRICS, *NUMBER_METRICS)}


def addresses() -> tuple[str, ...]:
    """Every dotted address of the table, in its order."""
    return tuple(address for metric in METRICS.values() for address in metric.addresses())


def metric_of(address: str) -> Metric:
    """The metric that an address such as `ttft_ms.p99`, `hit_rate` or `load_cv.decode_blocks` belongs to."""
    metric = METRICS.get(address.split(".")[0])
    if metric is None or (address not in metric.addresses() and not _is_replica_count(metric, address)):
        near = difflib.get_close_matches(address, addresses(), n=4, cutoff=0.5)
        if metric is not None:
            near = list(metric.addresses())
        raise UnknownMetricError(
            f"no metric {address!r}: "
            f"{'did you mean ' + ', '.join(near) if near else 'choose from ' + ', '.join(METRICS)}"
        )
    return metric


def lookup(metrics: Mapping[str, Any], address: str) -> float | int | None:
    """The number at a dotted address of one arm's metrics; None where it is unknown."""
    metric = metric_of(address)
    value = metrics.get(metric.name)
    if value is None or metric.kind == "number":
        return value
    key = address.split(".", 1)[1]
    if metric.name == "placement" and key == "max_share":
        total = sum(value.values())
        return max(value.values()) / total if total else None
    found: float | int | None = value.get(key)
    return found


def direction_of(address: str) -> Direction:
    """Which way is better; a count of samples has no better."""
    metric = metric_of(address)
    return "none" if metric.kind == "distribution" and address.endswith(".count") else metric.direction


def _is_replica_count(metric: Metric, address: str) -> bool:
    return metric.name == "placement" and address.startswith("placement.") and len(address) > len("placement.")
