"""Sequence numbers of one replica's event stream: what to apply, what to ask for again, when belief is void.

Pure: batches and replies go in, effects come out, and whoever holds the sockets carries them out in order. Batches
reach the index in sequence order or not at all. A hole is filled by replay if the replica offers one; if not, or if
its buffer no longer reaches back, everything believed of that replica is void, and what follows counts again from
nothing. A number that falls back is a restart if its time stamp is newer, an echo if it is not. A connection that is
lost voids the belief at once: whoever is there when it comes back may be another process, and what was said in between
is lost either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from routers.wire import Batch


class Apply(msgspec.Struct, frozen=True):
    batch: Batch


class Invalidate(msgspec.Struct, frozen=True):
    """`reason` is one of gap, restart, disconnect, undecodable: all that was believed of the replica is void."""

    reason: str


class AskReplay(msgspec.Struct, frozen=True):
    """Ask the replica for its batches from `start` on; answer with `replayed`."""

    start: int


Effect = Apply | Invalidate | AskReplay


class StreamStats(msgspec.Struct):
    batches: int = 0  # applied
    events: int = 0
    gaps: int = 0  # holes seen, filled later or not
    missed: int = 0  # batches in holes that were not filled
    replayed: int = 0  # batches that came by replay
    restarts: int = 0
    disconnects: int = 0  # connections that were lost
    echoes: int = 0  # batches dropped because they were old news
    undecodable: int = 0
    invalidations: int = 0
    invalidated: dict[str, int] = {}  # invalidations by reason


class EventStream:
    """`replay`: whether the shell can ask the replica for past batches. `heed` false is the fault of routers that look
    at no number and no connection: whatever comes is applied, and nothing is ever void but what cannot be read."""

    def __init__(self, *, replay: bool = False, heed: bool = True) -> None:
        self.stats = StreamStats()
        self._replay = replay
        self._heed = heed
        self._before: int | None = None  # newest number before the connection was lost
        self._last: int | None = None  # sequence number of the newest batch that was handled
        self._last_ts = float("-inf")
        self._asked: int | None = None  # first number that a running replay shall bring
        self._waiting: list[tuple[int, Batch | None]] = []

    @property
    def last(self) -> int | None:
        return self._last

    @property
    def catching_up(self) -> bool:
        """A replay was asked for and has not come."""
        return self._asked is not None

    def receive(self, sequence: int, batch: Batch | None) -> list[Effect]:
        """A live batch; None stands for one that could not be decoded."""
        if not self._heed:
            return self._take(sequence, batch)
        if self._asked is not None:
            self._waiting.append((sequence, batch))
            return []
        if self._before is not None:
            self.stats.restarts += sequence <= self._before
            self._before = None
        ts = batch.ts if batch is not None else float("-inf")
        if self._last is not None and sequence <= self._last:
            if not self._is_restart(sequence, ts):
                self.stats.echoes += 1
                return []
            self.stats.restarts += 1
            self._last, self._last_ts = None, float("-inf")
            if sequence == 0 or not self._replay:
                return [*self._void("restart"), *self._take(sequence, batch)]
            return [*self._void("restart"), *self._ask(0, sequence, batch)]
        expected = 0 if self._last is None else self._last + 1
        if sequence == expected:
            return self._take(sequence, batch)
        self.stats.gaps += 1
        if self._replay:
            return self._ask(expected, sequence, batch)
        return self._lose(expected, sequence, batch)

    def disconnected(self) -> list[Effect]:
        """The connection to the replica was lost. What comes next counts from nothing, and is asked for from its very
        beginning where there is replay."""
        self.stats.disconnects += 1
        if not self._heed or self._last is None:
            return []
        self._before, self._last, self._last_ts = self._last, None, float("-inf")
        self._asked, self._waiting = None, []
        return self._void("disconnect")

    def replayed(self, batches: Sequence[tuple[int, Batch | None]]) -> list[Effect]:
        """The answer to `AskReplay`, oldest first; empty when the replica gave none in time."""
        start, self._asked = self._asked, None
        if start is None:
            return []
        effects: list[Effect] = []
        waiting, self._waiting = self._waiting, []
        first_live = min((sequence for sequence, _ in waiting), default=None)
        brought = [pair for pair in batches if pair[0] >= start and (first_live is None or pair[0] < first_live)]
        for sequence, batch in [*brought, *waiting]:
            by_replay = first_live is None or sequence < first_live
            expected = 0 if self._last is None else self._last + 1
            if self._last is not None and sequence <= self._last:
                ts = batch.ts if batch is not None else float("-inf")
                if not self._is_restart(sequence, ts):
                    self.stats.echoes += 1
                    continue
                self.stats.restarts += 1
                effects += self._void("restart")
            elif sequence > expected:
                if not by_replay and sequence != first_live:
                    self.stats.gaps += 1  # one more hole, behind the one that was asked for
                effects += self._lose(expected, sequence, batch)
                continue
            self.stats.replayed += by_replay
            effects += self._take(sequence, batch)
        return effects

    def _is_restart(self, sequence: int, ts: float) -> bool:
        """Numbers fall back only in a new process, whose clock has gone on; a late or doubled batch is no newer."""
        if ts > self._last_ts:
            return True
        return sequence == 0 and ts == self._last_ts and self._last != 0

    def _take(self, sequence: int, batch: Batch | None) -> list[Effect]:
        self._last = sequence
        if batch is None:
            self.stats.undecodable += 1
            return self._void("undecodable")
        self._last_ts = batch.ts
        self.stats.batches += 1
        self.stats.events += len(batch.events)
        return [Apply(batch)]

    def _lose(self, expected: int, sequence: int, batch: Batch | None) -> list[Effect]:
        self.stats.missed += sequence - expected
        # A late joiner believed nothing, so nothing is void; its first batches may hang in the air all the same.
        voided = self._void("gap") if self._last is not None else []
        return [*voided, *self._take(sequence, batch)]

    def _ask(self, start: int, sequence: int, batch: Batch | None) -> list[Effect]:
        self._asked = start
        self._waiting = [(sequence, batch)]
        return [AskReplay(start)]

    def _void(self, reason: str) -> list[Effect]:
        self.stats.invalidations += 1
        self.stats.invalidated[reason] = self.stats.invalidated.get(reason, 0) + 1
        return [Invalidate(reason)]
