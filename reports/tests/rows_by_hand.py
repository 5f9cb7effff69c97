"""Rows written by hand: a request with every instant known, changed by keyword."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from reports import arm_metrics, fleet_frame, requests_frame

MS = 1_000


def request(number: int = 0, **changes: Any) -> dict[str, Any]:
    """The conventions' stub stream: tokens at 200, 250, two at 330, 400 ms, stream closed at 500; n = 5."""
    row = {
        "router": "a",
        "repeat": 0,
        "request_id": f"q{number}",
        "session": f"s{number}",
        "turn": 0,
        "replica": "r0",
        "scheduled_us": 0,
        "sent_us": 0,
        "first_token_us": 200 * MS,
        "second_token_us": 250 * MS,
        "last_token_us": 400 * MS,
        "end_us": 500 * MS,
        "phase": "steady",
        "prompt_tokens": 100,
        "output_tokens": 5,
        "chunk_gaps_us": [50 * MS, 80 * MS, 70 * MS],
        "status": "ok",
    }
    return row | changes


def sample(replica: str = "r0", t_us: int = 0, **changes: Any) -> dict[str, Any]:
    return {"router": "a", "repeat": 0, "t_us": t_us, "replica": replica} | changes


def frames(rows: Iterable[dict[str, Any]], samples: Iterable[dict[str, Any]] = ()) -> tuple[pd.DataFrame, pd.DataFrame]:
    return requests_frame(list(rows)), fleet_frame(list(samples))


def metrics_of(
    rows: Iterable[dict[str, Any]], samples: Iterable[dict[str, Any]] = (), **options: Any
) -> dict[str, Any]:
    return arm_metrics(*frames(rows, samples), **options)
