"""What policies of this package share: construction, defaults, and ways to break a tie.

A policy is a decision with a reason. It draws from the `rng` it was given, and only when a tie (or its very nature)
leaves something to chance, so that a decision without a tie leaves the generator untouched.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from routers.config import Options
from routers.errors import OptionError
from routers.view import Decision, Dispatched, FleetView, Observation, ReplicaRemoved, ReplicaView, Signal, TurnView

TieBreak = Literal["least-recent", "random", "first"]


class BasePolicy:
    """Derive, set `needs`, write `choose`; `observe` only if there is something to remember.

    `about` is the line that lists show; `variants` are named option sets (`NAME:variant`). `believes`, `source` and
    `fails` are what `policy_explain` tells: what the policy holds true of the fleet, where the algorithm is from, and
    under which conditions it does badly. `text_join` joins the messages of a chat for a policy that reads text;
    `index_unit` is what `index_size` counts; `heeds_salts` false: the imitated router hashes tokens alone, so one
    tenant's blocks look like another's to it.
    """

    about: ClassVar[str] = ""
    believes: ClassVar[str] = ""
    source: ClassVar[str] = ""
    fails: ClassVar[str] = ""
    text_join: ClassVar[str] = "\n"
    index_unit: str = "blocks"
    heeds_salts: ClassVar[bool] = True
    Options: ClassVar[type[Options]] = Options
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    needs: frozenset[Signal] = frozenset()
    wants_progress: bool = False
    may_hold: bool = False

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        if block_size < 1:
            raise OptionError(f"block_size={block_size} cannot hold a token: give the engines' block size, usually 16")
        self.options: Any = options if options is not None else self.Options()
        self.rng = rng
        self.block_size = block_size

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} has no choose(turn, fleet): write one returning a Decision")

    def must_wait(self, turn: TurnView, fleet: FleetView) -> bool:
        """Whether the router shall hold the turn back for now; asked only of a policy with `may_hold`."""
        return False

    def place_in_queue(self, turn: TurnView, fleet: FleetView) -> tuple[float, ...]:
        """Where a turn that waits stands: lowest goes first, equal ones in their order of arrival."""
        return ()

    def observe(self, event: Observation) -> None:
        """Nothing to remember."""

    def owed(self, replica: str) -> tuple[int, int]:
        """Prefill tokens and decode blocks booked on a replica, for ingresses that share their load."""
        return 0, 0

    def index_size(self) -> int | None:
        """Entries of what the policy believes of caches, summed over replicas, in `index_unit`; None: it keeps none.
        Cheap enough to be asked for several times a second."""
        return None

    def stats(self) -> dict[str, Any]:
        """What an operator may want to see of the policy's state; plain JSON values."""
        return {}


class Recency:
    """Remembers who was chosen last, to give ties to whoever waited longest (field case BL-22)."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            self._turn += 1
            self._last[event.replica] = self._turn
        elif isinstance(event, ReplicaRemoved):
            self._last.pop(event.replica, None)

    def longest_ago(self, tied: Sequence[ReplicaView]) -> list[ReplicaView]:
        """Those never chosen, if any; else the one chosen longest ago."""
        last = self._last
        oldest = min(last.get(replica.name, 0) for replica in tied)
        return [replica for replica in tied if last.get(replica.name, 0) == oldest]


class ArbitraryOrder:
    """An order of replicas drawn once, as they join: what "first" means where the real router walks a hash map."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rank: dict[str, float] = {}

    def join(self, name: str) -> None:
        if name not in self._rank:
            self._rank[name] = self._rng.random()

    def leave(self, name: str) -> None:
        self._rank.pop(name, None)

    def rank(self, name: str) -> float:
        return self._rank.get(name, 0.0)

    def first(self, replicas: Iterable[ReplicaView]) -> ReplicaView:
        return min(replicas, key=lambda replica: self.rank(replica.name))


def least_loaded(fleet: Iterable[ReplicaView], order: ArbitraryOrder) -> ReplicaView:
    """Fewest requests in flight, a tie to the first of the order."""
    return min(fleet, key=lambda replica: (replica.in_flight, order.rank(replica.name)))


def imbalanced(fleet: Iterable[ReplicaView], abs_threshold: float, rel_threshold: float) -> bool:
    """SGLang's gateway's test: the most loaded is above the least loaded by more than a number and by more than a
    factor; both must hold, so that a fleet with little to do is never called imbalanced."""
    loads = [replica.in_flight for replica in fleet]
    low, high = min(loads), max(loads)
    return high - low > abs_threshold and high > low * rel_threshold


def break_tie(
    tied: Sequence[ReplicaView], rule: TieBreak, rng: random.Random, recency: Recency | None = None
) -> ReplicaView:
    """One of `tied` (not empty). Draws from `rng` only if the rule leaves more than one."""
    if rule == "first":
        return tied[0]
    if rule == "least-recent" and recency is not None and len(tied) > 1:
        tied = recency.longest_ago(tied)
    return tied[0] if len(tied) == 1 else tied[rng.randrange(len(tied))]


def kv_usage(replica: ReplicaView) -> float:
    """As last polled; of a replica that was never heard of, nothing is used."""
    return replica.metrics.kv_usage if replica.metrics is not None else 0.0


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
