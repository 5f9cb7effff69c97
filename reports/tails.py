"""What the slowest rollout costs the others: replicas that wait for the end of a step, and replicas of unequal speed.

The tail of a step on a replica runs from the last token that the replica gave to it (from the step's first request, if
it gave none) to the step's last token anywhere. Only time without any request counts as idle, since in asynchronous RL
a replica works on the next step meanwhile, and an instant in the tails of two steps counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from reports.latency import PER_REQUEST, nearest_rank
from reports.rows import Ints, Rows, replica_names

_NOWHERE = -2  # no code of any row


def tail_idle_replica_s(rows: Rows, fleet: pd.DataFrame, replicas: Iterable[str] = ()) -> float | None:
    sent, last, end = (rows.column(name) for name in ("sent_us", "last_token_us", "end_us"))
    placed = ~rows.frame["replica"].isna().to_numpy(dtype=bool)
    seen = placed & sent.known & (last.known | end.known)
    stepped = seen & (rows.steps >= 0)
    if not stepped.any():
        return None
    done_us = np.where(last.known, last.values, end.values)
    codes, known = pd.factorize(rows.frame["replica"])
    places = {str(name): place for place, name in enumerate(known)}
    names = sorted({*places, *replica_names(fleet), *replicas})
    idle_us = 0
    for repeat in np.unique(rows.column("repeat").values[stepped]).tolist():
        here = rows.column("repeat").values == repeat
        steps = _steps(rows.steps[stepped & here], sent.values[stepped & here], done_us[stepped & here])
        for name in names:
            own = seen & here & (codes == places.get(name, _NOWHERE))
            busy = _union(sent.values[own], done_us[own])
            mine = own & stepped
            tails = _tails(steps, rows.steps[mine], done_us[mine])
            idle_us += int((tails[1] - tails[0]).sum()) - _overlap(tails, busy)
    return idle_us / 1_000_000


def tpot_replica_spread(rows: Rows) -> float | None:
    steady = rows.steady
    values, known = PER_REQUEST["tpot_ms"](steady)
    codes = pd.factorize(steady.frame["replica"])[0][known]
    found = []
    for place in range(int(codes.max(initial=-1)) + 1):
        own = values[known][codes == place]
        if len(own):
            rank = nearest_rank(len(own), 50)
            found.append(float(np.partition(own, rank)[rank]))
    return max(found) / min(found) if len(found) > 1 and min(found) > 0 else None


Spans = tuple[Ints, Ints]  # starts and ends, sorted and apart


def _steps(steps: Ints, sent_us: Ints, done_us: Ints) -> dict[int, tuple[int, int]]:
    """First send and last token of each step."""
    table = pd.DataFrame({"step": steps, "sent": sent_us, "done": done_us}).groupby("step")
    starts, ends = table["sent"].min(), table["done"].max()
    return {int(step): (int(starts[step]), int(ends[step])) for step in starts.index}


def _tails(steps: dict[int, tuple[int, int]], own_steps: Ints, done_us: Ints) -> Spans:
    last_own = pd.Series(done_us, index=own_steps).groupby(level=0).max().to_dict()
    starts = np.array([last_own.get(step, start) for step, (start, _) in steps.items()], dtype=np.int64)
    return _union(starts, np.array([end for _, end in steps.values()], dtype=np.int64))


def _union(starts: Ints, ends: Ints) -> Spans:
    """Spans without overlaps that cover the same time."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(order) else ends
    first = np.r_[True, starts[1:] > ends[:-1]] if len(order) else np.array([], dtype=bool)
    return starts[first], ends[np.r_[first[1:], True]] if len(order) else ends


def _overlap(a: Spans, b: Spans) -> int:
    """Time that is in both."""
    inside = _time_before(b, a[1]) - _time_before(b, a[0])
    return int(inside.sum())


def _time_before(spans: Spans, instants: Ints) -> Ints:
    """How much of the spans lies before each instant."""
    starts, ends = spans
    if not len(starts):
        return np.zeros(len(instants), dtype=np.int64)
    whole = np.r_[0, np.cumsum(ends - starts)]
    place = np.searchsorted(starts, instants, side="right")
    last = np.maximum(place - 1, 0)
    inside = np.where(place > 0, np.clip(instants - starts[last], 0, ends[last] - starts[last]), 0)
    return whole[last] * (place > 0) + inside
