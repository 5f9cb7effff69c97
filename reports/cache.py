"""Prefix cache: what was hit, what the router believed, what one infinite cache would have hit.

Three sources that may disagree, and are never mixed: usage as each answer reports it, the engines' own counters, and
the router's belief when it chose. Cached tokens that are unknown leave the request out of a rate; they are not 0.
A rate and its ceiling are of the same requests, so no failure lifts one above the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from reports.latency import PER_REQUEST
from reports.rows import Mask, Rows

AT_ONCE_US = 50_000
"""A wait for the engine's next step or two; in so short a time hardly a block is evicted."""
BELIEFS_MIN = 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What one infinite cache would hit on the requests that the hit rate is of, and how many prompt tokens these have.
    Where no request tells its cached tokens, they are all steady successes."""

    cached_tokens: int
    prompt_tokens: int | None = None  # None: as many as the rows themselves


def counter_increase(fleet: pd.DataFrame, column: str) -> int | None:
    """Growth of a counter over all replicas and repeats, from 0 at each start; a fall: a replica began anew."""
    known = fleet[fleet[column].notna()].sort_values("t_us", kind="stable")
    if known.empty:
        return None
    groups = known.groupby(["router", "repeat", "replica"], sort=False)[column]
    values = known[column].to_numpy(dtype=np.int64)
    before = groups.shift(1).to_numpy(dtype=np.int64, na_value=0)
    return int(np.where(values >= before, values - before, values).sum())


def cache_metrics(rows: Rows, fleet: pd.DataFrame, ceiling: Ceiling | None) -> dict[str, float | int | None]:
    steady = rows.steady
    prompt, cached, believed = (
        steady.column(name) for name in ("prompt_tokens", "cached_tokens", "believed_hit_tokens")
    )
    served = steady.ok & prompt.known & cached.known
    trusted = steady.ok & prompt.known & believed.known
    both = trusted & cached.known
    same = served if served.any() else steady.ok & prompt.known
    ceiling_prompt = None
    if ceiling is not None:
        own = int(prompt.values[same].sum())
        ceiling_prompt = own if ceiling.prompt_tokens is None else ceiling.prompt_tokens
    hits, queries = counter_increase(fleet, "hit_tokens"), counter_increase(fleet, "query_tokens")
    redundant = None
    if ceiling is not None and served.any() and int(prompt.values[served].sum()) == ceiling_prompt:
        redundant = ceiling.cached_tokens - int(cached.values[served].sum())
    expected, found = believed.values > 0, cached.values > 0
    surplus = share(int((believed.values - cached.values)[both].sum()), int(prompt.values[both].sum()))
    return {
        "hit_rate": share(int(cached.values[served].sum()), int(prompt.values[served].sum())),
        "engine_hit_rate": None if hits is None or queries is None else share(hits, queries),
        "hit_rate_ceiling": None if ceiling is None or not ceiling_prompt else ceiling.cached_tokens / ceiling_prompt,
        "believed_hit_rate": share(int(believed.values[trusted].sum()), int(prompt.values[trusted].sum())),
        "phantom_hit_points": None if surplus is None else 100 * surplus,
        **_belief(steady, both),
        "stale_placements": int((both & expected & ~found).sum()) if both.any() else None,
        "unseen_hits": int((both & ~expected & found).sum()) if both.any() else None,
        "redundant_prefill_tokens": redundant,
        "preemptions": counter_increase(fleet, "preemptions"),
        "evicted_blocks": counter_increase(fleet, "evicted_blocks"),
    }


def _belief(steady: Rows, known: Mask) -> dict[str, float | None]:
    """Whether a belief was wrong when the router chose, or only when the engine came to it: by the wait between."""
    believed, cached = steady.column("believed_hit_tokens").values, steady.column("cached_tokens").values
    queue_us, queued = PER_REQUEST["queue_ms"](steady)
    known = known & queued
    kept, at_once, missed = np.minimum(believed, cached), queue_us <= AT_ONCE_US, cached < believed

    def kept_share(mask: Mask) -> float | None:
        chosen = mask & (believed > 0)
        few = int(chosen.sum()) < BELIEFS_MIN
        return None if few else share(int(kept[chosen].sum()), int(believed[chosen].sum()))

    def wait_ms(mask: Mask) -> float | None:
        return int(queue_us[mask].sum()) / int(mask.sum()) / 1_000 if mask.any() else None

    return {
        "belief_kept_at_once": kept_share(known & at_once),
        "belief_kept_after_wait": kept_share(known & ~at_once),
        "misbelieved_queue_ms": wait_ms(known & missed),
        "believed_queue_ms": wait_ms(known & ~missed),
    }


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
