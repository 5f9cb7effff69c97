"""The ingresses of a simulation: one or several `Router` objects in front of the same engines.

What engines say reaches all of them, what a request does only the one that it met. With `share_load` they tell each
other their load as it changes: live it goes out every 10 ms at most and takes its way, here it counts when it is
`share_delay_ms` old, to the microsecond.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from harness.arm import ROUTER_SEED_STREAM, Arm
from harness.spread import ingress_name
from routers import (
    Decision,
    EngineMetrics,
    KvEvent,
    NoReplica,
    PeerLoads,
    Policy,
    Ramp,
    ReportedPrefixes,
    Router,
    Signal,
    TurnView,
)

Placed = Callable[[Decision | NoReplica], None]
NEVER_US = 1 << 62
"""A peer of the simulation is never silent because it died."""


class SimRouters:
    def __init__(self, arm: Arm) -> None:
        scenario, setup = arm.scenario, arm.setup
        self._told: list[int] = [0] * setup.ingresses
        self._messages = 0
        self._routers: list[Router] = []
        for place in range(setup.ingresses):
            stream = f"{ROUTER_SEED_STREAM}.{ingress_name(place)}" if place else ROUTER_SEED_STREAM
            policy = arm.router.build(random.Random(arm.seed_for(stream)), scenario.engine.block_size)
            peers = PeerLoads(round(1000 * setup.share_delay_ms), NEVER_US) if setup.exchanges else None
            self._routers.append(
                Router(
                    policy,
                    scenario.fleet.names,
                    ramp=Ramp(setup.ramp_s),
                    peers=peers,
                    faults=scenario.router_faults(arm.router),
                )
            )
        self._exchange = setup.exchanges

    def __iter__(self) -> Iterator[Router]:
        return iter(self._routers)

    def __getitem__(self, place: int) -> Router:
        return self._routers[place]

    @property
    def policies(self) -> list[Policy]:
        return [router.policy for router in self._routers]

    @property
    def needs(self) -> frozenset[Signal]:
        return self._routers[0].needs

    @property
    def wants_progress(self) -> bool:
        return self._routers[0].wants_progress

    @property
    def heeds_salts(self) -> bool:
        return self._routers[0].heeds_salts

    @property
    def waiting(self) -> int:
        """Turns that are held back now, at any ingress."""
        return sum(router.waiting for router in self._routers)

    # ---- a request's life, at the ingress that it met -------------------------------------------------------------

    def submit(self, place: int, turn: TurnView, now_us: int, placed: Placed, *, exclude: Iterable[str] = ()) -> None:
        """Calls `placed` with the decision, now or later. Raises NoReplica."""
        self._routers[place].submit(turn, now_us, placed, exclude=exclude)
        self._tell(now_us)

    def first_token(self, place: int, request_id: str, now_us: int) -> None:
        self._routers[place].first_token(request_id, now_us)
        self._tell(now_us)

    def progress(self, place: int, request_id: str, output_tokens: int, now_us: int) -> None:
        self._routers[place].progress(request_id, output_tokens, now_us)

    def finished(
        self, place: int, request_id: str, output_tokens: int, now_us: int, *, cached_tokens: int | None
    ) -> None:
        self._routers[place].finished(request_id, output_tokens, now_us, cached_tokens=cached_tokens)
        self._tell(now_us)

    def refused(self, place: int, request_id: str, now_us: int, status: int) -> None:
        """`status`: of HTTP."""
        self._routers[place].refused(request_id, now_us, status)
        self._tell(now_us)

    def failed(self, place: int, request_id: str, now_us: int) -> None:
        self._routers[place].failed(request_id, now_us)
        self._tell(now_us)

    def others_than(self, place: int, names: frozenset[str], now_us: int) -> bool:
        """Whether anybody else could take a turn now."""
        return bool(self._routers[place].fleet(now_us, names).replicas)

    # ---- what a connection tells of a replica, to the ingress that had it -------------------------------------------

    def unreachable(self, place: int, replica: str, now_us: int) -> bool:
        """Whether that is news to it."""
        news = self._routers[place].unreachable(replica, now_us)
        self._tell(now_us)
        return news

    def reachable(self, place: int, replica: str, now_us: int) -> None:
        self._routers[place].reachable(replica, now_us)
        self._tell(now_us)

    def _tell(self, now_us: int) -> None:
        """Every ingress whose load has changed tells the others all that it has in flight."""
        changed = self._exchange
        while changed:
            changed = False
            for place, router in enumerate(self._routers):
                if router.load_version == self._told[place]:
                    continue
                changed = True
                self._told[place] = router.load_version
                self._messages += 1
                loads = router.own_loads()
                for other in self._routers:
                    if other is not router and other.peers is not None:
                        other.peers.hear(ingress_name(place), loads, now_us, sequence=self._messages)
                        other.let_go(now_us)

    # ---- what engines say, to all -----------------------------------------------------------------------------------

    def kv_events(self, replica: str, events: tuple[KvEvent, ...], now_us: int) -> None:
        for router in self._routers:
            router.kv_events(replica, events, now_us)

    def event_gap(self, replica: str, now_us: int) -> None:
        for router in self._routers:
            router.event_gap(replica, now_us)

    def metrics(self, replica: str, metrics: EngineMetrics, now_us: int) -> None:
        for router in self._routers:
            router.metrics(replica, metrics, now_us)

    def reported_prefixes(self, report: ReportedPrefixes) -> None:
        for router in self._routers:
            router.reported_prefixes(report)

    # ---- the fleet --------------------------------------------------------------------------------------------------

    def add(self, replica: str, now_us: int, *, anew: bool) -> None:
        """Joins, or takes turns again. `anew`: another engine under a name that the routers still know."""
        for router in self._routers:
            if anew:
                router.remove_replica(replica, now_us)
            router.add_replica(replica, now_us)

    def drain(self, replica: str, now_us: int) -> None:
        for router in self._routers:
            if not any(view.name == replica and view.draining for view in router.replicas()):
                router.drain_replica(replica, now_us)

    def remove(self, replica: str, now_us: int) -> None:
        for router in self._routers:
            router.remove_replica(replica, now_us)
