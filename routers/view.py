"""What a policy sees and says: the values that pass through the policy seam.

Everything here is frozen. A policy gets a `TurnView` and a `FleetView`, answers with a `Decision`, and learns
of the world only through `Observation` values; whatever is not written here (true output lengths, the engine's
Python) no policy can know. The one exception is marked as such: an `Oracle` exists in a simulation alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from routers.errors import FleetError
from routers.hashing import bloom_positions
from routers.prompts import Prompt


class Signal(StrEnum):
    """What a policy may ask the shell (or the simulation) to supply."""

    TEXT = "text"
    TOKENS = "tokens"
    SESSION_ID = "session_id"
    KV_EVENTS = "kv_events"
    ENGINE_METRICS = "engine_metrics"
    REPORTED_PREFIXES = "reported_prefixes"
    ORACLE = "oracle"
    """The truth, which only a simulation can supply (see `Oracle`); asking for it live is an error."""


POLL_INTERVALS_MS = {Signal.ENGINE_METRICS: 200, Signal.REPORTED_PREFIXES: 1000}
"""How often a router asks its replicas for what its policy needs, unless it is told otherwise."""


class Oracle(Protocol):
    """What a simulation knows and a router cannot. A policy that needs `Signal.ORACLE` gets it by `consult(oracle)`.

    Times are model times in microseconds, without rounding. A request is known from before its decision.
    """

    def prompt_tokens(self, request_id: str) -> int: ...

    def output_tokens(self, request_id: str) -> int:
        """True length of the answer."""

    def cached_tokens(self, request_id: str, replica: str) -> int:
        """Prompt tokens that the replica would serve from its cache at this instant."""

    def cache_tokens(self, replica: str) -> int:
        """Tokens that its cache can hold."""

    def prefill_us(self, replica: str, tokens: int) -> float:
        """Engine time for so many prompt tokens; 0 for none."""

    def decode_us(self, replica: str, requests: int, context_tokens: int) -> float:
        """One decode step of a batch of so many requests with so much context in sum."""


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
    adapters_running: tuple[str, ...] = ()  # LoRA adapters of running and of waiting requests, and how many may run
    adapters_waiting: tuple[str, ...] = ()
    adapters_max: int = 0
    at_us: int = 0


class PeerLoad(msgspec.Struct, frozen=True):
    """What one ingress, or all others together, have in flight on a replica. The last two are what policies that book
    prefill and decode blocks owe there; others share none."""

    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    active_blocks: int = 0


NO_LOAD = PeerLoad()


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the router knows it. `in_flight*` are what routers count, never the engine's: this router's own
    requests, and those that its peers told of where ingresses share their load (`elsewhere`, included)."""

    name: str
    url: str | None = None
    in_flight: int = 0
    in_flight_tokens: int = 0  # prompt tokens of the requests in flight, as far as prompts were known
    draining: bool = False
    metrics: EngineMetrics | None = None
    added_us: int = 0
    elsewhere: PeerLoad = NO_LOAD


class FleetView:
    """The routable replicas in stable order (the order of being added), and the instant of the decision."""

    __slots__ = ("_by_name", "down", "draining", "now_us", "ramping", "replicas")

    def __init__(
        self,
        replicas: Sequence[ReplicaView],
        *,
        now_us: int = 0,
        draining: Sequence[ReplicaView] = (),
        ramping: Sequence[ReplicaView] = (),
        down: Sequence[ReplicaView] = (),
    ) -> None:
        self.replicas = tuple(replicas)
        self.draining = tuple(draining)
        self.down = tuple(down)  # took no connection, and have not answered since
        self.ramping = tuple(ramping)  # in good health and kept from this one turn, because they are new
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

    def narrowed(self, replicas: Sequence[ReplicaView], *, ramping: Sequence[ReplicaView] | None = None) -> FleetView:
        """The same instant with fewer replicas to choose from."""
        return FleetView(
            replicas,
            now_us=self.now_us,
            draining=self.draining,
            ramping=self.ramping if ramping is None else ramping,
            down=self.down,
        )

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
    """The turn goes to its replica. `counted` false: it is no load to a router with the fault `untracked_load`, which
    tells nothing of its tokens and its end either; who books load books none, what is believed of caches holds."""

    request_id: str
    replica: str
    turn: TurnView
    decision: Decision
    at_us: int
    counted: bool = True


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
    """Answered to the end, be it with an error of the client's own. `output_tokens` is None where nobody counted."""

    request_id: str
    replica: str
    output_tokens: int | None
    at_us: int


class Failed(msgspec.Struct, frozen=True):
    """The replica failed at the request (or the client left); its load is gone either way."""

    request_id: str
    replica: str
    at_us: int


class SessionEnded(msgspec.Struct, frozen=True):
    """A client said that a session will have no more turns."""

    session_id: str
    at_us: int


class Withdrawn(msgspec.Struct, frozen=True):
    """A request that the router held back was given up before it was placed."""

    request_id: str
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


class Bloom(msgspec.Struct, frozen=True):
    """A set of prefix hashes that may say yes in error and never no (see `hashing.bloom_positions`)."""

    data: bytes
    hashes: int

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or not self.data:
            return False
        places = bloom_positions(value, 8 * len(self.data), self.hashes)
        return all(self.data[place >> 3] >> (place & 7) & 1 for place in places)


class ReportedPrefixes(msgspec.Struct, frozen=True):
    """What a replica says that its cache holds: some of its prefixes as (hash, blocks), or a Bloom filter of all.

    Hashes are `hashing.prefix_token_hashes`; with `by_content` (in a simulation, where no tokens are) they are the keys
    of `hashing.PrefixKeys`. `generation` changes whenever the report does.
    """

    replica: str
    generation: int
    prefixes: tuple[tuple[int, int], ...]
    at_us: int
    bloom: Bloom | None = None
    by_content: bool = False


Observation = (
    Dispatched
    | FirstToken
    | Progress
    | Finished
    | Failed
    | Withdrawn
    | SessionEnded
    | KvEvents
    | EventGap
    | ReplicaAdded
    | ReplicaDraining
    | ReplicaRemoved
    | Metrics
    | ReportedPrefixes
)


class Policy(Protocol):
    """The seam. `choose` decides and changes nothing but its chance; state changes only through `observe`."""

    needs: frozenset[Signal]

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision: ...

    def observe(self, event: Observation) -> None: ...
