"""One router without its transport: a policy, the fleet as it knows it, and the in-flight ledger.

The proxy and the simulation drive this same object. `route` chooses, enters the ledger and tells the policy in one
step, so two turns can never be decided on the same view. Nothing here waits, retries or reads a clock: `now_us` is
handed in, and a caller that retries says which replicas to leave out. A policy may hold turns back (`may_hold`): then
`submit` answers later, in the call that made room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from routers.belief import Belief
from routers.breaker import Breaker
from routers.down import HEALTH_INTERVAL_MS, Down
from routers.errors import FleetError, NoReplica
from routers.faults import NO_FAULTS, RouterFaults
from routers.ledger import Entry, Ledger
from routers.peers import PeerLoads
from routers.promises import decided
from routers.ramp import Ramp
from routers.roster import Roster
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
    SessionEnded,
    Signal,
    TurnView,
    Withdrawn,
)
from routers.waiting import Held, Placed, WaitingRoom


class Counts(msgspec.Struct):
    routed: int = 0
    finished: int = 0
    failed: int = 0
    no_replica: int = 0
    held: int = 0  # turns that had to wait for the policy
    withdrawn: int = 0  # of those, given up before they were placed


class Router:
    """`replicas`: names, or names with their URLs, in the order in which policies shall see them.

    `ramp` lets replicas that join later, or were down, in bit by bit; `peers` is what other ingresses say of their
    load. Of `faults` those about prompts are committed by whoever makes prompts, all others here. `health_interval_ms`
    is how often the caller looks at replicas that are down (0: never, and then none is).
    """

    def __init__(
        self,
        policy: Policy,
        replicas: Iterable[str] | Mapping[str, str | None] = (),
        *,
        ramp: Ramp | None = None,
        peers: PeerLoads | None = None,
        faults: RouterFaults = NO_FAULTS,
        health_interval_ms: int = HEALTH_INTERVAL_MS,
    ) -> None:
        self.policy = policy
        self.counts = Counts()
        self.placements: dict[str, int] = {}
        self.beliefs: dict[str, Belief] = {}
        self.ramp = ramp or Ramp()
        self.peers = peers
        self.down = Down(health_interval_ms)
        self._deaf = faults.ignore_event_sequence
        self._counts_load = not faults.untracked_load
        self._overlooks_salts = faults.ignore_extra_keys
        self.load_version = 0
        """Grows whenever this router's own load changes, so that whoever tells its peers knows when to."""
        self._ledger = Ledger()
        self._waiting = WaitingRoom()
        strikes = faults.breaker_on_client_errors
        self._breaker = Breaker(strikes) if strikes is not None else None
        self._roster = Roster(
            self._ledger, self.ramp, peers, self.down, untracked=not self._counts_load, breaker=self._breaker
        )
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
    def heeds_salts(self) -> bool:
        """Whether salts and other extra keys count in what it is told of prompts and blocks; else tokens are all."""
        return not self._overlooks_salts and bool(getattr(self.policy, "heeds_salts", True))

    @property
    def may_hold(self) -> bool:
        """Whether the policy may keep a turn waiting; then turns come by `submit`."""
        return bool(getattr(self.policy, "may_hold", False))

    @property
    def in_flight(self) -> int:
        return len(self._ledger)

    @property
    def waiting(self) -> int:
        """Turns that the policy holds back now."""
        return len(self._waiting)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is in flight, or waits to be."""
        return request_id in self._ledger or request_id in self._waiting

    def url(self, replica: str) -> str | None:
        """Where a replica of the fleet listens; None for one that left or never said."""
        view = self._roster.get(replica)
        return view.url if view is not None else None

    def replicas(self) -> tuple[ReplicaView, ...]:
        """All of them, draining ones and those that are down, too."""
        return self._roster.all()

    def fleet(self, now_us: int, exclude: Iterable[str] = ()) -> FleetView:
        """What a policy would see now."""
        return self._roster.view(now_us, frozenset(exclude))

    # -- a request's life --------------------------------------------------------------------------------------

    def route(self, turn: TurnView, now_us: int, *, exclude: Iterable[str] = ()) -> Decision:
        """Choose a replica and book the turn there. Raises NoReplica, or DecisionError for an answer that is none;
        a retry passes `exclude`."""
        fleet = self._routable(turn, now_us, exclude)
        try:
            answer = self.policy.choose(turn, fleet)
        except NoReplica:
            self.counts.no_replica += 1
            raise
        decision = decided(answer, self.policy, fleet)
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
        self.policy.observe(
            Dispatched(turn.request_id, decision.replica, turn, decision, now_us, counted=self._counts_load)
        )
        return decision

    def submit(self, turn: TurnView, now_us: int, placed: Placed, *, exclude: Iterable[str] = ()) -> None:
        """As `route`, for a caller that can wait: `placed` is called with the decision, now or from the later call that
        made room (or with NoReplica, if by then nobody is left). What cannot work now is raised."""
        if self.may_hold and (len(self._waiting) or self._must_wait(turn, now_us, exclude)):
            fleet = self._routable(turn, now_us, exclude)
            place = self.policy.place_in_queue(turn, fleet)  # type: ignore[attr-defined]  # `may_hold` says that it is
            self.counts.held += 1
            self._waiting.enter(place, Held(turn, frozenset(exclude), now_us, placed))
            return
        placed(self.route(turn, now_us, exclude=exclude))

    def let_go(self, now_us: int) -> None:
        """Place the turns that need not wait any more, in their order. Every change of this router's own load does it;
        one that knows of another change (peers' load, gauges) calls it."""
        while (held := self._waiting.head()) is not None:
            try:
                if self._must_wait(held.turn, now_us, held.exclude):
                    return
                self._waiting.leave(held.turn.request_id)
                decision = self.route(held.turn, now_us, exclude=held.exclude)
            except NoReplica as error:
                if held.turn.request_id in self._waiting:
                    self._waiting.leave(held.turn.request_id)
                self.policy.observe(Withdrawn(held.turn.request_id, now_us))
                held.placed(error)
            else:
                waited = f"held {(now_us - held.since_us) / 1e3:.1f} ms; {decision.reason}"
                held.placed(msgspec.structs.replace(decision, reason=waited))

    def _must_wait(self, turn: TurnView, now_us: int, exclude: Iterable[str]) -> bool:
        fleet = self._routable(turn, now_us, exclude)
        try:
            return bool(self.policy.must_wait(turn, fleet))  # type: ignore[attr-defined]  # `may_hold` says that it is
        except NoReplica:
            self.counts.no_replica += 1
            raise

    def _routable(self, turn: TurnView, now_us: int, exclude: Iterable[str]) -> FleetView:
        """What the policy may choose from for this turn. Raises NoReplica."""
        try:
            return self._roster.routable(turn.session_id or turn.request_id, now_us, frozenset(exclude))
        except NoReplica:
            self.counts.no_replica += 1
            raise

    def first_token(self, request_id: str, now_us: int) -> None:
        """The first output reached this router; told once, later calls are no news."""
        entry = self._ledger.get(request_id)
        if not entry.first_token:
            entry.first_token = True
            self.load_version += 1
            self._tell_of_load(FirstToken(request_id, entry.replica, now_us))
            self.let_go(now_us)

    def progress(self, request_id: str, output_tokens: int, now_us: int) -> None:
        self._tell_of_load(Progress(request_id, self._ledger.get(request_id).replica, output_tokens, now_us))

    def finished(
        self, request_id: str, output_tokens: int | None, now_us: int, *, cached_tokens: int | None = None
    ) -> None:
        """`cached_tokens`: what the replica says it served from its cache, where it says so."""
        entry = self._end(request_id)
        if cached_tokens is not None and entry.believed is not None:
            self.beliefs.setdefault(entry.rule, Belief()).add(entry.believed, cached_tokens)
        if self._breaker is not None:
            self._breaker.served(entry.replica, now_us)
        self._finish(request_id, entry.replica, output_tokens, now_us)

    def refused(self, request_id: str, now_us: int, status: int) -> None:
        """The replica answered with an error. Below 500 that is the client's own: the request is over in good order and
        no replica failed, which only a breaker on client errors sees otherwise."""
        entry = self._end(request_id)
        if self._breaker is not None:
            self._breaker.failed(entry.replica, now_us)
        if status < 500:
            self._finish(request_id, entry.replica, 0, now_us)
        else:
            self._fail(request_id, entry.replica, now_us)

    def failed(self, request_id: str, now_us: int) -> None:
        """Not served to its end: the replica gave no whole answer, or the client left (while the turn was held back,
        too)."""
        if request_id in self._waiting:
            self._waiting.leave(request_id)
            self.counts.withdrawn += 1
            self.policy.observe(Withdrawn(request_id, now_us))
            self.let_go(now_us)
            return
        self._fail(request_id, self._end(request_id).replica, now_us)

    def _end(self, request_id: str) -> Entry:
        entry = self._ledger.close(request_id)
        self._refresh_load(entry.replica)
        return entry

    def _finish(self, request_id: str, replica: str, output_tokens: int | None, now_us: int) -> None:
        self.counts.finished += 1
        self._tell_of_load(Finished(request_id, replica, output_tokens, now_us))
        self.let_go(now_us)

    def _fail(self, request_id: str, replica: str, now_us: int) -> None:
        self.counts.failed += 1
        self._tell_of_load(Failed(request_id, replica, now_us))
        self.let_go(now_us)

    def _tell_of_load(self, event: FirstToken | Progress | Finished | Failed) -> None:
        """What becomes of a request that the policy was told as a load."""
        if self._counts_load:
            self.policy.observe(event)

    def index_size(self) -> int | None:
        """Entries of the policy's own index, all replicas together, in its `index_unit`; None: it keeps none."""
        size = getattr(self.policy, "index_size", None)
        return size() if callable(size) else None

    @property
    def index_unit(self) -> str | None:
        return None if self.index_size() is None else getattr(self.policy, "index_unit", "blocks")

    def session_ended(self, session_id: str, now_us: int) -> None:
        self.policy.observe(SessionEnded(session_id, now_us))

    # -- what ingresses tell each other ---------------------------------------------------------------------------

    def own_loads(self) -> dict[str, PeerLoad]:
        """What this router has in flight, by replica, as its peers shall hear it."""
        if not self._counts_load:
            return {}
        owed = getattr(self.policy, "owed", None)
        found = {}
        for name in (view.name for view in self._roster.all()):
            prefill, blocks = owed(name) if callable(owed) else (0, 0)
            load = PeerLoad(self._ledger.requests(name), self._ledger.tokens(name), prefill, blocks)
            if load != NO_LOAD:
                found[name] = load
        return found

    # -- what replicas say ----------------------------------------------------------------------------------------

    def kv_events(self, replica: str, events: Iterable[KvEvent], now_us: int) -> None:
        """Events of a replica that left the fleet are no news any more and are ignored."""
        if replica in self._roster:
            self.policy.observe(KvEvents(replica, tuple(events), now_us))

    def event_gap(self, replica: str, now_us: int) -> None:
        """Events were lost, or the replica restarted."""
        if replica in self._roster and not self._deaf:
            self.policy.observe(EventGap(replica, now_us))

    def metrics(self, replica: str, metrics: EngineMetrics, now_us: int) -> None:
        if replica in self._roster:
            self._roster.gauges(replica, metrics)
            self.policy.observe(Metrics(replica, metrics, now_us))
            self.let_go(now_us)

    def reported_prefixes(self, report: ReportedPrefixes) -> None:
        if report.replica in self._roster:
            self.policy.observe(report)

    # -- the fleet --------------------------------------------------------------------------------------------------

    def add_replica(self, name: str, now_us: int, *, url: str | None = None) -> None:
        """A new replica, or a draining one that shall take turns again."""
        view = self._roster.get(name)
        if view is not None and not view.draining:
            raise FleetError(f"replica {name!r} is in the fleet already: remove it first, or give the new one a name")
        if view is None:
            self.ramp.join(name, now_us)
        self._add(name, now_us, url)

    def _add(self, name: str, now_us: int, url: str | None) -> None:
        self._roster.add(name, now_us, url)
        self.policy.observe(ReplicaAdded(name, now_us))
        self.let_go(now_us)

    def drain_replica(self, name: str, now_us: int) -> None:
        """No new turns from now on; those in flight go on."""
        self._roster.drain(name)
        self.policy.observe(ReplicaDraining(name, now_us))
        self.let_go(now_us)

    def remove_replica(self, name: str, now_us: int) -> None:
        """Gone. Requests still in flight there are ended by whoever carries them."""
        self._roster.remove(name)
        self.policy.observe(ReplicaRemoved(name, now_us))
        self.let_go(now_us)

    def unreachable(self, name: str, now_us: int) -> bool:
        """The replica took no connection, or one to it broke: it is down until it answers, and who hears True shall
        look when it does. False: that was known, or it is not of this fleet."""
        news = name in self._roster and self.down.enter(name, now_us)
        if news:
            self.let_go(now_us)
        return news

    def reachable(self, name: str, now_us: int) -> bool:
        """It answered. False: it was not down. As nginx's `slow_start`, HAProxy's `slowstart` and Envoy's have it, who
        was really gone is let in bit by bit, as one that joins."""
        if self.down.was_long(name, now_us):
            self.ramp.join(name, now_us)
        news = self.down.leave(name)
        if news:
            self.let_go(now_us)
        return news

    def _refresh_load(self, name: str) -> None:
        self.load_version += 1
        self._roster.refresh_load(name)
