"""Requests that did not complete: how many of which kind, and of those that were sent, where they were.

For runs in which replicas fail or stand still: every request ends as a success, an error or after its time, and the
list says of the others which replica held each and how far it had come. What was cut because the run ended, or not sent
at all, is only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

LISTED_MAX = 200
"""Of a run; the figures `errors` and `incomplete` count them all."""
WHERE_LOST = "Where requests were that came to no good end"
_COLUMNS = ("router", "repeat", "request_id", "ingress", "replica", "status", "error_class", "error")


def lost(figures: Mapping[str, Any]) -> int:
    """All measured requests that did not complete, of an arm's figures."""
    return int(figures["errors"] + figures["incomplete"])


def account(figures: Mapping[str, Any]) -> str:
    """The same in words that add up: `9 of 240 requests did not complete (1 error, 5 cut short, 3 not sent)`."""
    parts = {"error" if figures["errors"] == 1 else "errors": figures["errors"]}
    at_end, not_sent = figures.get("cut_at_end"), figures.get("not_sent")
    if at_end is None or not_sent is None:  # figures of an earlier version
        parts["incomplete"] = figures["incomplete"]
    else:
        parts["cut short"] = figures["incomplete"] - at_end - not_sent
        parts |= {"cut at the run's end": at_end, "not sent": not_sent}
    told = ", ".join(f"{count:,} {word}" for word, count in parts.items() if count)
    return f"{lost(figures):,} of {figures['requests']:,} requests did not complete ({told})"


def unfinished(requests: pd.DataFrame) -> list[dict[str, Any]]:
    """The first of them in the order of the rows, each with its `stage`."""
    return [
        {**{key: _plain(row[key]) for key in _COLUMNS}, "stage": stage(row)}
        for row in _bad(requests).head(LISTED_MAX).to_dict("records")
    ]


def where_unfinished(requests: pd.DataFrame) -> str:
    """All of them counted by router, replica and stage, in words; empty where there is none."""
    counts = Counter((row["router"], _plain(row["replica"]), stage(row)) for row in _bad(requests).to_dict("records"))
    told: dict[str, list[str]] = {}
    for router, replica in dict.fromkeys((router, replica) for router, replica, _ in counts):
        places = {place: count for (*key, place), count in counts.items() if key == [router, replica]}
        stages = ", ".join(f"{count:,} {place}" for place, count in places.items())
        where = stages if replica is None else f"{sum(places.values()):,} on {replica} ({stages})"
        told.setdefault(router, []).append(where)
    return "; ".join(f"{router}: {', '.join(parts)}" for router, parts in told.items())


def _bad(requests: pd.DataFrame) -> pd.DataFrame:
    bad = requests["status"].isin(["error", "incomplete"]) & requests["sent_us"].notna()
    return requests[bad.to_numpy(dtype=bool)]


def stage(row: Mapping[Any, Any]) -> str:
    """How far a request came. A replica that was killed leaves no word of what it had admitted."""
    if pd.notna(row["first_token_us"]):
        return "decode"
    if pd.notna(row["admitted_us"]):
        return "prefill"
    return "before its first token" if pd.notna(row["replica"]) else "in the router"


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value
