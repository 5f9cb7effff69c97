"""Policies that look at load alone, or at nothing: `random`, `round-robin`, `least-requests`, `least-tokens`,
`power-of-two`.

They know the requests in flight from this router and nothing of caches, so they are the ground that every
cache-aware policy must beat, and the right choice where prompts share nothing.
"""

from __future__ import annotations

import random
from typing import Any

from routers.config import Options
from routers.policies.base import BasePolicy, Recency, TieBreak, break_tie, count
from routers.view import Decision, FleetView, Observation, Signal, TurnView


class RandomChoice(BasePolicy):
    about = "every replica with equal chance, whatever its load"
    believes = "Nothing."
    source = "folklore; vllm-router, SGLang's gateway and production-stack all have it"
    fails = "Caches are used by chance only, so the hit rate falls as one over the replicas, and loads wander."

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        replica = fleet.replicas[self.rng.randrange(len(fleet))] if len(fleet) > 1 else fleet.replicas[0]
        return Decision(replica.name, f"drawn at random from {count(len(fleet), 'replica')}", "random")


class RoundRobin(BasePolicy):
    """In turn. The place in the round is kept by name, so a replica that comes or goes makes no other skip a turn."""

    about = "every replica in turn"
    believes = "Nothing but whose turn it is."
    source = "folklore; vllm-router, SGLang's gateway and production-stack all have it"
    fails = (
        "Requests of unequal length pile up on whoever got the long ones, and a session's turns go past every cache in "
        "turn. Right where prompts share nothing and cost alike."
    )

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._recency = Recency()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        replica = self._recency.longest_ago(fleet.replicas)[0]
        return Decision(replica.name, f"next of {count(len(fleet), 'replica')} in turn", "round-robin")

    def observe(self, event: Observation) -> None:
        self._recency.observe(event)


class LeastRequestsOptions(Options, frozen=True):
    """Ours.

    - `ties`: `least-recent` gives a tie to the replica chosen longest ago and draws only among those never chosen, so
      that an idle fleet is used evenly (field case BL-22); `random` draws among all tied; `first` takes the first, as
      SGLang's 0.3.2 gateway does.
    """

    ties: TieBreak = "least-recent"


class LeastRequests(BasePolicy):
    about = "the replica with the fewest requests in flight from this router"
    believes = "A request in flight is a request's worth of load, whatever its length. Caches are unknown."
    source = "folklore; the common ground of the gateways' fallbacks"
    fails = (
        "A few very long requests weigh as little as short ones, and a session loses its cache on every turn. Each "
        "ingress counts its own requests, so several of them pick the same replica."
    )
    Options = LeastRequestsOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._recency = Recency()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        fewest = min(replica.in_flight for replica in fleet)
        tied = [replica for replica in fleet if replica.in_flight == fewest]
        replica = break_tie(tied, self.options.ties, self.rng, self._recency)
        reason = f"fewest in flight: {fewest}"
        if len(tied) > 1:
            return Decision(replica.name, f"{reason}, one of {len(tied)} tied", "tie")
        return Decision(replica.name, reason, "least-requests")

    def observe(self, event: Observation) -> None:
        self._recency.observe(event)


class LeastTokens(LeastRequests):
    """Prompt tokens count whole, cached or not, from the decision to the end of the answer: a load that a router can
    know without events. Prompts that nobody tokenised count as none, so requests break that tie first."""

    about = "the replica with the fewest prompt tokens in flight from this router"
    believes = "A prompt token in flight costs the same, cached or not, until its answer has ended."
    source = "folklore; SGLang's gateway balances by tokens where its engines report them"
    fails = (
        "Long answers after short prompts are invisible, a cached prompt counts whole, and prompts that nobody could "
        "tokenise count as none."
    )
    needs = frozenset({Signal.TOKENS})

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        fewest = min((replica.in_flight_tokens, replica.in_flight) for replica in fleet)
        tied = [replica for replica in fleet if (replica.in_flight_tokens, replica.in_flight) == fewest]
        replica = break_tie(tied, self.options.ties, self.rng, self._recency)
        reason = f"fewest prompt tokens in flight: {fewest[0]} in {count(fewest[1], 'request')}"
        if len(tied) > 1:
            return Decision(replica.name, f"{reason}, one of {len(tied)} tied", "tie")
        return Decision(replica.name, reason, "least-tokens")


class PowerOfTwo(BasePolicy):
    """Two distinct replicas are drawn, the less loaded one is taken, at a tie the one drawn first (Ray's `pow_2_router`
    and SGLang's gateway agree on both)."""

    about = "draws two replicas and takes the one with fewer requests in flight"
    believes = "Of two replicas the one with fewer of this router's requests is the better; the others need no look."
    source = "ray-project/ray 2.60.0 pow_2_router.py; sgl-project/sglang gateway 0.3.2 power_of_two.rs"
    fails = (
        "With few replicas it is close to random; caches are used by chance only. Its strength is that stale counts "
        "never make everybody run to one replica."
    )

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        if len(fleet) == 1:
            return Decision(fleet.replicas[0].name, "the only replica", "only")
        first, second = self.rng.sample(fleet.replicas, 2)
        if second.in_flight < first.in_flight:
            first, second = second, first
        reason = f"{first.in_flight} in flight against {second.in_flight} on {second.name}"
        return Decision(first.name, reason, "tie" if first.in_flight == second.in_flight else "power-of-two")
