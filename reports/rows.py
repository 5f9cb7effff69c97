"""One arm's request rows as plain arrays, so that every formula is a line over whole columns.

A column of whole numbers is two arrays, values and known: an unknown value is never mistaken for 0. Instants are whole
microseconds; sums of them are exact, so a figure does not depend on the order of rows or on the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

SLICES = 20  # of a window: what happened in the same slice happened under the same load


@dataclass(frozen=True, slots=True)
class Column:
    values: Ints  # 0 where unknown
    known: Mask


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one figure in microseconds, and for each what it shares its fate with."""

    values: Ints | Floats
    clusters: Ints  # the session (or step) that it came from
    slices: Ints | None = None  # the twentieth of the window in which it was sent; None: the span is too long for one


@dataclass(frozen=True, slots=True)
class Window:
    """The measured span of one repeat: from the first steady request sent to the end of the last."""

    starts_us: int
    ends_us: int

    def slice_of(self, instants_us: Ints) -> Ints:
        place = (instants_us - self.starts_us) * SLICES // (self.ends_us - self.starts_us)
        return np.clip(place, 0, SLICES - 1)


@dataclass(frozen=True)
class Rows:
    frame: pd.DataFrame
    session_ids: Ints | None = None  # numbers that mean the same session in other arms too; -1: no session
    _columns: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> Column:
        if name not in self._columns:
            series = self.frame[name]
            known = ~series.isna().to_numpy(dtype=bool)
            self._columns[name] = Column(series.to_numpy(dtype=np.int64, na_value=0), known)
        return self._columns[name]

    def where(self, mask: Mask) -> Rows:
        ids = None if self.session_ids is None else self.session_ids[mask]
        return replace(self, frame=self.frame[mask], session_ids=ids, _columns={})

    @cached_property
    def steady(self) -> Rows:
        mask = (self.frame["phase"] == "steady").to_numpy(dtype=bool)
        return self if mask.all() else self.where(mask)

    @cached_property
    def ok(self) -> Mask:
        return self.status("ok")

    def status(self, word: str) -> Mask:
        return (self.frame["status"] == word).to_numpy(dtype=bool)

    @cached_property
    def sessions(self) -> Ints:
        """A number per row, the same for rows of one session of one repeat; a row without a session stands alone."""
        codes = pd.factorize(self.frame["session"])[0] if self.session_ids is None else self.session_ids
        codes = codes.astype(np.int64)  # a copy of our own
        alone = codes < 0
        codes[alone] = codes.max(initial=-1) + 1 + np.arange(int(alone.sum()))
        return _combine(self.column("repeat").values, codes)

    @cached_property
    def steps(self) -> Ints:
        """A number per row, the same for rows of one rollout step of one repeat; -1 outside any step."""
        step = self.column("rollout_step")
        return np.where(step.known, _combine(self.column("repeat").values, step.values), -1)

    @cached_property
    def groups(self) -> Ints:
        """A number per row, the same for rows of one group of one step and repeat: its least session; -1: no group."""
        codes = pd.factorize(self.frame["group"])[0].astype(np.int64)
        inside = (codes >= 0) & self.column("rollout_step").known
        groups = np.full(len(self), -1, dtype=np.int64)
        if inside.any():
            steps, step = np.unique(self.steps[inside], return_inverse=True)
            index = codes[inside] * len(steps) + step
            least = np.full(int(index.max()) + 1, np.iinfo(np.int64).max)
            np.minimum.at(least, index, self.sessions[inside])
            groups[inside] = least[index]
        return groups

    @cached_property
    def windows(self) -> dict[int, Window]:
        """Per repeat; a repeat without a steady request that was sent and ended has none."""
        steady = self.steady
        repeats, sent, end = steady.column("repeat").values, steady.column("sent_us"), steady.column("end_us")
        windows = {}
        for repeat in np.unique(repeats).tolist():
            sent_us, end_us = sent.values[sent.known & (repeats == repeat)], end.values[end.known & (repeats == repeat)]
            if len(sent_us) and len(end_us) and end_us.max() > sent_us.min():
                windows[repeat] = Window(int(sent_us.min()), int(end_us.max()))
        return windows

    @cached_property
    def slices(self) -> Ints:
        """A number per row: the slice of its repeat's window in which it was sent, the same number in every arm."""
        repeats, sent = self.column("repeat").values, self.column("sent_us").values
        slices = repeats * SLICES
        for repeat, window in self.windows.items():
            mask = repeats == repeat
            slices[mask] += window.slice_of(sent[mask])
        return slices

    @property
    def window_us(self) -> int:
        """Length of all repeats' windows together."""
        return sum(window.ends_us - window.starts_us for window in self.windows.values())

    def gaps(self, mask: Mask) -> Sample | None:
        """Every recorded gap between token chunks; None where no row of the mask has them recorded."""
        chosen = self.frame["chunk_gaps_us"][mask]
        array = pa.array(chosen)
        lists = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if lists.null_count == len(lists):
            return None
        lengths = np.asarray(lists.value_lengths().fill_null(0), dtype=np.int64)
        return Sample(
            np.asarray(lists.flatten(), dtype=np.int64),
            np.repeat(self.sessions[mask], lengths),
            np.repeat(self.slices[mask], lengths),
        )


def arm_rows(requests: pd.DataFrame, router: str, repeat: int) -> Rows:
    """Of one arm, in the order of sending."""
    mask = ((requests["router"] == router) & (requests["repeat"] == repeat)).to_numpy(dtype=bool)
    return Rows(requests[mask].sort_values("sent_us", kind="stable"))


def replica_names(frame: pd.DataFrame) -> list[str]:
    """Names in the order people expect: r2 before r10."""
    return sorted(frame["replica"].dropna().unique().tolist(), key=natural_key)


def natural_key(name: str) -> tuple[tuple[str, int], ...]:
    parts = re.split(r"([0-9]+)", name)
    return tuple((text, int(digits or 0)) for text, digits in zip(parts[::2], [*parts[1::2], ""], strict=True))


def _combine(major: Ints, minor: Ints) -> Ints:
    """One number of two, the same in every arm."""
    return major * (1 << 40) + minor
