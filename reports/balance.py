"""Where requests went and how evenly the replicas were loaded.

Imbalance is the coefficient of variation across replicas (population standard deviation / mean) in each half second of
the measured window, then the mean over time. A half second in which nobody has load says nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from reports.records import FLEET_BIN_US
from reports.rows import Floats, Ints, Rows, natural_key, replica_names

LOAD_COLUMNS = {"decode_blocks": "active_decode_blocks", "waiting": "waiting"}
DEGENERATE_SHARE = 0.9  # one replica with more than this share of the requests: the router does not spread


def placement(rows: Rows, fleet: pd.DataFrame, replicas: Iterable[str] = ()) -> dict[str, int] | None:
    """Steady requests per replica; a replica that is known and got none counts 0."""
    counts = rows.steady.frame["replica"].value_counts()
    if counts.empty:
        return None
    names = sorted({*counts.index.tolist(), *replica_names(fleet), *replicas}, key=natural_key)
    return {name: int(counts.get(name, 0)) for name in names}


def sticky_rate(rows: Rows) -> float | None:
    turn = rows.column("turn")
    replica = pd.factorize(rows.frame["replica"])[0]
    usable = turn.known & (replica >= 0) & ~rows.frame["session"].isna().to_numpy(dtype=bool)
    steady = (rows.frame["phase"] == "steady").to_numpy(dtype=bool)[usable]
    sessions, turns, replicas = rows.sessions[usable], turn.values[usable], replica[usable]
    order = np.lexsort((turns, sessions))
    sessions, turns, replicas, steady = sessions[order], turns[order], replicas[order], steady[order]
    starts = (
        np.flatnonzero(np.r_[True, sessions[1:] != sessions[:-1]]) if len(sessions) else np.array([], dtype=np.int64)
    )
    first = np.repeat(starts, np.diff(np.r_[starts, len(sessions)]))
    # A session whose first turn has no known replica has nothing to be true to.
    later = steady & (turns > 0) & (turns[first] == 0) if len(sessions) else np.array([], dtype=bool)
    return float((replicas == replicas[first])[later].sum() / later.sum()) if later.any() else None


def load_bins(rows: Rows, fleet: pd.DataFrame, column: str) -> tuple[Floats, Ints, Ints]:
    """Imbalance of each busy half second inside the windows: its value, its repeat, its instant."""
    known = fleet[fleet[column].notna()]
    repeat = known["repeat"].to_numpy(dtype=np.int64)
    t_us = known["t_us"].to_numpy(dtype=np.int64)
    load = known[column].to_numpy(dtype=np.int64)
    inside = np.zeros(len(known), dtype=bool)
    for number, window in rows.windows.items():
        inside |= (repeat == number) & (t_us >= window.starts_us) & (t_us <= window.ends_us)
    pairs = np.stack([repeat[inside], t_us[inside] // FLEET_BIN_US])
    bins, index = np.unique(pairs, axis=1, return_inverse=True)
    index = index.reshape(-1)
    count = np.bincount(index, minlength=bins.shape[1])
    total = np.bincount(index, weights=load[inside], minlength=bins.shape[1])
    squares = np.bincount(index, weights=load[inside].astype(np.float64) ** 2, minlength=bins.shape[1])
    busy = (count >= 2) & (total > 0)
    # Sums of whole numbers are exact below 2**53, so the difference cannot go below 0 by rounding.
    spread = np.sqrt(np.maximum(count * squares - total**2, 0))
    return spread[busy] / total[busy], bins[0][busy], bins[1][busy] * FLEET_BIN_US


def load_cv(rows: Rows, fleet: pd.DataFrame) -> dict[str, float | None] | None:
    values = {key: load_bins(rows, fleet, column)[0] for key, column in LOAD_COLUMNS.items()}
    if not any(len(bins) for bins in values.values()):
        return None
    return {key: math.fsum(bins.tolist()) / len(bins) if len(bins) else None for key, bins in values.items()}


def in_flight(rows: Rows) -> tuple[float | None, int | None]:
    """Mean over the windows and highest peak of requests between sent and end, whatever their phase or fate.

    A request whose end nobody saw counts until the window's end. At one instant an end comes before a send.
    """
    repeats, sent, end = rows.column("repeat").values, rows.column("sent_us"), rows.column("end_us")
    held_us, peak = 0, 0
    for repeat, window in rows.windows.items():
        mask = sent.known & (repeats == repeat)
        start_us = np.maximum(sent.values[mask], window.starts_us)
        end_us = np.minimum(np.where(end.known, end.values, window.ends_us)[mask], window.ends_us)
        inside = end_us > start_us
        start_us, end_us = start_us[inside], end_us[inside]
        held_us += int((end_us - start_us).sum())
        instants = np.concatenate([end_us, start_us])
        change = np.concatenate([np.full(len(end_us), -1), np.full(len(start_us), 1)])
        peak = max(peak, int(np.cumsum(change[np.argsort(instants, kind="stable")]).max(initial=0)))
    return (held_us / rows.window_us, peak) if rows.window_us else (None, None)
