"""Requests that were sent and came to no good end: which replica held each, and how far it had come.

For runs in which replicas fail or stand still: every request ends as a success, an error or after its time, and this
list says of the others where they were. What was cut because the run ended is not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

LISTED_MAX = 200
"""Of a run; the figures `errors` and `incomplete` count them all."""
_COLUMNS = ("router", "repeat", "request_id", "ingress", "replica", "status", "error_class", "error")


def unfinished(requests: pd.DataFrame) -> list[dict[str, Any]]:
    """The first of them in the order of the rows, each with its `stage`."""
    return [
        {**{key: _plain(row[key]) for key in _COLUMNS}, "stage": stage(row)}
        for row in _bad(requests).head(LISTED_MAX).to_dict("records")
    ]


def where_unfinished(requests: pd.DataFrame) -> str:
    """All of them counted by router, replica and stage, in words; empty where there is none."""
    counts = Counter((row["router"], _plain(row["replica"]), stage(row)) for row in _bad(requests).to_dict("records"))
    return ", ".join(
        f"{router} {count:,} {f'on {replica} ({place})' if replica is not None else place}"
        for (router, replica, place), count in counts.items()
    )


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
