"""Which figures a comparison shows, and in which order: the same rows on the terminal, in Markdown and in HTML.

RL figures come first where there are rollout steps. Some figures show up only where they say something that the usual
ones do not: a wait in the client, a first chunk of several tokens, a burst, requests that were cut short. What a
scenario states an expectation about is always shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reports.compare import HEADLINE_ADDRESSES, ROLLOUT_ADDRESSES
from reports.errors import UnknownMetricError
from reports.metrics_table import lookup, metric_of

PLACEMENT_ROW = "placement"
APART = 0.01  # of the usual figure, from which a like one is shown beside it
WAIT_SHARE = 0.10  # of the TTFT median, from which a wait in the client is shown
BURST_KINDS = ("group-burst",)
LOST_TOO = ("collateral_errors", "incomplete", "cut_at_end", "not_sent")  # beside the errors as soon as there is one

Metrics = Mapping[str, Any]


def table_addresses(scenario: Mapping[str, Any], routers: Mapping[str, Metrics]) -> list[str]:
    rollouts = any(metrics.get("step_makespan_ms") for metrics in routers.values())
    rows: list[str] = []
    for address in (*(ROLLOUT_ADDRESSES if rollouts else ()), *HEADLINE_ADDRESSES):
        if address == "errors" and any(metrics.get("not_completed") for metrics in routers.values()):
            rows.append("not_completed")  # the sum before its parts
        rows.append(address)
        rows += _beside(address, scenario, routers)
    if any(metrics.get("slo_attainment") is not None for metrics in routers.values()):
        rows.append("slo_attainment")
    return list(dict.fromkeys((*rows, *_expected(scenario))))


def _beside(address: str, scenario: Mapping[str, Any], routers: Mapping[str, Metrics]) -> Iterator[str]:
    """What is shown after a figure, where it matters."""
    if address == "ttft_ms.p99":
        if _apart("first_content_ms.p50", "ttft_ms.p50", routers):
            yield "first_content_ms.p50"
        if any(_waits(metrics) for metrics in routers.values()):
            yield from ("client_wait_ms.p99", "ttft_with_wait_ms.p99")
    if address == "tpot_ms.p99" and _apart("token_gap_ms.p50", "tpot_ms.p50", routers):
        yield "token_gap_ms.p50"
    if address == "hit_rate":
        yield PLACEMENT_ROW
        if (scenario.get("workload") or {}).get("kind") in BURST_KINDS:
            yield from ("burst_max_share", "redundant_prefill_tokens")
    if address == "errors":
        yield from (name for name in LOST_TOO if any(metrics.get(name) for metrics in routers.values()))


def _apart(address: str, usual: str, routers: Mapping[str, Metrics]) -> bool:
    pairs = [(lookup(metrics, address), lookup(metrics, usual)) for metrics in routers.values()]
    return any(one is not None and two and abs(one - two) > APART * abs(two) for one, two in pairs)


def _waits(metrics: Metrics) -> bool:
    wait, ttft = lookup(metrics, "client_wait_ms.p99"), lookup(metrics, "ttft_ms.p50")
    return wait is not None and ttft is not None and wait > WAIT_SHARE * ttft


def _expected(scenario: Mapping[str, Any]) -> Iterator[str]:
    for expectation in scenario.get("expect") or ():
        address = expectation.get("metric")
        try:
            if address and not address.startswith("placement."):
                metric_of(address)
                yield address
        except UnknownMetricError:  # a metric that another version has
            continue
