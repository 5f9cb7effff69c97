"""Policies that remember where a session is instead of hashing it: `sticky-least-loaded`, `verl-sticky-inflight`.

A new session goes to the least loaded replica and stays; what counts as load, and how long a session counts, is
where they differ. Memory is bounded by time in the one and by number in the other.
"""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from typing import Any

import msgspec

from routers.config import Options, at_least
from routers.murmur import vllm_hash
from routers.policies.base import BasePolicy, count
from routers.policies.rings import vllm_header, vllm_text
from routers.policies.session import SessionPolicy
from routers.view import (
    Decision,
    Dispatched,
    FleetView,
    Observation,
    ReplicaRemoved,
    ReplicaView,
    SessionEnded,
    Signal,
    TurnView,
)

_SWEEP_US = 60_000_000
_JSON_FIELDS = ("user", "session_id", "user_id")


class StickyLeastLoadedOptions(Options, frozen=True):
    """As vllm-router 0.1.17's `VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S`.

    - `session_expiration_s`: idle time after which a session counts no more, looked for at most once a minute.
    """

    session_expiration_s: float = 7200.0

    def __post_init__(self) -> None:
        at_least(0, session_expiration_s=self.session_expiration_s)


class StickyLeastLoaded(BasePolicy):
    """vllm-router's `sticky_least_loaded`. A session is open until it was idle for its time, or until `POST
    /finish_session?session_id=ID` closes it. Load is the number of open sessions, not of requests; a tie goes to the
    highest hash of session (without one: text) and URL, so turns without an id may all meet at one replica."""

    about = "vllm-router's sticky_least_loaded: a session stays; a new one goes where the fewest sessions are open"
    believes = "A session is where it was put; load is the number of open sessions, whatever they do."
    source = "vllm-project/router 0.1.17, src/policies/sticky_least_loaded.rs"
    fails = (
        "Open sessions that rest weigh as much as those that work, and sessions that grow stay where they are. Turns "
        "without an id and with equal text all go to one replica while session counts are equal."
    )
    Options = StickyLeastLoadedOptions
    needs = frozenset({Signal.SESSION_ID, Signal.TEXT})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._sessions: dict[str, tuple[str, int]] = {}  # id -> replica, last use
        self._open: dict[str, int] = {}
        self._expiry_us = round(1e6 * self.options.session_expiration_s)
        self._swept_us = 0

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        session = _session(turn)
        if session is not None:
            replica, used_us = self._sessions.get(session, ("", 0))
            if replica in fleet and fleet.now_us - used_us <= self._expiry_us:
                return Decision(replica, "the session is here already", "sticky")
        key = session if session is not None else vllm_text(turn)

        def place(replica: ReplicaView) -> tuple[int, int]:
            return self._open.get(replica.name, 0), -vllm_hash(f"{key}:{replica.url or replica.name}")

        best = min(fleet, key=place)
        reason = f"fewest open sessions: {self._open.get(best.name, 0)}"
        return Decision(best.name, reason, "new-session" if session is not None else "no-session")

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            session = _session(event.turn)
            if session is not None:
                self._forget(session)
                self._sessions[session] = (event.replica, event.at_us)
                self._open[event.replica] = self._open.get(event.replica, 0) + 1
            if event.at_us - self._swept_us >= _SWEEP_US:
                self._swept_us = event.at_us
                idle = [name for name, (_, used) in self._sessions.items() if event.at_us - used > self._expiry_us]
                for name in idle:
                    self._forget(name)
        elif isinstance(event, SessionEnded):
            self._forget(event.session_id)
        elif isinstance(event, ReplicaRemoved):
            for name in [name for name, (replica, _) in self._sessions.items() if replica == event.replica]:
                self._forget(name)

    def stats(self) -> dict[str, Any]:
        return {"open_sessions": {name: number for name, number in self._open.items() if number}}

    def _forget(self, session_id: str) -> None:
        known = self._sessions.pop(session_id, None)
        if known is not None:
            self._open[known[0]] -= 1


def _session(turn: TurnView) -> str | None:
    """The value of the first id header, whichever it is; else a field of the text, should that be a JSON object; else
    a session id from elsewhere."""
    header = vllm_header(turn)
    if header is not None:
        return header[1]
    text = vllm_text(turn)
    if text.lstrip()[:1] == "{":
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.json.decode(text)
            params = found.get("session_params")
            values = (params.get("session_id") if isinstance(params, dict) else None, *map(found.get, _JSON_FIELDS))
            for value in values:
                if isinstance(value, str):
                    return value
    return turn.session_id


class VerlStickyInflightOptions(Options, frozen=True):
    """As verl at 1dda039.

    - `capacity`: sessions remembered, least recently used forgotten first.
    """

    capacity: int = 10_000

    def __post_init__(self) -> None:
        at_least(1, capacity=self.capacity)


class VerlStickyInflight(SessionPolicy):
    """verl's global load balancer for rollouts: sticky whatever the load, a new one by requests in flight."""

    about = "verl's rollout balancer: a session stays; a new one goes to the fewest in flight, at a tie to the first"
    believes = "A session is where it was put; load is this router's own requests in flight when a session is new."
    source = "verl-project/verl 1dda039, verl/workers/rollout/llm_server.py"
    fails = (
        "Load counts only for a session's first turn: stragglers that grow stay together where they met. At an idle "
        "fleet new sessions go to the first replica until something is in flight there."
    )
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
