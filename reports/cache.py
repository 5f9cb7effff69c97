"""Prefix cache: what was hit, what the router believed, what one infinite cache would have hit.

Three sources that may disagree, and are never mixed: usage as each answer reports it, the engines' own counters, and
the router's belief when it chose. Cached tokens that are unknown leave the request out of a rate; they are not 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from reports.rows import Rows


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What one infinite cache would hit on the arm's steady requests, and how many prompt tokens these have."""

    cached_tokens: int
    prompt_tokens: int | None = None  # None: as many as the steady rows themselves


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
    prompt_tokens = int(prompt.values[prompt.known].sum())
    ceiling_prompt = (
        None if ceiling is None else (prompt_tokens if ceiling.prompt_tokens is None else ceiling.prompt_tokens)
    )
    hits, queries = counter_increase(fleet, "hit_tokens"), counter_increase(fleet, "query_tokens")
    redundant = None
    if ceiling is not None and ceiling_prompt and int(prompt.values[served].sum()) == ceiling_prompt:
        redundant = ceiling.cached_tokens - int(cached.values[served].sum())
    expected, found = believed.values > 0, cached.values > 0
    surplus = share(int((believed.values - cached.values)[both].sum()), int(prompt.values[both].sum()))
    return {
        "hit_rate": share(int(cached.values[served].sum()), int(prompt.values[served].sum())),
        "engine_hit_rate": None if hits is None or queries is None else share(hits, queries),
        "hit_rate_ceiling": None if ceiling is None or not ceiling_prompt else ceiling.cached_tokens / ceiling_prompt,
        "believed_hit_rate": share(int(believed.values[trusted].sum()), int(prompt.values[trusted].sum())),
        "phantom_hit_points": None if surplus is None else 100 * surplus,
        "stale_placements": int((both & expected & ~found).sum()) if both.any() else None,
        "unseen_hits": int((both & ~expected & found).sum()) if both.any() else None,
        "redundant_prefill_tokens": redundant,
        "preemptions": counter_increase(fleet, "preemptions"),
        "evicted_blocks": counter_increase(fleet, "evicted_blocks"),
    }


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
