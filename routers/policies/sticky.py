"""Policies that remember where a session is instead of hashing it: `sticky-least-loaded`, `verl-sticky-inflight`.

A new session goes to the least loaded replica and stays; what counts as load, and how long a session counts, is
where they differ. Memory is bounded by time in the one and by number in the other.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

from routers.config import Options, at_least
from routers.murmur import vllm_hash
from routers.policies.base import BasePolicy, count
from routers.policies.session import SessionPolicy
from routers.view import Decision, Dispatched, FleetView, Observation, ReplicaRemoved, ReplicaView, Signal, TurnView

_SWEEP_US = 60_000_000


class StickyLeastLoadedOptions(Options, frozen=True):
    """`session_expiration_s`: idle time after which a session counts no more; 7200 as vllm-router's
    `VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S`, looked for at most once a minute."""

    session_expiration_s: float = 7200.0

    def __post_init__(self) -> None:
        at_least(0, session_expiration_s=self.session_expiration_s)


class StickyLeastLoaded(BasePolicy):
    """vllm-router's `sticky_least_loaded`. Load is the number of open sessions, not of requests; a tie goes to the
    highest hash of session (without one: text) and URL, so turns without an id may all meet at one replica."""

    about = "vllm-router's sticky_least_loaded: a session stays; a new one goes where the fewest sessions are open"
    Options = StickyLeastLoadedOptions
    needs = frozenset({Signal.SESSION_ID})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._sessions: dict[str, tuple[str, int]] = {}  # id -> replica, last use
        self._open: dict[str, int] = {}
        self._expiry_us = round(1e6 * self.options.session_expiration_s)
        self._swept_us = 0

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        if turn.session_id is not None:
            replica, used_us = self._sessions.get(turn.session_id, ("", 0))
            if replica in fleet and fleet.now_us - used_us <= self._expiry_us:
                return Decision(replica, "the session is here already", "sticky")
        text = turn.prompt.text() if turn.prompt is not None else None
        key = turn.session_id if turn.session_id is not None else text or ""

        def place(replica: ReplicaView) -> tuple[int, int]:
            return self._open.get(replica.name, 0), -vllm_hash(f"{key}:{replica.url or replica.name}")

        best = min(fleet, key=place)
        reason = f"fewest open sessions: {self._open.get(best.name, 0)}"
        return Decision(best.name, reason, "new-session" if turn.session_id is not None else "no-session")

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            if event.turn.session_id is not None:
                self._forget(event.turn.session_id)
                self._sessions[event.turn.session_id] = (event.replica, event.at_us)
                self._open[event.replica] = self._open.get(event.replica, 0) + 1
            if event.at_us - self._swept_us >= _SWEEP_US:
                self._swept_us = event.at_us
                idle = [name for name, (_, used) in self._sessions.items() if event.at_us - used > self._expiry_us]
                for name in idle:
                    self._forget(name)
        elif isinstance(event, ReplicaRemoved):
            for name in [name for name, (replica, _) in self._sessions.items() if replica == event.replica]:
                self._forget(name)

    def stats(self) -> dict[str, Any]:
        return {"open_sessions": {name: number for name, number in self._open.items() if number}}

    def _forget(self, session_id: str) -> None:
        known = self._sessions.pop(session_id, None)
        if known is not None:
            self._open[known[0]] -= 1


class VerlStickyInflightOptions(Options, frozen=True):
    """`capacity`: sessions remembered, least recently used forgotten first; 10,000 as verl has it."""

    capacity: int = 10_000

    def __post_init__(self) -> None:
        at_least(1, capacity=self.capacity)


class VerlStickyInflight(SessionPolicy):
    """verl's global load balancer for rollouts: sticky whatever the load, a new one by requests in flight."""

    about = "verl's rollout balancer: a session stays; a new one goes to the fewest in flight, at a tie to the first"
    Options = VerlStickyInflightOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._pins: OrderedDict[str, str] = OrderedDict()

    def place(self, session_id: str, turn: TurnView, fleet: FleetView) -> Decision:
        pinned = self._pins.get(session_id)
        if pinned is not None and pinned in fleet:
            return Decision(pinned, "the session is here already", "sticky")
        best = min(fleet, key=lambda replica: replica.in_flight)  # the first of the fewest
        return Decision(best.name, f"new session, {count(best.in_flight, 'request')} in flight", "new-session")

    def observe(self, event: Observation) -> None:
        super().observe(event)
        if isinstance(event, Dispatched) and event.turn.session_id is not None:
            self._pins[event.turn.session_id] = event.replica
            self._pins.move_to_end(event.turn.session_id)
            if len(self._pins) > self.options.capacity:
                self._pins.popitem(last=False)
        elif isinstance(event, ReplicaRemoved):
            for name in [name for name, replica in self._pins.items() if replica == event.replica]:
                del self._pins[name]
