"""Who is in the fleet, and what a policy is shown of it: replicas with their load, draining, down or being let in.

Pure bookkeeping; telling the policy is the router's. Law: a turn is offered every replica but those that drain, are
down, were left out by name or are shut out by a breaker, which only a faulty router has. The odd thing: when that
leaves nobody, those that are down are offered after all, since one may be back before it was looked at, and a refused
connection costs less than a refused turn.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from routers.breaker import Breaker
from routers.down import Down
from routers.errors import FleetError, NoReplica
from routers.ledger import Ledger
from routers.peers import PeerLoads
from routers.ramp import Ramp
from routers.view import NO_LOAD, EngineMetrics, FleetView, PeerLoad, ReplicaView


class Roster:
    """`untracked`: no load is shown, which is a fault, and so is a `breaker`."""

    def __init__(
        self,
        ledger: Ledger,
        ramp: Ramp,
        peers: PeerLoads | None,
        down: Down,
        *,
        untracked: bool,
        breaker: Breaker | None = None,
    ) -> None:
        self.ramp = ramp
        self.down = down
        self.breaker = breaker
        self._ledger = ledger
        self._peers = peers
        self._untracked = untracked
        self._views: dict[str, ReplicaView] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def all(self) -> tuple[ReplicaView, ...]:
        """In the order in which they were added."""
        return tuple(self._views.values())

    def get(self, name: str) -> ReplicaView | None:
        return self._views.get(name)

    # -- what a policy sees -----------------------------------------------------------------------------------------

    def view(self, now_us: int, left_out: frozenset[str] = frozenset()) -> FleetView:
        views: Iterable[ReplicaView] = self._views.values()
        if self._untracked:
            views = [msgspec.structs.replace(view, in_flight=0, in_flight_tokens=0) for view in views]
        elif self._peers is not None:
            elsewhere = self._peers.loads(now_us)
            views = [_with_peers(view, elsewhere.get(view.name, NO_LOAD)) for view in views]
        left_out |= self._shut(now_us)
        shown = [view for view in views if not view.draining and view.name not in left_out]
        down: list[ReplicaView] = []
        if self.down and any(view.name not in self.down for view in shown):
            down = [view for view in shown if view.name in self.down]
            shown = [view for view in shown if view.name not in self.down]
        return FleetView(shown, now_us=now_us, draining=[view for view in views if view.draining], down=down)

    def routable(self, key: str, now_us: int, left_out: frozenset[str]) -> FleetView:
        """What may be chosen for the turn of this session (or request). Raises NoReplica."""
        fleet = self.view(now_us, left_out)
        if not fleet.replicas:
            raise NoReplica(self._why_nobody(left_out, self._shut(now_us) - left_out))
        held_back = self.ramp.held_back(key, now_us)
        kept = [view for view in fleet if view.name not in held_back] if held_back else []
        if not kept:
            return fleet  # nobody would be left
        return fleet.narrowed(kept, ramping=[view for view in fleet if view.name in held_back])

    def _shut(self, now_us: int) -> frozenset[str]:
        return self.breaker.open(now_us) if self.breaker is not None else frozenset()

    def _why_nobody(self, left_out: frozenset[str], shut: frozenset[str]) -> str:
        if not self._views:
            return "no replica is in the fleet: add one"
        draining = [view.name for view in self._views.values() if view.draining]
        parts = [f"{len(draining)} draining ({', '.join(draining)})"] if draining else []
        if left_out:
            parts.append(f"{len(left_out)} already tried ({', '.join(sorted(left_out))})")
        if shut:
            parts.append(f"{len(shut)} shut out by the breaker ({', '.join(sorted(shut))})")
        mend = "try later, when it lets them in again" if shut else "add or restart one"
        return f"none of {len(self._views)} replicas can take a turn: {' and '.join(parts)}; {mend}"

    # -- coming and going -------------------------------------------------------------------------------------------

    def add(self, name: str, now_us: int, url: str | None) -> None:
        """Who adds a replica says that it is up."""
        before = self._views.get(name)
        self.down.leave(name)
        self._views[name] = ReplicaView(
            name=name,
            url=url if url is not None or before is None else before.url,
            in_flight=self._ledger.requests(name),
            in_flight_tokens=self._ledger.tokens(name),
            added_us=now_us,
        )

    def drain(self, name: str) -> None:
        self._views[name] = msgspec.structs.replace(self.known(name), draining=True)

    def remove(self, name: str) -> None:
        del self._views[self.known(name).name]
        self.down.leave(name)
        self.ramp.leave(name)
        if self.breaker is not None:
            self.breaker.leave(name)

    def known(self, name: str) -> ReplicaView:
        view = self._views.get(name)
        if view is None:
            raise FleetError(f"no replica named {name!r}: the fleet is {', '.join(self._views) or 'empty'}")
        return view

    # -- what changes -----------------------------------------------------------------------------------------------

    def refresh_load(self, name: str) -> None:
        """As the ledger has it now."""
        view = self._views.get(name)
        if view is not None:
            self._views[name] = ReplicaView(
                name=name,
                url=view.url,
                in_flight=self._ledger.requests(name),
                in_flight_tokens=self._ledger.tokens(name),
                draining=view.draining,
                metrics=view.metrics,
                added_us=view.added_us,
            )

    def gauges(self, name: str, metrics: EngineMetrics) -> None:
        self._views[name] = msgspec.structs.replace(self._views[name], metrics=metrics)


def _with_peers(view: ReplicaView, elsewhere: PeerLoad) -> ReplicaView:
    if elsewhere == NO_LOAD:
        return view
    return msgspec.structs.replace(
        view,
        in_flight=view.in_flight + elsewhere.requests,
        in_flight_tokens=view.in_flight_tokens + elsewhere.prompt_tokens,
        elsewhere=elsewhere,
    )
