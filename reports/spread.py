"""How new work was spread: bursts of one prompt over replicas, and new sessions against the load that was there.

A burst says in one figure whether siblings were kept together or scattered. Whether new sessions avoid or seek load is
a correlation over all chances to choose: each first turn met every replica with some share of the decode load, and went
to one of them. Load is that of the last sample before, so up to half a second old.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from reports.rows import Floats, Mask, Rows, replica_names

BURST_MIN = 4  # first turns of one group that count as a burst
BURST_GAP_US = 100_000  # between one and the next of a burst


def burst_max_share(rows: Rows) -> float | None:
    """Mean over bursts of the largest share on one replica."""
    steady = rows.steady
    sent, replica = steady.column("sent_us"), pd.factorize(steady.frame["replica"])[0]
    group = pd.factorize(steady.frame["group"])[0]
    chosen = _first_turns(steady) & sent.known & (replica >= 0) & (group >= 0)
    if not chosen.any():
        return None
    order = np.lexsort((sent.values[chosen], group[chosen], steady.column("repeat").values[chosen]))
    parts = [steady.column("repeat").values, group, sent.values, replica]
    repeats, groups, instants, replicas = (part[chosen][order] for part in parts)
    apart = (np.diff(repeats) != 0) | (np.diff(groups) != 0) | (np.diff(instants) > BURST_GAP_US)
    bursts = np.r_[0, np.cumsum(apart)]
    counts = np.zeros((int(bursts[-1]) + 1, int(replicas.max()) + 1), dtype=np.int64)
    np.add.at(counts, (bursts, replicas), 1)
    sizes = counts.sum(axis=1)
    large = sizes >= BURST_MIN
    return float(np.mean(counts.max(axis=1)[large] / sizes[large])) if large.any() else None


def chances(rows: Rows, fleet: pd.DataFrame) -> tuple[Floats, Mask]:
    """Of every first turn and replica: the replica's share of the decode load then, and whether the turn went there."""
    steady = rows.steady
    sent, repeats = steady.column("sent_us"), steady.column("repeat").values
    usable = _first_turns(steady) & sent.known & steady.frame["replica"].notna().to_numpy(dtype=bool)
    found: list[tuple[Floats, Mask]] = []
    for repeat in np.unique(repeats[usable]).tolist():
        known = fleet[(fleet["repeat"] == repeat) & fleet["active_decode_blocks"].notna()]
        names = replica_names(known)
        mask = usable & (repeats == repeat)
        if len(names) < 2:
            continue
        table = known.pivot_table(index="t_us", columns="replica", values="active_decode_blocks", aggfunc="last")
        load = table[names].to_numpy(dtype=np.float64, na_value=np.nan)
        before = np.searchsorted(table.index.to_numpy(dtype=np.int64), sent.values[mask], side="right") - 1
        went = pd.Index(names).get_indexer(steady.frame["replica"][mask])
        seen = (before >= 0) & (went >= 0)
        load, went = load[before[seen]], went[seen]
        total = np.nansum(load, axis=1)
        load, went, total = load[total > 0], went[total > 0], total[total > 0]
        here = ~np.isnan(load)  # a replica that was not there was no chance
        found.append(((load / total[:, None])[here], (np.arange(len(names)) == went[:, None])[here]))
    if not found:
        return np.array([], dtype=np.float64), np.array([], dtype=bool)
    return np.concatenate([load for load, _ in found]), np.concatenate([went for _, went in found])


def new_session_load_r(rows: Rows, fleet: pd.DataFrame) -> float | None:
    load, went = chances(rows, fleet)
    if len(load) < 2 or np.ptp(load) == 0 or went.all() or not went.any():
        return None
    x, y = load - load.mean(), went - went.mean()
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def engine_in_flight_peak(fleet: pd.DataFrame) -> int | None:
    """Most requests running or waiting in all engines at one sample."""
    known = fleet[fleet["running"].notna() & fleet["waiting"].notna()]
    if known.empty:
        return None
    inside = known["running"].to_numpy(dtype=np.int64) + known["waiting"].to_numpy(dtype=np.int64)
    keys = [known["repeat"].to_numpy(dtype=np.int64), known["t_us"].to_numpy(dtype=np.int64)]
    return int(pd.Series(inside).groupby(keys).sum().max())


def _first_turns(rows: Rows) -> Mask:
    turn = rows.column("turn")
    return turn.known & (turn.values == 0)
