"""How sessions become requests: the keys that a scenario's `[load]` table and a load plan have in common.

Three drivers. `sessions` holds a slot from a session's first turn to its last, through its think times. `requests`
holds one only while a request is in flight, so turns of any session may fill it. `rate` starts sessions at instants of
their own, whatever the answers do (an open loop); their later turns follow the answers. What cannot work together is
refused here, once, for the simulation and for Locust alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from workloads import SESSIONS_MAX

DriverName = Literal["sessions", "requests", "rate"]
Arrival = Literal["constant", "poisson", "gamma", "trace"]
TIME_S_MAX = 1e9
"""Longest of a load's own times, 30 years: a slip of the pen and not a plan."""
SLOTS = 16
"""Slots of a closed loop that does not say how many."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of an open loop with one rate."""

    rate_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_s < math.inf:
            raise ValueError(f"rate_per_s = {self.rate_per_s}: give a rate from 0, and 0 for a pause")
        if not 0 < self.duration_s <= TIME_S_MAX:
            raise ValueError(f"duration_s = {self.duration_s}: it lasts longer than 0 s, at most {TIME_S_MAX:g}")


class Drive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The driver and its keys; a key that a driver has no use for is refused, not ignored."""

    driver: DriverName = "sessions"
    concurrency: int | None = None
    """sessions: slots. requests: most requests in flight. rate: the same as a cap on an open loop, which then counts
    the wait for it as lag; without one there is none."""
    ramp_s: float = 0.0
    """Closed loops: slots open one after the other, evenly over this time. rate: the rate grows from 0. Turns due in it
    are warm-up."""
    rate_per_s: float | None = None
    """Sessions a second that start."""
    arrival: Arrival | None = None
    """rate: poisson unless said; trace: every session has an instant of its own."""
    burstiness: float = 1.0
    """Shape of gamma gaps, whose squared coefficient of variation is 1/shape: 1 is Poisson, less is burstier."""
    stages: tuple[Stage, ...] = ()
    """Rates one after the other, in place of `rate_per_s`; no session starts after the last."""
    warmup_sessions: int = 0
    """All turns of the first so many sessions are warm-up: sent, but not measured."""
    warmup_s: float = 0.0
    """Turns due before this time are warm-up."""
    drain_s: float | None = None
    """How long what is going on may last after the last session has started (or the last stage has ended); then it is
    cancelled and counted. Without it everything ends by itself."""
    weight_sync: Literal["wait", "at-once"] = "wait"
    """When a workload brings new weights and caches are reset. wait: everything that runs ends first, later steps wait.
    at-once: the steps go on, and an engine that works refuses the reset."""

    def __post_init__(self) -> None:
        if self.driver == "rate":
            self._check_rate()
        else:
            self._check_closed()
        for name in ("ramp_s", "warmup_s", "warmup_sessions"):
            if not 0 <= getattr(self, name) <= TIME_S_MAX:
                raise ValueError(f"{name} = {getattr(self, name)}: from 0 to {TIME_S_MAX:g}, and 0 for none")
        if self.concurrency is not None and self.concurrency < 1:
            what = "session slot" if self.driver == "sessions" else "request in flight"
            raise ValueError(f"concurrency = {self.concurrency}: at least 1 {what} is needed")
        if self.concurrency is not None and self.concurrency > SESSIONS_MAX:
            raise ValueError(
                f"concurrency = {self.concurrency}: no workload has more than {SESSIONS_MAX:,} sessions; lower it"
            )
        if self.drain_s is not None and not 0 <= self.drain_s <= TIME_S_MAX:
            raise ValueError(
                f"drain_s = {self.drain_s}: give a time from 0 to {TIME_S_MAX:g}, or leave it out for no limit"
            )

    def _check_closed(self) -> None:
        for name in ("rate_per_s", "arrival"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is for the open loop, and driver = {self.driver!r} is a closed one: "
                    f"remove it, or write driver = 'rate'"
                )
        if self.stages or self.burstiness != 1.0:
            name = "stages" if self.stages else "burstiness"
            raise ValueError(
                f"{name} is for the open loop, and driver = {self.driver!r} is a closed one: "
                "remove it, or write driver = 'rate'"
            )
        if self.concurrency is None:
            msgspec.structs.force_setattr(self, "concurrency", SLOTS)

    def _check_rate(self) -> None:
        if self.arrival is None:
            msgspec.structs.force_setattr(self, "arrival", "poisson" if self.burstiness == 1.0 else "gamma")
        if self.arrival == "trace":
            given = [n for n, set_ in (("rate_per_s", self.rate_per_s), ("stages", self.stages)) if set_]
            given += ["ramp_s"] if self.ramp_s else []
            if given:
                raise ValueError(
                    f"{given[0]} and arrival = 'trace' both say when sessions start: remove one of them "
                    "(the workload's speedup makes a trace faster)"
                )
        elif self.stages and self.rate_per_s is not None:
            raise ValueError("rate_per_s and stages both say how fast sessions start: remove one of them")
        elif not self.stages and self.rate_per_s is None:
            raise ValueError("driver = 'rate' needs rate_per_s, stages, or arrival = 'trace': give one of them")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"rate_per_s = {self.rate_per_s}: give a finite rate above 0")
        if self.stages and not any(stage.rate_per_s for stage in self.stages):
            raise ValueError("every stage has rate_per_s = 0, so nothing would ever start: give one a rate")
        if self.stages and self.ramp_s > self.stages[0].duration_s:
            raise ValueError(
                f"ramp_s = {self.ramp_s:g} is longer than the first stage, {self.stages[0].duration_s:g} s: "
                "shorten the ramp or lengthen the stage"
            )
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness = {self.burstiness}: give a gamma shape above 0; 1 is Poisson")
        if self.burstiness != 1.0 and self.arrival != "gamma":
            raise ValueError(f"burstiness = {self.burstiness:g} shapes gamma gaps only: write arrival = 'gamma'")

    @property
    def open_loop(self) -> bool:
        return self.driver == "rate"

    @property
    def slots(self) -> int | None:
        """Slots of a closed loop; None for an open one."""
        return None if self.open_loop else self.concurrency

    @property
    def plan_us(self) -> int | None:
        """How long sessions start, if stages say so."""
        return round(sum(stage.duration_s for stage in self.stages) * 1e6) if self.stages else None

    def describe(self) -> str:
        """The driver in a few words."""
        if self.driver == "sessions":
            return f"{self.concurrency} session slots"
        if self.driver == "requests":
            return f"at most {self.concurrency} requests in flight"
        rates = [stage.rate_per_s for stage in self.stages] or ([self.rate_per_s] if self.rate_per_s else [])
        listed = ", then ".join(f"{rate:g}" for rate in rates)
        speed = f"{listed} sessions a second" if rates else "sessions at instants of their own"
        cap = f", at most {self.concurrency} requests in flight" if self.concurrency else ""
        return f"an open loop ({self.arrival}): {speed}{cap}"

    def drive(self) -> dict[str, object]:
        """These keys alone, to build another struct that has them."""
        return {name: getattr(self, name) for name in Drive.__struct_fields__}


ALIASES = {"request_rate": "rate_per_s", "max_concurrency": "concurrency"}
"""Names that `vllm bench serve` gives to keys of ours."""


OF_SLOTS = ("driver", "concurrency", "ramp_s")
"""Keys of a `[load]` that ask for slots; where none is given, sessions with instants of their own start at those."""
BY_INSTANTS = {"driver": "rate", "arrival": "trace"}


def unaliased(table: Mapping[str, Any]) -> dict[str, Any]:
    """A `[load]` table under our names. Raises ValueError when one number is given under two names."""
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        name = ALIASES.get(key, key)
        if name in renamed:
            raise ValueError(f"{key} and another name of {name} are both given: keep {name}")
        renamed[name] = value
    return renamed


class Load(Drive, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario's `[load]` table: the driver, and how its requests travel."""

    api: Literal["completions-ids", "completions-text", "chat"] = "completions-ids"
    """How a prompt travels: token ids (exact), text, or chat messages."""
    session_header: str = "X-Session-ID"
    """Header that carries the session id; a router that needs one reads it there."""
    request_timeout_s: float = 300.0
    """A request without an end after this long is counted as failed, of class `timeout`."""
    model: str = "mock-model"
    """`model` of every request; our replicas serve this name."""
    overlong: Literal["refuse", "send"] = "refuse"
    """A session that outgrows `engine.max_model_len`. refuse: it is a slip of the pen and nothing is run. send: it is
    meant, and the engine answers its first request that is too long with HTTP 400, which ends the session."""
    processes: int = 1
    """Load generator processes of a live run; each sends its share of the sessions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.request_timeout_s <= TIME_S_MAX:
            raise ValueError(f"request_timeout_s = {self.request_timeout_s}: from above 0 to {TIME_S_MAX:g} s")
        if self.processes < 1:
            raise ValueError(f"processes = {self.processes}: at least 1 is needed")
        if self.concurrency is not None and self.processes > self.concurrency:
            raise ValueError(
                f"processes = {self.processes} would share concurrency = {self.concurrency}: each needs at least one "
                "slot, so ask for fewer processes"
            )
