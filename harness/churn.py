"""A scenario's `[[churn]]`: replicas that come and go while the load runs, as a list of what happens when.

Pure. Law: the list is walked once before anything starts, so that whatever happens can happen: the replica that is to
go is there, the one that is to come is not, and somebody is always left to take a turn. Entries that repeat, or name no
replica, are written out; instants count from the start of the load. What a crash is to the routers nobody tells them:
they find out as real ones do, and forget the replica only when it is removed or added anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec

from harness.drive import TIME_S_MAX
from harness.errors import UsageError
from harness.fleet_table import REPLICAS_MAX

Deed = Literal["add", "drain", "remove", "crash", "restart"]
REMOVE_LIMIT_S = 30.0
"""How long a replica that is removed may go on with what it has; the usual grace of an orchestrator."""
EVENTS_MAX = 10_000
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}")
_NUMBERED = re.compile(r"r(\d{1,6})")


class ChurnEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the list as a scenario file has it."""

    do: Deed
    """add: joins, cold; or takes turns again after a drain. drain: gets no new turns. remove: drains, then goes. crash:
    gone without a word. restart: in place, with an empty cache and its event sequence at 0."""
    at_s: float | None = None
    """Seconds from the start of the load; an entry that repeats begins after one period unless it says when."""
    replica: str | None = None
    """Unless named: the next number for one to add; a crashed one, or else the one that has run longest."""
    every_s: float | None = None
    """Again and again, with so long between; goes with `until_s`."""
    until_s: float | None = None
    limit_s: float | None = None
    """remove: how long it may go on with what it has, 30 s unless given."""

    def __post_init__(self) -> None:
        for key in ("at_s", "every_s", "until_s", "limit_s"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= TIME_S_MAX:
                raise ValueError(f"churn: {key} = {value}: give seconds, at least 0 and at most {TIME_S_MAX:g}")
        if (self.every_s is None) != (self.until_s is None):
            raise ValueError("churn: every_s and until_s go together: give both, or at_s alone")
        if self.every_s is None and self.at_s is None:
            raise ValueError(f"churn: nothing says when to {self.do}: give at_s, or every_s and until_s")
        if self.every_s == 0:
            raise ValueError("churn: every_s = 0 never ends: give a time above 0")
        if self.every_s and self.replica is not None and self.do != "restart":
            raise ValueError(
                f"churn: every_s would {self.do} {self.replica!r} again and again: leave replica out, so that it is "
                "another one each time"
            )
        if self.limit_s is not None and self.do != "remove":
            raise ValueError(f"churn: limit_s is about do = 'remove', not {self.do!r}: leave it out")
        if self.replica is not None and not _NAME.fullmatch(self.replica):
            raise ValueError(f"churn: replica = {self.replica!r}: use letters, digits and . _ -, such as 'r4'")

    def instants_s(self) -> list[float]:
        first = self.at_s if self.at_s is not None else self.every_s or 0.0
        if self.every_s is None:
            return [first]
        assert self.until_s is not None
        periods = (self.until_s - first) / self.every_s + 1e-9  # infinite where a period is next to nothing
        if periods >= EVENTS_MAX:
            count = f"{math.floor(periods) + 1:,}" if periods < 1e12 else "far too many"
            raise UsageError(
                f"churn: every {self.every_s:g} s until {self.until_s:g} s are {count} times: at most {EVENTS_MAX:,}"
            )
        return [first + i * self.every_s for i in range(max(0, math.floor(periods) + 1))]


class ChurnEvent(msgspec.Struct, frozen=True):
    """One thing that happens to one replica."""

    at_us: int
    do: Deed
    replica: str
    limit_us: int = 0
    """remove: how long it may go on with what it has."""

    def describe(self) -> str:
        return f"{self.at_us / 1e6:g} s {self.do} {self.replica}"


@dataclass(slots=True)
class _State:
    runs_since: int
    alive: bool = True
    draining: bool = False
    gone_us: int | None = None
    """When a removal is over at the latest."""

    @property
    def takes_turns(self) -> bool:
        return self.alive and not self.draining


class _Walk:
    """The fleet as the list leaves it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.states = {name: _State(-1) for name in names}
        self._steps = 0
        self._number = len(names)

    def apply(self, at_us: int, entry: ChurnEntry) -> ChurnEvent:
        self._steps += 1
        name = entry.replica if entry.replica is not None else self._choose(entry.do)
        state = self.states.get(name)
        where = f"churn: at {at_us / 1e6:g} s, {entry.do} {name}"
        limit_us = 0
        if entry.do == "add":
            self._add(at_us, name, state, where)
        else:
            if state is None:
                raise UsageError(f"{where}: no replica of that name: choose one of {', '.join(self.states)}, or add it")
            if state.gone_us is not None:
                raise UsageError(f"{where}: it was removed before: choose one of {', '.join(self._there())}")
            if entry.do == "remove":
                limit_us = round(1e6 * (REMOVE_LIMIT_S if entry.limit_s is None else entry.limit_s))
                state.draining, state.gone_us = True, at_us + limit_us
            elif entry.do == "restart":
                state.alive, state.runs_since = True, self._steps
            elif not state.alive:
                raise UsageError(f"{where}: it crashed before: restart it, add it anew or remove it")
            elif entry.do == "drain" and state.draining:
                raise UsageError(f"{where}: it drains already: leave this out, or remove it")
            elif entry.do == "drain":
                state.draining = True
            else:
                state.alive = False
        if not any(other.takes_turns for other in self.states.values()):
            raise UsageError(f"{where}: no replica would be left to take a turn: add one first, or keep one")
        return ChurnEvent(at_us, entry.do, name, limit_us)

    def _add(self, at_us: int, name: str, state: _State | None, where: str) -> None:
        if state is not None and state.takes_turns and state.gone_us is None:
            raise UsageError(f"{where}: it is there already: give another name, or leave replica out for the next one")
        if state is not None and state.gone_us is not None and at_us <= state.gone_us:
            raise UsageError(
                f"{where}: its removal may last until {state.gone_us / 1e6:g} s: add it later, remove it with a "
                "shorter limit_s, or give another name"
            )
        if state is None and len(self.states) >= REPLICAS_MAX:
            raise UsageError(f"{where}: more than {REPLICAS_MAX} replicas in all: remove some entries")
        runs_since = state.runs_since if state is not None and state.alive and state.gone_us is None else self._steps
        self.states[name] = _State(runs_since)

    def _there(self) -> list[str]:
        return [name for name, state in self.states.items() if state.gone_us is None]

    def _choose(self, do: Deed) -> str:
        """Who is meant where no replica is named."""
        if do == "add":
            while f"r{self._number}" in self.states:
                self._number += 1
            return f"r{self._number}"
        there = [(state.runs_since, name) for name, state in self.states.items() if state.gone_us is None]
        crashed = [name for _, name in sorted(there, key=lambda one: one[0]) if not self.states[name].alive]
        if do in ("remove", "restart") and crashed:
            return crashed[0]
        running = [name for _, name in sorted(there, key=lambda one: one[0]) if self.states[name].takes_turns]
        if not running:
            raise UsageError(f"churn: nobody is left to {do}: remove some entries")
        return running[0]


def churn_events(entries: Sequence[ChurnEntry], names: Sequence[str]) -> tuple[ChurnEvent, ...]:
    """Everything that happens, in order; entries of one instant in the order of the file. `names` are the replicas of
    the start. Raises UsageError for what cannot happen."""
    timed = [(at_s, place, entry) for place, entry in enumerate(entries) for at_s in entry.instants_s()]
    for before, entry in pairwise(entries):
        if entry.every_s is None and before.every_s is None and (entry.at_s or 0) < (before.at_s or 0):
            raise UsageError(
                f"churn: at_s = {entry.at_s:g} stands behind at_s = {before.at_s:g}: write the entries in order of time"
            )
    if len(timed) > EVENTS_MAX:
        raise UsageError(f"churn: {len(timed):,} events are too many: at most {EVENTS_MAX:,}")
    walk = _Walk(names)
    return tuple(walk.apply(round(1e6 * at_s), entry) for at_s, _, entry in sorted(timed, key=lambda one: one[:2]))


def names_with_added(names: Sequence[str], events: Sequence[ChurnEvent]) -> tuple[str, ...]:
    """Every replica that is ever there: those of the start, then those that join, in order."""
    return tuple(dict.fromkeys((*names, *(event.replica for event in events if event.do == "add"))))


def churn_notes(label: str, record: Iterable[Mapping[str, Any]], ended_s: float) -> list[str]:
    """Whole sentences on what was ordered and not done; `ended_s` is when the last request of the arm ended."""
    lines = list(record)
    notes = [
        f"{label}: {line['do']} {line['replica']} at {line['at_s']:g} s was not done ({line['error']}), so this arm "
        "had another fleet than the scenario says: see its router's log"
        for line in lines
        if "error" in line
    ]
    missed = [line for line in lines if line["done_at_s"] is None and "error" not in line]
    if missed:
        first = min(missed, key=lambda line: line["at_s"])
        deed = f"{first['do']} {first['replica']} at {first['at_s']:g} s"
        begun = first["at_s"] < ended_s
        what = f"{deed} was {'begun and not over' if begun else 'not reached'}"
        others = f" ({len(missed)} of {len(lines)} events of [[churn]] were not done)" if len(missed) > 1 else ""
        notes.append(
            f"{label}: {what}, the run ended at {ended_s:.1f} s{others}: let it happen earlier, or give the arm more "
            "to do"
        )
    return notes


def absences(record: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """When replicas were not there, as (from, until) by name, told from what was done: lines with `do`, `replica` and
    `done_us`. A process that was started ahead is there from the instant at which it joined."""
    spans: dict[str, list[tuple[float, float]]] = {}
    gone: dict[str, float] = {}
    lines = list(record)
    for line in lines:
        if line["do"] == "add" and line["replica"] not in names:
            gone.setdefault(line["replica"], -math.inf)
    for line in sorted((one for one in lines if one["done_us"] is not None), key=lambda one: one["done_us"]):
        name = line["replica"]
        if line["do"] in ("crash", "remove"):
            gone.setdefault(name, line["done_us"])
        elif line["do"] in ("add", "restart") and name in gone:
            spans.setdefault(name, []).append((gone.pop(name), line["done_us"]))
    for name, since in gone.items():
        spans.setdefault(name, []).append((since, math.inf))
    return spans
