"""One router without its transport: a policy, the fleet as it knows it, and the in-flight ledger.

The proxy and the simulation drive this same object. `route` chooses, enters the ledger and tells the policy in one
step, so two turns can never be decided on the same view. Nothing here waits, retries or reads a clock: `now_us` is
handed in, and a caller that retries says which replicas to leave out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from routers.errors import FleetError, NoReplica
from routers.faults import NO_FAULTS, RouterFaults
from routers.ledger import Ledger
from routers.peers import PeerLoads
from routers.ramp import Ramp
from routers.view import (
    NO_LOAD,
    Decision,
    Dispatched,
    EngineMetrics,
    EventGap,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    KvEvent,
    KvEvents,
    Metrics,
    PeerLoad,
    Policy,
    Progress,
    ReplicaAdded,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaView,
    ReportedPrefixes,
    Signal,
    TurnView,
)


class Counts(msgspec.Struct):
    routed: int = 0
    finished: int = 0
    failed: int = 0
    no_replica: int = 0


class Belief(msgspec.Struct):
    """What decisions of one rule believed against what the replicas then served, where both are known."""

    requests: int = 0
    believed_tokens: int = 0
    served_tokens: int = 0
    phantom_tokens: int = 0  # believed and not served
    missed_tokens: int = 0  # served and not believed


class Router:
    """`replicas`: names, or names with their URLs, in the order in which policies shall see them.

    `ramp` lets replicas that join later in bit by bit; `peers` is what other ingresses say of their load. Of `faults`
    only `untracked_load` is committed here; those about prompts are whoever makes them's.
    """

    def __init__(
        self,
        policy: Policy,
        replicas: Iterable[str] | Mapping[str, str | None] = (),
        *,
        ramp: Ramp | None = None,
        peers: PeerLoads | None = None,
        faults: RouterFaults = NO_FAULTS,
    ) -> None:
        self.policy = policy
        self.counts = Counts()
        self.placements: dict[str, int] = {}
        self.beliefs: dict[str, Belief] = {}
        self.ramp = ramp or Ramp()
        self.peers = peers
        self._untracked = faults.untracked_load
        self.load_version = 0
        """Grows whenever this router's own load changes, so that whoever tells its peers knows when to."""
        self._ledger = Ledger()
        self._replicas: dict[str, ReplicaView] = {}
        urls = replicas if isinstance(replicas, Mapping) else dict.fromkeys(replicas)
        for name, url in urls.items():
            self._add(name, 0, url)

    @property
    def needs(self) -> frozenset[Signal]:
        return self.policy.needs

    @property
    def wants_progress(self) -> bool:
        """Whether the policy asks to hear of every few output tokens."""
        return bool(getattr(self.policy, "wants_progress", False))

    @property
    def in_flight(self) -> int:
        return len(self._ledger)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is in flight."""
        return request_id in self._ledger

    def url(self, replica: str) -> str | None:
        """Where a replica of the fleet listens; None for one that left or never said."""
        view = self._replicas.get(replica)
        return view.url if view is not None else None

    def replicas(self) -> tuple[ReplicaView, ...]:
        """All of them, draining ones too."""
        return tuple(self._replicas.values())

    def fleet(self, now_us: int, exclude: Iterable[str] = ()) -> FleetView:
        """What a policy would see now."""
        left_out = frozenset(exclude)
        views: Iterable[ReplicaView] = self._replicas.values()
        if self.peers is not None:
            elsewhere = self.peers.loads(now_us)
            views = [_with_peers(view, elsewhere.get(view.name, NO_LOAD)) for view in views]
        if self._untracked:
            views = [msgspec.structs.replace(view, in_flight=0, in_flight_tokens=0) for view in views]
        return FleetView(
            [view for view in views if not view.draining and view.name not in left_out],
            now_us=now_us,
            draining=[view for view in views if view.draining],
        )

    # -- a request's life --------------------------------------------------------------------------------------

    def route(self, turn: TurnView, now_us: int, *, exclude: Iterable[str] = ()) -> Decision:
        """Choose a replica and book the turn there. Raises NoReplica; a retry passes `exclude`."""
        fleet = self.fleet(now_us, exclude)
        if not fleet.replicas:
            self.counts.no_replica += 1
            raise NoReplica(self._why_nobody(frozenset(exclude)))
        held_back = self.ramp.held_back(turn.session_id or turn.request_id, now_us)
        if held_back:
            fleet = _without(fleet, held_back)
        decision = self.policy.choose(turn, fleet)
        if decision.replica not in fleet:
            raise FleetError(
                f"the policy chose {decision.replica!r}, which is not routable now "
                f"({', '.join(view.name for view in fleet)} are): return the name of a replica of the given fleet"
            )
        self._ledger.open(
            turn.request_id,
            decision.replica,
            turn.prompt.tokens if turn.prompt else 0,
            now_us,
            rule=decision.rule,
            believed=decision.believed_hit_tokens,
        )
        self._refresh_load(decision.replica)
        self.counts.routed += 1
        self.placements[decision.replica] = self.placements.get(decision.replica, 0) + 1
        self.policy.observe(Dispatched(turn.request_id, decision.replica, turn, decision, now_us))
        return decision

    def first_token(self, request_id: str, now_us: int) -> None:
        """The first output reached this router; told once, later calls are no news."""
        entry = self._ledger.get(request_id)
        if not entry.first_token:
            entry.first_token = True
            self.load_version += 1
            self.policy.observe(FirstToken(request_id, entry.replica, now_us))

    def progress(self, request_id: str, output_tokens: int, now_us: int) -> None:
        self.policy.observe(Progress(request_id, self._ledger.get(request_id).replica, output_tokens, now_us))

    def finished(
        self, request_id: str, output_tokens: int | None, now_us: int, *, cached_tokens: int | None = None
    ) -> None:
        """`cached_tokens`: what the replica says it served from its cache, where it says so."""
        entry = self._ledger.close(request_id)
        if cached_tokens is not None and entry.believed is not None:
            belief = self.beliefs.setdefault(entry.rule, Belief())
            belief.requests += 1
            belief.believed_tokens += entry.believed
            belief.served_tokens += cached_tokens
            belief.phantom_tokens += max(0, entry.believed - cached_tokens)
            belief.missed_tokens += max(0, cached_tokens - entry.believed)
        self._refresh_load(entry.replica)
        self.counts.finished += 1
        self.policy.observe(Finished(request_id, entry.replica, output_tokens, now_us))

    def failed(self, request_id: str, now_us: int) -> None:
        """Not served to its end: the replica failed, or the client left."""
        entry = self._ledger.close(request_id)
        self._refresh_load(entry.replica)
        self.counts.failed += 1
        self.policy.observe(Failed(request_id, entry.replica, now_us))

    # -- what ingresses tell each other ---------------------------------------------------------------------------

    def own_loads(self) -> dict[str, PeerLoad]:
        """What this router has in flight, by replica, as its peers shall hear it."""
        owed = getattr(self.policy, "owed", None)
        found = {}
        for name in self._replicas:
            prefill, blocks = owed(name) if callable(owed) else (0, 0)
            load = PeerLoad(self._ledger.requests(name), self._ledger.tokens(name), prefill, blocks)
            if load != NO_LOAD:
                found[name] = load
        return found

    # -- what replicas say ----------------------------------------------------------------------------------------

    def kv_events(self, replica: str, events: Iterable[KvEvent], now_us: int) -> None:
        """Events of a replica that left the fleet are no news any more and are ignored."""
        if replica in self._replicas:
            self.policy.observe(KvEvents(replica, tuple(events), now_us))

    def event_gap(self, replica: str, now_us: int) -> None:
        if replica in self._replicas:
            self.policy.observe(EventGap(replica, now_us))

    def metrics(self, replica: str, metrics: EngineMetrics, now_us: int) -> None:
        view = self._replicas.get(replica)
        if view is not None:
            self._replicas[replica] = msgspec.structs.replace(view, metrics=metrics)
            self.policy.observe(Metrics(replica, metrics, now_us))

    def reported_prefixes(self, report: ReportedPrefixes) -> None:
        if report.replica in self._replicas:
            self.policy.observe(report)

    # -- the fleet --------------------------------------------------------------------------------------------------

    def add_replica(self, name: str, now_us: int, *, url: str | None = None) -> None:
        """A new replica, or a draining one that shall take turns again."""
        view = self._replicas.get(name)
        if view is not None and not view.draining:
            raise FleetError(f"replica {name!r} is in the fleet already: remove it first, or give the new one a name")
        if view is None:
            self.ramp.join(name, now_us)
        self._add(name, now_us, url)

    def _add(self, name: str, now_us: int, url: str | None) -> None:
        view = self._replicas.get(name)
        self._replicas[name] = ReplicaView(
            name=name,
            url=url if url is not None or view is None else view.url,
            in_flight=self._ledger.requests(name),
            in_flight_tokens=self._ledger.tokens(name),
            added_us=now_us,
        )
        self.policy.observe(ReplicaAdded(name, now_us))

    def drain_replica(self, name: str, now_us: int) -> None:
        """No new turns from now on; those in flight go on."""
        self._replicas[name] = msgspec.structs.replace(self._known(name), draining=True)
        self.policy.observe(ReplicaDraining(name, now_us))

    def remove_replica(self, name: str, now_us: int) -> None:
        """Gone. Requests still in flight there are ended by whoever carries them."""
        del self._replicas[self._known(name).name]
        self.ramp.leave(name)
        self.policy.observe(ReplicaRemoved(name, now_us))

    def _known(self, name: str) -> ReplicaView:
        view = self._replicas.get(name)
        if view is None:
            raise FleetError(f"no replica named {name!r}: the fleet is {', '.join(self._replicas) or 'empty'}")
        return view

    def _refresh_load(self, name: str) -> None:
        self.load_version += 1
        view = self._replicas.get(name)
        if view is not None:
            self._replicas[name] = ReplicaView(
                name=name,
                url=view.url,
                in_flight=self._ledger.requests(name),
                in_flight_tokens=self._ledger.tokens(name),
                draining=view.draining,
                metrics=view.metrics,
                added_us=view.added_us,
            )

    def _why_nobody(self, excluded: frozenset[str]) -> str:
        if not self._replicas:
            return "no replica is in the fleet: add one"
        draining = [view.name for view in self._replicas.values() if view.draining]
        parts = [f"{len(draining)} draining ({', '.join(draining)})"] if draining else []
        if excluded:
            parts.append(f"{len(excluded)} already tried ({', '.join(sorted(excluded))})")
        return f"none of {len(self._replicas)} replicas can take a turn: {' and '.join(parts)}; add or restart one"


def _with_peers(view: ReplicaView, elsewhere: PeerLoad) -> ReplicaView:
    if elsewhere == NO_LOAD:
        return view
    return msgspec.structs.replace(
        view,
        in_flight=view.in_flight + elsewhere.requests,
        in_flight_tokens=view.in_flight_tokens + elsewhere.prompt_tokens,
        elsewhere=elsewhere,
    )


def _without(fleet: FleetView, names: Iterable[str]) -> FleetView:
    """The fleet without these, or as it is if nobody would be left."""
    kept = [view for view in fleet if view.name not in names]
    if not kept:
        return fleet
    ramping = [view for view in fleet if view.name in names]
    return FleetView(kept, now_us=fleet.now_us, draining=fleet.draining, ramping=ramping)
