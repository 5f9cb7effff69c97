"""What all kinds of workload have in common: the base of every `[workload]` table.

A kind draws its sessions in `draw`; what the base adds is put on them here, so that switching it on changes no other
number. `timestamp_prefix` is one token that differs in every request, from a stream of its own: the smallest change
that makes every block of a prompt another one, as a clock at the top of a system prompt does. `tenants` deals the
sessions out in turn, so no chance enters; a session that waits for another one belongs to the same tenant.

Law: a number is a constant or a distribution, drawn from a stream of its own. Three sorts of numbers are constants
only: counts of the whole (sessions, steps, bursts, groups and how a step is made of them), which are the size of the
experiment and not a property of its traffic; shares and exponents, which are chances already; and limits of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from workloads.distributions import check_length, check_pause, length_sampler, pause_sampler_us
from workloads.limits import SESSIONS_MAX, Whole, at_least
from workloads.sessions import Session
from workloads.spans import SPAN_ID_BITS
from workloads.streams import Streams

TIMESTAMP_TOKENS = 1


class WorkloadTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: frozen, every unknown key refused."""

    kind: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names other load tools give to a key of ours: a table may use either, not both."""
    pauses: ClassVar[tuple[str, ...]] = ()
    """Keys that are a time in milliseconds or a distribution of it; their names end with `_ms`."""

    timestamp_prefix: bool = False
    """True: every request begins with a token of its own, so nothing can be reused."""
    tenants: int = 1
    """Owners of sessions, each with a cache salt of its own (`tenant-0`, ...): no block is shared between them, while
    all texts stay as they are. 1: no salt. Salts that a trace states stand."""

    def __post_init__(self) -> None:
        """Kinds check what `lengths` computes with, then call this."""
        at_least("tenants", self.tenants, 1, SESSIONS_MAX)
        for name, fits in self.lengths().items():
            check_length(name, getattr(self, name), fits)
        for name in self.pauses:
            check_pause(name, getattr(self, name))

    def lengths(self) -> Mapping[str, Whole]:
        """Keys that are a whole number or a distribution of it, each with what it may be."""
        return {}

    def sampler(self, name: str, streams: Streams, stream: str | None = None) -> Callable[[], int]:
        """Draws one of `lengths`, from the stream of its name unless another one is given."""
        fits = self.lengths()[name]
        return length_sampler(getattr(self, name), streams[f"workloads.{stream or name}"], fits.low, fits.high)

    def pause_sampler_us(self, name: str, streams: Streams) -> Callable[[], int]:
        """Draws one of `pauses`."""
        return pause_sampler_us(getattr(self, name), streams[f"workloads.{name.removesuffix('_ms')}"])

    def total(self, name: str, times: int, streams: Streams) -> int:
        """Sum of the first `times` samples of one of `lengths`."""
        value = getattr(self, name)
        if isinstance(value, int):
            return times * value
        sample = self.sampler(name, streams)
        return sum(sample() for _ in range(times))

    @property
    def barrier(self) -> bool:
        """See `Workload`."""
        return False

    def session_count(self, streams: Streams) -> int:
        """See `Workload`."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, table: dict[str, Any]) -> dict[str, Any]:
        """A table as the user wrote it, with keys that stand for several of ours taken apart. Raises ValueError."""
        return table

    def draw(self, streams: Streams) -> Iterator[Session]:
        """The sessions of this kind, without what the base adds."""
        raise NotImplementedError

    def sessions(self, streams: Streams) -> Iterator[Session]:
        """See `Workload`."""
        return self.completed(self.draw(streams), streams)

    def completed(self, drawn: Iterator[Session], streams: Streams) -> Iterator[Session]:
        """Drawn sessions with what the base adds. Raises ValueError."""
        if self.timestamp_prefix:
            drawn = _with_fronts(drawn, streams)
        return _with_salts(drawn, self.tenants) if self.tenants != 1 else drawn

    def syncs_after_step(self, step: int) -> bool:
        """True: new weights arrive when every rollout of this step has ended, which makes all cached KV worthless. A
        driver then resets the engines' prefix caches before it starts a session of a later step, and with a
        workload that streams its steps must let what runs end first, as an engine refuses a reset while it works."""
        return False


def _with_fronts(sessions: Iterator[Session], streams: Streams) -> Iterator[Session]:
    fronts = streams["workloads.timestamps"]
    for session in sessions:
        turns = tuple(
            replace(turn, front=(fronts.getrandbits(SPAN_ID_BITS), TIMESTAMP_TOKENS)) for turn in session.turns
        )
        yield replace(session, turns=turns)


def _with_salts(sessions: Iterator[Session], tenants: int) -> Iterator[Session]:
    owners: dict[str, int] = {}
    """Of everything that a later session may wait for."""
    dealt = 0
    for session in sessions:
        owner = next((owners[name] for name in session.after if name in owners), None)
        if owner is None:
            owner = dealt % tenants
            dealt += 1
        for name in (session.session_id, *(turn.name for turn in session.turns if turn.name is not None)):
            owners[name] = owner
        yield session if session.cache_salt is not None else replace(session, cache_salt=f"tenant-{owner}")
