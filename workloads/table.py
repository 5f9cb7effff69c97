"""What all kinds of workload have in common: the base of every `[workload]` table.

A kind draws its sessions in `draw`; what `timestamp_prefix` adds is put in front here, from a stream of its own, so
that switching it on changes no other number. The prefix is one token that differs in every request: the smallest
change that makes every block of a prompt another one, as a clock at the top of a system prompt does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from workloads.sessions import Session
from workloads.spans import SPAN_ID_BITS
from workloads.streams import Streams

TIMESTAMP_TOKENS = 1


class WorkloadTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: frozen, every unknown key refused."""

    kind: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names other load tools give to a key of ours: a table may use either, not both."""

    timestamp_prefix: bool = False
    """True: every request begins with a token of its own, so nothing can be reused."""

    @property
    def barrier(self) -> bool:
        """See `Workload`."""
        return False

    @property
    def session_count(self) -> int:
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
        drawn = self.draw(streams)
        return _with_fronts(drawn, streams) if self.timestamp_prefix else drawn

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


def at_least(name: str, value: int, low: int) -> None:
    """Refuses a whole number below `low`."""
    if value < low:
        raise ValueError(f"{name} = {value}: at least {low} is needed")


def share(name: str, value: float) -> None:
    """Refuses what is no share of a whole."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value:g}: give a share from 0 to 1")
