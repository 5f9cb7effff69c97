"""Session rings of routers in the field, hash for hash: `ray-consistent-hash`, `vllm-consistent-hash`.

Their traps are theirs and kept: Ray's ring never looks at load, and vllm-router sends every chat request without one
of its headers to a single replica, because its key is then the same empty text.
"""

from __future__ import annotations

import random
import re
from typing import Any

from routers.config import Options, at_least
from routers.murmur import murmur3_low64, vllm_hash
from routers.policies.base import BasePolicy
from routers.policies.session import SessionPolicy
from routers.ring import HashRing
from routers.view import (
    Decision,
    FleetView,
    Observation,
    ReplicaAdded,
    ReplicaDraining,
    ReplicaRemoved,
    Signal,
    TurnView,
)

RAY_SEED = 0xF9B4CA77
VLLM_KEY_HEADERS = (
    "x-session-id",
    "x-user-id",
    "x-tenant-id",
    "x-correlation-id",
    "x-request-id",
    "x-trace-id",
)
VLLM_POINTS = 160
_TEXT_KEY_BYTES_MAX = 100


def ray_hash(text: str) -> int:
    """Low 64 bits of MurmurHash3 x64-128 with Ray Serve's seed."""
    return murmur3_low64(text.encode(), RAY_SEED)


class RayConsistentHashOptions(Options, frozen=True):
    """Names and defaults of Ray 2.60's `ConsistentHashRouter`.

    - `num_virtual_nodes`: points of a replica on the ring.
    - `num_fallback_replicas`: clockwise successors that may stand in for an owner that cannot take the request.
    """

    num_virtual_nodes: int = 100
    num_fallback_replicas: int = 2

    def __post_init__(self) -> None:
        at_least(1, num_virtual_nodes=self.num_virtual_nodes)
        at_least(0, num_fallback_replicas=self.num_fallback_replicas)


class RayConsistentHash(SessionPolicy):
    """A turn without session id is hashed by its request id, which spreads such turns evenly."""

    about = "Ray Serve's ring: MurmurHash3, 100 points, two successors as fallback, load never compared"
    believes = "A session's turns share a prefix, so they belong on one replica. Load is never compared."
    source = "ray-project/ray 2.60.0, serve/experimental/consistent_hash_router.py"
    fails = (
        "Sessions that grow unequally overfill their replica and nothing moves away (field case BL-01); prefixes that "
        "different sessions share are prefilled on every replica. Without a session id it is uniform by request."
    )
    Options = RayConsistentHashOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._ring = HashRing(points=self.options.num_virtual_nodes, hash_text=ray_hash, inclusive=False)

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        key = turn.session_id if turn.session_id is not None else turn.request_id
        what = "session" if turn.session_id is not None else "request id, there is no session,"
        for place, name in enumerate(self._ring.walk(key)):
            if place > self.options.num_fallback_replicas:
                break
            if name in fleet:
                if place:
                    return Decision(name, f"successor {place} on the ring stands in for the owner", "ring-next")
                return Decision(name, f"owner of the {what} on the ring", "ring")
        return self.by_load(turn, fleet, "owner and fallbacks cannot take it", "no-owner")

    def observe(self, event: Observation) -> None:
        super().observe(event)
        if isinstance(event, ReplicaAdded):
            self._ring.add(event.replica)
        elif isinstance(event, ReplicaDraining | ReplicaRemoved):
            self._ring.remove(event.replica)


_FIELD_VALUE = re.compile(r'"?\s*:\s*(?:"([^"]*)"|([^\s,}\]]+))')
_SESSION_PARAMS = re.compile(r'"session_params"\s*:\s*\{([^}]*)\}')
_TEXT_FIELDS = (("user", "user"), ("session_id", "session"), ("user_id", "user"))


def vllm_header(turn: TurnView) -> tuple[str, str] | None:
    """Name and value of the first id header that the request has, as vllm-router 0.1.17 looks for it.

    Where no real headers are (in a simulation) the session id stands for its header.
    """
    headers = turn.headers or ({VLLM_KEY_HEADERS[0]: turn.session_id} if turn.session_id is not None else {})
    for name in VLLM_KEY_HEADERS:
        value = headers.get(name)
        if value:
            return name, value
    return None


def vllm_text(turn: TurnView) -> str:
    """What vllm-router takes for a request's text: a completion's prompt, and nothing of a chat."""
    chat = turn.path is not None and turn.path.endswith("/chat/completions")
    return "" if chat or turn.prompt is None else turn.prompt.text() or ""


def vllm_text_field(text: str, name: str) -> str | None:
    """The value behind the first `name:` in a text, quoted or not. The text is a prompt and the router searches it as
    if it were JSON, so a line such as `user: alice` is found; when no colon follows the first `name`, nothing is."""
    at = text.find(name)
    found = _FIELD_VALUE.match(text, at + len(name)) if at >= 0 else None
    if found is None:
        return None
    return found[1] if found[1] is not None else found[2]


def vllm_key(turn: TurnView) -> str:
    """What vllm-router 0.1.17 hashes: the first of its headers, else a field found in the text, else the text itself,
    or above 100 bytes its hash. All forms were compared with the released binary, placement by placement."""
    header = vllm_header(turn)
    if header is not None:
        return f"header:{header[0]}:{header[1]}"
    text = vllm_text(turn)
    params = _SESSION_PARAMS.search(text)
    session = vllm_text_field(params[1], "session_id") if params else None
    if session is not None:
        return f"session:{session}"
    for name, kind in _TEXT_FIELDS:
        value = vllm_text_field(text, name)
        if value is not None:
            return f"{kind}:{value}"
    if len(text.encode()) <= _TEXT_KEY_BYTES_MAX:
        return f"request:{text}"
    return f"request_hash:{vllm_hash(text):016x}"


class VllmConsistentHash(BasePolicy):
    about = "vllm-router's ring: first of its id headers, else the prompt's text; chat without headers pins one replica"
    believes = "Turns with the same id header, or the same text, belong on one replica. Load is never compared."
    source = "vllm-project/router 0.1.17, src/policies/consistent_hash.rs and hash_key.rs"
    fails = (
        "Chat requests without one of its headers all have the same empty key and go to one replica. A prompt's line "
        "such as `user: alice` becomes the key. Sessions that grow overfill their replica (field case BL-01)."
    )
    needs = frozenset({Signal.SESSION_ID, Signal.TEXT})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._ring = HashRing(points=VLLM_POINTS, hash_text=vllm_hash)
        self._members: dict[str, str] = {}  # label on the ring (the URL where there is one) -> name

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        self._follow(fleet)
        key = vllm_key(turn)
        # The fleet is not empty, so somebody of it is on the ring; only those that are being let in are stepped over.
        owner = next(name for label in self._ring.walk(key) if (name := self._members[label]) in fleet)
        kind = key.partition(":")[0]
        return Decision(owner, f"owner of {key[:60]!r} on the ring", f"ring-{kind}")

    def _follow(self, fleet: FleetView) -> None:
        """The ring holds the workers that are available now."""
        members = {replica.url or replica.name: replica.name for replica in (*fleet, *fleet.ramping)}
        if members != self._members:
            for label in self._members.keys() - members.keys():
                self._ring.remove(label)
            for label in members.keys() - self._members.keys():
                self._ring.add(label)
            self._members = members
