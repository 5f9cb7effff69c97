"""Which requests and which event batches a replica spoils, and how: decided here, done by the shell.

Every fault is off until it is named by flag or at run time. Each has a stream of chance of its own and draws once an
opportunity while it is on, so the same requests in the same order are hit whichever other faults are on. A request or
a batch is asked about exactly once, when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, Self

import msgspec

from mock_engine.errors import ConfigError
from mock_engine.events import BlockHash, BlockStored, KvEvent

HTTP_STATUSES = (500, 503, 429)
WHOLE_MAX = 2**31 - 1  # requests, tokens or milliseconds
HASH_BITS = 64  # of an integer block hash


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares are of 1; durations are model time."""

    slow_start_ms: int = 0  # the port refuses connections this long after a start or a restart
    refuse_after_requests: int | None = None  # new connections are refused once so many more requests came; 0: now
    refuse_ms: int = 1000  # for so long
    crash_after_requests: int | None = None  # the process exits hard as this request arrives; 0: now
    restart_after_requests: int | None = None  # restarts in place as this request arrives; 0: now
    http_500: float = 0.0  # share of generation requests answered so
    http_503: float = 0.0
    http_429: float = 0.0
    stall: float = 0.0  # share that never gets more than its first tokens, on a connection that stays open
    stall_after_tokens: int = 1
    cut: float = 0.0  # share whose socket is cut after its first tokens
    cut_after_tokens: int = 1
    event_late_ms: int = 0  # batches of this long after a start or a restart are never sent; the sequence counts on
    event_drop: float = 0.0  # share of batches never sent; a replay still has them
    event_delay_ms: int = 0  # every batch leaves this much later, in order
    event_duplicate: float = 0.0  # share of batches sent twice under one sequence number
    event_reorder: float = 0.0  # share of batches sent after the one that follows
    event_reorder_ms: int = 250  # or alone, if none follows for so long: swapped is not lost
    event_wrong_parent: float = 0.0  # share of BlockStored events that name a parent which does not exist

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if value is None:
                continue
            if name in SHARES and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} is no share: give a number from 0 to 1")
            if name not in SHARES and value < 0:
                raise ConfigError(f"{name}={value} is negative: give 0 or more")
            if name not in SHARES and value > WHOLE_MAX:
                raise ConfigError(f"{name}={value} is beyond all use: give at most {WHOLE_MAX}")
        shares = self.http_500 + self.http_503 + self.http_429
        if shares > 1:
            raise ConfigError(f"http_500, http_503 and http_429 add up to {shares:g}: give at most 1 together")

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """With these fields set; null puts a field back to its default."""
        fields = set(self.__struct_fields__)
        unknown = sorted(set(changes) - fields)
        if unknown:
            raise ConfigError(f"no fault named {unknown[0]!r}: choose from {', '.join(self.__struct_fields__)}")
        kept = {**msgspec.structs.asdict(self), **changes}
        try:
            return msgspec.convert({name: value for name, value in kept.items() if value is not None}, type(self))
        except msgspec.ValidationError as error:
            raise ConfigError(f"faults: {error}") from error

    def active(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value != getattr(OFF, name)}


SHARES = frozenset(name for name, kind in Faults.__annotations__.items() if kind == "float")
OFF = Faults()


def parse_faults(texts: Sequence[str]) -> Faults:
    """`NAME=VALUE` each, as --mock-fault takes them; dashes in names do as underscores."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in Faults.__struct_fields__:
            raise ConfigError(f"no fault named {name!r}: choose from {', '.join(Faults.__struct_fields__)}")
        try:
            changes[name] = float(value) if name in SHARES else int(value)
        except ValueError:
            kind = "a share from 0 to 1" if name in SHARES else "a whole number"
            example = "0.1" if name in SHARES else "100"
            raise ConfigError(f"--mock-fault {text}: {name} wants {kind}; write {name}={example}") from None
    return OFF.changed(changes)


class RequestFault(NamedTuple):
    """What becomes of one generation request. `then` is a trigger that goes off as it arrives."""

    status: int | None = None
    stall_after: int | None = None
    cut_after: int | None = None
    then: tuple[str, ...] = ()  # of crash, restart, refuse


UNHARMED = RequestFault()


class BatchFault(NamedTuple):
    """What becomes of one batch; its events may have been tampered with."""

    events: Sequence[KvEvent]
    lost: str | None = None  # the fault that keeps it from being sent
    copies: int = 1
    swap_us: int | None = None  # send it after the next one, or alone after this time
    delay_us: int = 0
    wrong_parents: int = 0


TRIGGERS = {
    "restart": "restart_after_requests",
    "refuse": "refuse_after_requests",
    "crash": "crash_after_requests",
}


class FaultPlan:
    """`seed` is any text; plans with equal seeds and faults decide alike."""

    def __init__(self, faults: Faults = OFF, seed: str = "") -> None:
        self._seed = seed
        self._streams: dict[str, Random] = {}
        self._left: dict[str, int] = {}  # requests until a trigger goes off
        self.faults = OFF
        self.at_start = self.set(faults)

    def set(self, faults: Faults) -> tuple[str, ...]:
        """From now on; returns the triggers that go off at once. Setting a trigger's count again starts it anew."""
        at_once = []
        for action, name in TRIGGERS.items():
            count = getattr(faults, name)
            if count is None:
                self._left.pop(action, None)
            elif count == 0:
                self._left.pop(action, None)
                at_once.append(action)
            elif count != getattr(self.faults, name) or action not in self._left:
                self._left[action] = count
        # What went off is over: asked again with the same number, it counts from the beginning.
        left = msgspec.structs.replace(faults, **{TRIGGERS[action]: None for action in at_once})
        self.faults = OFF if left == OFF else left
        return tuple(at_once)

    def _stream(self, name: str) -> Random:
        return self._streams.setdefault(name, Random(f"{self._seed}/{name}"))

    def _hits(self, name: str, stream: str = "") -> bool:
        share: float = getattr(self.faults, name)
        return share > 0 and self._stream(f"{name}{stream}").random() < share

    def request(self) -> RequestFault:
        """For the generation request that arrives now."""
        faults = self.faults
        if faults is OFF:
            return UNHARMED
        then = []
        for action in [action for action, left in self._left.items() if left == 1]:
            del self._left[action]
            self.faults = msgspec.structs.replace(self.faults, **{TRIGGERS[action]: None})
            then.append(action)
        for action in self._left:
            self._left[action] -= 1
        return RequestFault(
            status=self._status(),
            stall_after=faults.stall_after_tokens if self._hits("stall") else None,
            cut_after=faults.cut_after_tokens if self._hits("cut") else None,
            then=tuple(then),
        )

    def _status(self) -> int | None:
        shares = [getattr(self.faults, f"http_{status}") for status in HTTP_STATUSES]
        if not any(shares):
            return None
        drawn = self._stream("http").random()
        for status, share in zip(HTTP_STATUSES, shares, strict=True):
            if drawn < share:
                return status
            drawn -= share
        return None

    def batch(self, rank: int, events: Sequence[KvEvent], since_start_us: int) -> BatchFault:
        """For the batch that a rank would publish now."""
        faults = self.faults
        if faults is OFF:
            return BatchFault(events)
        events, wrong = self._tampered(rank, events)
        lost = None
        if self._hits("event_drop", f"/{rank}"):
            lost = "event_drop"
        if since_start_us < faults.event_late_ms * 1000:
            lost = "event_late_ms"
        return BatchFault(
            events,
            lost=lost,
            copies=2 if self._hits("event_duplicate", f"/{rank}") else 1,
            swap_us=faults.event_reorder_ms * 1000 if self._hits("event_reorder", f"/{rank}") else None,
            delay_us=faults.event_delay_ms * 1000,
            wrong_parents=wrong,
        )

    def _tampered(self, rank: int, events: Sequence[KvEvent]) -> tuple[Sequence[KvEvent], int]:
        if not self.faults.event_wrong_parent:
            return events, 0
        made: list[KvEvent] = []
        wrong = 0
        for event in events:
            if isinstance(event, BlockStored) and self._hits("event_wrong_parent", f"/{rank}"):
                parent = _nobody(self._stream(f"parent/{rank}"), event.block_hashes[0])
                event = msgspec.structs.replace(event, parent_block_hash=parent)
                wrong += 1
            made.append(event)
        return made, wrong


def _nobody(rng: Random, like: BlockHash) -> BlockHash:
    """A hash of the same kind that no block has, but for a chance of one in 2**64."""
    return rng.getrandbits(HASH_BITS) if isinstance(like, int) else rng.randbytes(len(like))
