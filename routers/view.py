"""What a policy sees and says: the values that pass through the policy seam.

Everything here is frozen. A policy gets a `TurnView` and a `FleetView`, answers with a `Decision`, and learns
of the world only through `Observation` values; whatever is not written here (true output lengths, the engine's
Python) no policy can know. The odd thing: a `Prompt` is lazy, so that hashing tokens is paid for only by a
policy that asks, and the simulation can answer from spans without ever making a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from routers.errors import EventError, FleetError
from routers.hashing import local_block_hashes

Hashes = Sequence[int] | npt.NDArray[np.uint64]


class Signal(StrEnum):
    """What a policy may ask the shell (or the simulation) to supply."""

    TEXT = "text"
    TOKENS = "tokens"
    SESSION_ID = "session_id"
    KV_EVENTS = "kv_events"
    ENGINE_METRICS = "engine_metrics"
    REPORTED_PREFIXES = "reported_prefixes"


class Prompt(Protocol):
    """A prompt as somebody tokenised it."""

    @property
    def tokens(self) -> int:
        """Length in tokens; 0 when only the text is known."""

    def block_hashes(self, block_size: int) -> Hashes:
        """Content hash of each full block, not chained (live: XXH3-64 as Dynamo's local hash)."""

    def token_ids(self) -> Sequence[int]: ...

    def text(self) -> str | None: ...


class TokenPrompt:
    """A prompt known by its token ids, hashed once per block size when first asked."""

    __slots__ = ("_hashes", "_ids", "_lora_name", "_text")

    def __init__(self, token_ids: Sequence[int], text: str | None = None, lora_name: str | None = None) -> None:
        self._ids = token_ids
        self._text = text
        self._lora_name = lora_name
        self._hashes: dict[int, npt.NDArray[np.uint64]] = {}

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def block_hashes(self, block_size: int) -> npt.NDArray[np.uint64]:
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes = self._hashes[block_size] = local_block_hashes(self._ids, block_size, self._lora_name)
        return hashes

    def token_ids(self) -> Sequence[int]:
        return self._ids

    def text(self) -> str | None:
        return self._text


class HashedPrompt:
    """A prompt known by its length and the content hashes of its full blocks; has no tokens to give."""

    __slots__ = ("_block_size", "_hashes", "_tokens")

    def __init__(self, tokens: int, hashes: Hashes, block_size: int) -> None:
        if len(hashes) != tokens // block_size:
            raise EventError(
                f"{len(hashes)} block hashes cannot describe {tokens} tokens in blocks of {block_size}: "
                f"give one hash per full block, {tokens // block_size} in all"
            )
        self._tokens = tokens
        self._hashes = hashes
        self._block_size = block_size

    @property
    def tokens(self) -> int:
        return self._tokens

    def block_hashes(self, block_size: int) -> Hashes:
        if block_size != self._block_size:
            raise EventError(
                f"this prompt is hashed in blocks of {self._block_size} tokens and was asked for {block_size}: "
                f"give the policy block_size={self._block_size}"
            )
        return self._hashes

    def token_ids(self) -> Sequence[int]:
        raise EventError("this prompt is known by block hashes only: a policy that reads token ids needs a TokenPrompt")

    def text(self) -> str | None:
        return None


class TextPrompt:
    """A prompt of which only the text is known."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def tokens(self) -> int:
        return 0

    def block_hashes(self, block_size: int) -> Hashes:
        return ()

    def token_ids(self) -> Sequence[int]:
        return ()

    def text(self) -> str | None:
        return self._text


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """One request before it is placed.

    `prompt` is None when the policy did not ask for one or nobody could tokenise it. `max_tokens` is what the client
    asked for at most; a policy reads it only if its options say so. `headers` have lower-case names (live only).
    """

    request_id: str
    session_id: str | None = None
    prompt: Prompt | None = None
    priority: int = 0
    max_tokens: int | None = None
    model: str | None = None
    headers: Mapping[str, str] | None = None
    path: str | None = None


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's own gauges as last polled; `at_us` is when the answer came, so staleness can be judged."""

    running: int
    waiting: int
    kv_usage: float  # 0..1 of the usable blocks; cached blocks nobody refers to count as free
    at_us: int = 0


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the router knows it. `in_flight*` are this router's own counts, never the engine's."""

    name: str
    url: str | None = None
    in_flight: int = 0
    in_flight_tokens: int = 0  # prompt tokens of the requests in flight, as far as prompts were known
    draining: bool = False
    metrics: EngineMetrics | None = None
    added_us: int = 0


class FleetView:
    """The routable replicas in stable order (the order of being added), and the instant of the decision."""

    __slots__ = ("_by_name", "draining", "now_us", "replicas")

    def __init__(
        self, replicas: Sequence[ReplicaView], *, now_us: int = 0, draining: Sequence[ReplicaView] = ()
    ) -> None:
        self.replicas = tuple(replicas)
        self.draining = tuple(draining)
        self.now_us = now_us
        self._by_name: dict[str, ReplicaView] | None = None

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self.replicas)

    def __len__(self) -> int:
        return len(self.replicas)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __getitem__(self, name: str) -> ReplicaView:
        view = self._names().get(name)
        if view is None:
            raise FleetError(f"no routable replica named {name!r}: choose one of {', '.join(self._names()) or 'none'}")
        return view

    def _names(self) -> dict[str, ReplicaView]:
        if self._by_name is None:
            self._by_name = {replica.name: replica for replica in self.replicas}
        return self._by_name


class Decision(msgspec.Struct, frozen=True):
    """Where a turn goes and why.

    `reason` is for people, `rule` is a short stable key for grouping. `believed_hit_tokens` is what the policy thinks
    the replica will serve from its cache; None for a policy that holds no such belief.
    """

    replica: str
    reason: str
    rule: str
    scores: dict[str, float] | None = None
    believed_hit_tokens: int | None = None


class Stored(msgspec.Struct, frozen=True):
    """Blocks that became resident on a replica: `hashes` are the engine's names, `content` what prompts hash to."""

    hashes: tuple[int, ...]
    parent: int | None
    content: tuple[int, ...]
    block_size: int
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None


class Removed(msgspec.Struct, frozen=True):
    hashes: tuple[int, ...]
    medium: str | None = "GPU"


class Cleared(msgspec.Struct, frozen=True):
    """The replica dropped every block of every tier."""


KvEvent = Stored | Removed | Cleared


class Dispatched(msgspec.Struct, frozen=True):
    request_id: str
    replica: str
    turn: TurnView
    decision: Decision
    at_us: int


class FirstToken(msgspec.Struct, frozen=True):
    request_id: str
    replica: str
    at_us: int


class Progress(msgspec.Struct, frozen=True):
    """`output_tokens` is the total so far. Sent only to policies with `wants_progress`."""

    request_id: str
    replica: str
    output_tokens: int
    at_us: int


class Finished(msgspec.Struct, frozen=True):
    """`output_tokens` is None where nobody counted."""

    request_id: str
    replica: str
    output_tokens: int | None
    at_us: int


class Failed(msgspec.Struct, frozen=True):
    """The replica did not serve the request (or the client left); its load is gone either way."""

    request_id: str
    replica: str
    at_us: int


class KvEvents(msgspec.Struct, frozen=True):
    replica: str
    events: tuple[KvEvent, ...]
    at_us: int


class EventGap(msgspec.Struct, frozen=True):
    """Events of this replica were lost or it restarted: what is believed of its cache is void."""

    replica: str
    at_us: int


class ReplicaAdded(msgspec.Struct, frozen=True):
    replica: str
    at_us: int


class ReplicaDraining(msgspec.Struct, frozen=True):
    """Takes no new turns; those in flight go on."""

    replica: str
    at_us: int


class ReplicaRemoved(msgspec.Struct, frozen=True):
    replica: str
    at_us: int


class Metrics(msgspec.Struct, frozen=True):
    replica: str
    metrics: EngineMetrics
    at_us: int


Observation = (
    Dispatched
    | FirstToken
    | Progress
    | Finished
    | Failed
    | KvEvents
    | EventGap
    | ReplicaAdded
    | ReplicaDraining
    | ReplicaRemoved
    | Metrics
)


class Policy(Protocol):
    """The seam. `choose` decides and changes nothing but its chance; state changes only through `observe`."""

    needs: frozenset[Signal]

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision: ...

    def observe(self, event: Observation) -> None: ...
