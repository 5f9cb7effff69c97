"""All metrics of one arm, in the table's order: `arm_metrics` is the only place that puts them together.

An arm is one router, over one repeat or over several. Rates over several repeats are the sum of what was done over the
sum of the windows, so a pooled figure is not a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from reports.balance import in_flight, load_cv, placement, sticky_rate
from reports.cache import Ceiling, cache_metrics, share
from reports.errors import SloError
from reports.latency import PER_REQUEST, distributions
from reports.metrics_table import METRICS
from reports.rows import Mask, Rows
from reports.spread import burst_max_share, engine_in_flight_peak, new_session_load_r
from reports.tails import tail_idle_replica_s, tpot_replica_spread

DISTRIBUTIONS = tuple(metric.name for metric in METRICS.values() if metric.kind == "distribution")
# A bound may be set on what a request itself decides; not on what the load generator did to it.
SLO_KEYS = tuple(name for name in PER_REQUEST if name not in ("sched_lag_ms", "client_wait_ms"))
FAILURES: dict[str, Callable[[Rows], Mask]] = {
    "errors": lambda rows: rows.status("error"),
    "collateral_errors": lambda rows: (
        rows.status("error") & (rows.frame["error_class"] == "router").to_numpy(dtype=bool, na_value=False)
    ),
    "incomplete": lambda rows: rows.status("incomplete") | cancelled(rows),
    "cut_at_end": lambda rows: cancelled(rows) & rows.column("sent_us").known,
    "not_sent": lambda rows: cancelled(rows) & ~rows.column("sent_us").known,
    "not_completed": lambda rows: ~rows.ok,
}
"""Which requests each count of failures holds. `errors` and `incomplete` are `not_completed`; `cut_at_end` and
`not_sent` are parts of `incomplete`, and what is left of it was cut short."""


def failure_counts(steady: Rows) -> dict[str, int]:
    """Each count of failures, and `requests`."""
    return {"requests": len(steady), **{name: int(mask_of(steady).sum()) for name, mask_of in FAILURES.items()}}


def arm_metrics(
    requests: pd.DataFrame,
    fleet: pd.DataFrame,
    *,
    slo: Mapping[str, float] | None = None,
    ceiling_cached_tokens: int | None = None,
    ceiling_prompt_tokens: int | None = None,
    distinct_prompts: int | None = None,
    replicas: Iterable[str] = (),
    router_samples: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """Every metric of the table for the rows given, which are one router's (one repeat, or several pooled).

    `ceiling_cached_tokens` are the hits of one infinite cache over the requests that the hit rate is of,
    `ceiling_prompt_tokens` their prompt tokens (default: those of the rows), and `distinct_prompts` the different
    prompts among the successes. `slo` maps per-request figures to bounds in milliseconds. `replicas` names replicas
    that exist even if no row or sample mentions them.
    """
    rows = Rows(requests)
    steady = rows.steady
    ceiling = None if ceiling_cached_tokens is None else Ceiling(ceiling_cached_tokens, ceiling_prompt_tokens)
    seconds = rows.window_us / 1_000_000
    successes = int(steady.ok.sum())
    mean, peak = in_flight(rows)
    good = good_requests(steady, slo or {})
    judged = len(steady) - int(cancelled(steady).sum())
    found: dict[str, Any] = {
        **distributions(rows, DISTRIBUTIONS),
        **cache_metrics(rows, fleet, ceiling),
        **failure_counts(steady),
        "requests_per_s": successes / seconds if successes and seconds else None,
        "output_tokens_per_s": _token_rate(steady, "output_tokens", seconds),
        "input_tokens_per_s": _token_rate(steady, "prompt_tokens", seconds),
        "in_flight_mean": mean,
        "in_flight_peak": peak,
        "engine_in_flight_peak": engine_in_flight_peak(fleet),
        "distinct_prompt_share": None if distinct_prompts is None else share(distinct_prompts, successes),
        "placement": placement(rows, fleet, replicas),
        "sticky_rate": sticky_rate(rows),
        "load_cv": load_cv(rows, fleet),
        "burst_max_share": burst_max_share(rows),
        "new_session_load_r": new_session_load_r(rows, fleet),
        "index_size_max": _index_size_max(router_samples),
        "tail_idle_replica_s": tail_idle_replica_s(rows, fleet, replicas),
        "tpot_replica_spread": tpot_replica_spread(rows),
        "slo_attainment": None if good is None else share(int(good.sum()), judged),
        "request_goodput": None if good is None or not seconds else int(good.sum()) / seconds,
    }
    return {name: found[name] for name in METRICS}


def good_requests(steady: Rows, slo: Mapping[str, float]) -> Mask | None:
    """Successes that keep every bound. A figure that applies and was not measured keeps none."""
    if not slo:
        return None
    good = steady.ok.copy()
    for name, bound_ms in slo.items():
        if name not in PER_REQUEST or name not in SLO_KEYS:
            raise SloError(
                f"slo.{name}: no figure of a single request has this name; set bounds on {', '.join(SLO_KEYS)}"
            )
        values, known = PER_REQUEST[name](steady)
        kept = known & (values <= bound_ms * 1_000)
        if name == "tpot_ms":
            tokens = steady.column("output_tokens")
            kept |= tokens.known & (tokens.values < 2)
        good &= kept
    return good


def cancelled(rows: Rows) -> Mask:
    """Requests that the load generator itself cut off at the end: nobody's fault, so in no base of a rate."""
    return rows.status("cancelled")


def arms_of(requests: pd.DataFrame, fleet: pd.DataFrame) -> list[tuple[str, int]]:
    """Every (router, repeat) that left a row, routers in order of appearance."""
    pairs = pd.concat([requests[["router", "repeat"]], fleet[["router", "repeat"]]]).drop_duplicates()
    order = {router: place for place, router in enumerate(pd.unique(pairs["router"]))}
    arms = {(str(router), int(repeat)) for router, repeat in pairs.itertuples(index=False)}
    return sorted(arms, key=lambda arm: (order[arm[0]], arm[1]))


def _index_size_max(samples: pd.DataFrame | None) -> int | None:
    sizes = None if samples is None else samples["index_size"].dropna()
    return None if sizes is None or sizes.empty else int(sizes.max())


def _token_rate(steady: Rows, column: str, seconds: float) -> float | None:
    tokens = steady.column(column)
    known = steady.ok & tokens.known
    return int(tokens.values[known].sum()) / seconds if seconds and np.any(known) else None
