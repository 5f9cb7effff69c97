"""Policies that hash a session to its replica: `session-ring`, `session-ring-valve`, `session-modulo`.

They know nothing of caches: the turns of one session share a prefix by construction, so staying is a guarantee of
locality, and without a valve nothing ever moves away from a replica that drowns.
"""

from __future__ import annotations

import random
from typing import Any

from routers.config import Options, at_least
from routers.policies.base import BasePolicy
from routers.policies.load import LeastRequests
from routers.ring import HashRing, xxh3
from routers.view import Decision, FleetView, Observation, ReplicaAdded, ReplicaRemoved, Signal, TurnView


class SessionPolicy(BasePolicy):
    """A turn without session id, and whatever else the session cannot settle, goes where least is in flight."""

    needs = frozenset({Signal.SESSION_ID})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._by_load = LeastRequests(rng=rng, block_size=block_size)

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        if turn.session_id is None:
            return self.by_load(turn, fleet, "no session id", "no-session")
        return self.place(turn.session_id, turn, fleet)

    def place(self, session_id: str, turn: TurnView, fleet: FleetView) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} has no place(session_id, turn, fleet): write one")

    def by_load(self, turn: TurnView, fleet: FleetView, why: str, rule: str) -> Decision:
        other = self._by_load.choose(turn, fleet)
        return Decision(other.replica, f"{why}; {other.reason}", rule)

    def observe(self, event: Observation) -> None:
        self._by_load.observe(event)


class SessionRingOptions(Options, frozen=True):
    """As vllm-router's `consistent_hash` and production-stack's session router.

    - `virtual_nodes`: points of a replica on the ring (Ray's has 100).
    """

    virtual_nodes: int = 160

    def __post_init__(self) -> None:
        at_least(1, virtual_nodes=self.virtual_nodes)


class SessionRing(SessionPolicy):
    """A replica that drains or was tried in vain stays on the ring and is stepped over, so that only its own sessions
    move, and they come back with it."""

    about = "each session to the replica that owns its id on a consistent-hash ring; without an id, the least loaded"
    believes = "A session's turns share a prefix, so they belong on one replica. Load is never compared."
    source = "the first strategy of the reference text on prefix-aware routing (session affinity)"
    fails = (
        "Sessions that grow unequally overfill their replica, which then evicts the prefixes they need next, and "
        "nothing moves away (field case BL-01). What different sessions share is prefilled on every replica."
    )
    Options = SessionRingOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._ring = HashRing(points=self.options.virtual_nodes)

    def place(self, session_id: str, turn: TurnView, fleet: FleetView) -> Decision:
        stepped_over = 0
        for name in self._ring.walk(session_id):
            if name in fleet:
                break
            stepped_over += 1
        else:
            # Only a fleet that was never announced to this policy leads here.
            return self.by_load(turn, fleet, "nobody on the ring is routable", "no-owner")
        if stepped_over:
            return Decision(name, f"session falls to the next on the ring, {stepped_over} stepped over", "ring-next")
        return Decision(name, "owner of the session on the ring", "ring")

    def observe(self, event: Observation) -> None:
        super().observe(event)
        if isinstance(event, ReplicaAdded):
            self._ring.add(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._ring.remove(event.replica)


class SessionRingValveOptions(SessionRingOptions, frozen=True):
    """First strategy of the reference text on prefix-aware routing.

    - `kv_usage_limit`: share of a replica's KV blocks in use at which a turn spills.
    """

    kv_usage_limit: float = 0.85

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, kv_usage_limit=self.kv_usage_limit)


class SessionRingValve(SessionRing):
    """Looks at the engine's own gauge, which is as old as the last poll; a replica that was never heard of passes."""

    about = "session-ring with a valve: a turn spills to the least loaded when its replica's KV usage is at the limit"
    believes = "As session-ring, as long as the engine's polled KV usage leaves room."
    source = "the first strategy of the reference text on prefix-aware routing (session affinity, with its usage limit)"
    fails = (
        "The gauge is as old as the last poll, so a burst passes the valve; a turn that spills starts cold and leaves "
        "its prefix in two places. Usage counts what running requests hold, not what a cache would lose."
    )
    Options = SessionRingValveOptions
    needs = frozenset({Signal.SESSION_ID, Signal.ENGINE_METRICS})

    def place(self, session_id: str, turn: TurnView, fleet: FleetView) -> Decision:
        owner = super().place(session_id, turn, fleet)
        metrics = fleet[owner.replica].metrics
        if metrics is None or metrics.kv_usage < self.options.kv_usage_limit:
            return owner
        why = f"{owner.replica} owns the session and is at {metrics.kv_usage:.0%} of its KV blocks"
        return self.by_load(turn, fleet, why, "spill")


class SessionModulo(SessionPolicy):
    """What one should not do: when a replica comes or goes nearly every session moves."""

    about = "each session to hash(id) modulo the number of replicas; moves nearly all sessions when that number changes"
    believes = "A session's turns belong on one replica, and the number of replicas never changes."
    source = "what the reference text on prefix-aware routing warns of under replica churn"
    fails = "When a replica comes or goes about N of N+1 sessions move and lose their cache. Else as session-ring."

    def place(self, session_id: str, turn: TurnView, fleet: FleetView) -> Decision:
        place = xxh3(session_id) % len(fleet)
        return Decision(fleet.replicas[place].name, f"session hashes to place {place} of {len(fleet)}", "modulo")
