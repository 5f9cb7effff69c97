"""Several router processes side by side: what each of them did, beside what they did together.

With N of them a count of one's own requests sees an Nth of the load, and an index of prefixes an Nth of the traffic;
whether that costs hits, balance or time is read off here. Imbalance comes from the engines, so it is known for all
together only; of one process there is the largest share that one replica got of its requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from reports.cache import share
from reports.display import UNKNOWN, cell, number, percent, value_text
from reports.latency import distribution, sample
from reports.rows import Rows, natural_key

if TYPE_CHECKING:
    from reports.run import RunResult

INGRESS_NOTE = (
    "What each router process did, and all of a router together. Largest share: what the busiest replica got of these "
    "requests; evenly spread it is 100 % / replicas. Same ingress as turn before: later turns of a session that met "
    "the process of the turn before, which alone remembers it; turns spread at random over N do so once in N. Load "
    "imbalance is measured at the engines, which all processes feed, so there is one for all together."
)
INGRESS_HEADS = (
    "router",
    "ingress",
    "requests",
    "hit rate %",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "largest share %",
    "load imbalance, decode",
    "same ingress as turn before %",
)


def ingress_rows(run: RunResult) -> list[tuple[str, ...]]:
    """Texts for a table, one line a process and one for all of a router; none where every router is one process."""
    requests = run.requests
    if requests["ingress"].nunique() < 2:
        return []
    return [row for name in run.routers for row in _of_router(run, name)]


def _of_router(run: RunResult, name: str) -> Iterator[tuple[str, ...]]:
    rows = Rows(run.requests[(run.requests["router"] == name).to_numpy(dtype=bool)])
    ingresses = sorted(rows.frame["ingress"].dropna().unique().tolist(), key=natural_key)
    metrics = run.routers[name]
    met = _met_again(rows)
    yield (
        name,
        f"all {len(ingresses)}" if len(ingresses) > 1 else "one",
        number(metrics["requests"], 0),
        cell(metrics, "hit_rate"),
        cell(metrics, "ttft_ms.p50"),
        cell(metrics, "ttft_ms.p99"),
        cell(metrics, "placement.max_share"),
        cell(metrics, "load_cv.decode_blocks"),
        UNKNOWN if met is None else number(100 * met, 1),
    )
    for ingress in ingresses if len(ingresses) > 1 else ():
        own = rows.where((rows.frame["ingress"] == ingress).to_numpy(dtype=bool, na_value=False))
        steady = own.steady
        prompt, cached = steady.column("prompt_tokens"), steady.column("cached_tokens")
        served = steady.ok & prompt.known & cached.known
        hits = share(int(cached.values[served].sum()), int(prompt.values[served].sum()))
        ttft = distribution(sample("ttft_ms", own)) or {}
        counts = steady.frame["replica"].value_counts()
        yield (
            name,
            ingress,
            number(len(steady), 0),
            value_text("hit_rate", hits),
            value_text("ttft_ms.p50", ttft.get("p50")),
            value_text("ttft_ms.p99", ttft.get("p99")),
            percent(counts.max() / counts.sum()).removesuffix(" %") if len(counts) else UNKNOWN,
            UNKNOWN,
            UNKNOWN,
        )


def _met_again(rows: Rows) -> float | None:
    """Share of later turns that met the ingress of the turn before: with turns spread over N, about one in N."""
    steady = rows.steady
    turn, ingress = steady.column("turn"), steady.frame["ingress"].astype("category").cat.codes.to_numpy()
    usable = turn.known & (ingress >= 0) & steady.frame["session"].notna().to_numpy(dtype=bool)
    order = np.lexsort((turn.values[usable], steady.sessions[usable]))
    sessions, at = steady.sessions[usable][order], ingress[usable][order]
    same = sessions[1:] == sessions[:-1]
    return float((at[1:] == at[:-1])[same].mean()) if same.any() else None
