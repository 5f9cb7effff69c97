"""A scenario's `[faults]`: what goes wrong at the engines and at the router, and which of it virtual time knows.

Keys are the engines' own fault names; those of the router begin with `router_`. `replicas` limits the engines' faults
to some of the fleet. Law: a mode that cannot do a fault refuses it, so that no run looks sound for want of its trouble.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.errors import UsageError, choose_from
from mock_engine import Faults, MockEngineError
from routers import RouterFaults, RoutersError

ROUTER_PREFIX = "router_"
IN_SIM = ("event_drop", "event_delay_ms")
"""Engine faults that virtual time knows; the others live in sockets and processes."""


class FaultTable(msgspec.Struct, frozen=True, kw_only=True):
    """Checked faults of a scenario; falsy when nothing goes wrong."""

    engine: Faults = Faults()
    router: RouterFaults = RouterFaults()
    replicas: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.engine.active() or self.router)

    def engine_flags(self, replica: str) -> list[str]:
        """Arguments of one replica's process."""
        if self.replicas and replica not in self.replicas:
            return []
        return [word for name, value in self.engine.active().items() for word in ("--mock-fault", f"{name}={value}")]

    def to_table(self) -> dict[str, Any]:
        """The table that gives these faults."""
        router = {f"{ROUTER_PREFIX}{key}": value for key, value in msgspec.structs.asdict(self.router).items() if value}
        return {**self.engine.active(), **router, **({"replicas": list(self.replicas)} if self.replicas else {})}

    def require_simulable(self) -> None:
        """Raises UsageError for a fault that only processes can have or commit."""
        for name in self.engine.active():
            if name not in IN_SIM:
                raise UsageError(f"faults.{name} happens to processes and sockets, which virtual time has none of: "
                                 f"use --mode live, or keep to {', '.join(IN_SIM)} and router_ faults")  # fmt: skip


def read_faults(table: Mapping[str, Any], replicas: Sequence[str]) -> FaultTable:
    """A `[faults]` table. Raises UsageError that names the key and the mend."""
    given = dict(table)
    only = _only(given.pop("replicas"), replicas) if "replicas" in given else ()
    engine = {key: value for key, value in given.items() if not key.startswith(ROUTER_PREFIX)}
    router = {key.removeprefix(ROUTER_PREFIX): value for key, value in given.items() if key not in engine}
    known = [*Faults.__struct_fields__, *(f"{ROUTER_PREFIX}{name}" for name in RouterFaults.__struct_fields__)]
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {key!r} in faults: {choose_from(key, [*known, 'replicas'])}")
    try:
        return FaultTable(engine=Faults().changed(engine), router=msgspec.convert(router, RouterFaults), replicas=only)
    except (MockEngineError, RoutersError, msgspec.ValidationError) as error:
        raise UsageError(f"faults: {error}") from error


def _only(given: Any, replicas: Sequence[str]) -> tuple[str, ...]:
    """The replicas that faults are limited to. Raises UsageError."""
    if not isinstance(given, list) or not set(map(str, given)) <= set(replicas):
        raise UsageError(f"faults.replicas = {given!r}: give a list of names out of {', '.join(replicas)}")
    if not given:
        raise UsageError("faults.replicas = [] leaves nobody to have the faults: name some, or leave it out for all")
    twice = [name for name in dict.fromkeys(given) if given.count(name) > 1]
    if twice:
        raise UsageError(f"faults.replicas names {twice[0]!r} twice: once is enough")
    return tuple(given)


class EventTrouble:
    """The event faults of one replica in virtual time: batches that never come, and batches that come late.

    A router that numbers batches, as ours does, notices the hole with the next batch that does come.
    """

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._drop = faults.event_drop
        self.delay_us = faults.event_delay_ms * 1000
        self._rng = rng
        self._hole = False

    def take(self) -> tuple[bool, bool]:
        """(the batch arrives, a hole lies before it)."""
        if self._drop and self._rng.random() < self._drop:
            self._hole = True
            return False, False
        hole, self._hole = self._hole, False
        return True, hole
