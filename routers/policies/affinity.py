"""`pure-kv-affinity`: the longest resident prefix wins, whatever the load.

It exists as the baseline that herds: a replica that holds the system prompt wins every request that starts with it.
Published comparisons describe such a router as a KV-aware one "optimized solely for KV cache overlap".
"""

from __future__ import annotations

import random
from typing import Any

from routers.config import Options
from routers.hashing import PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy, Recency, TieBreak, break_tie, count
from routers.view import Decision, FleetView, Observation, Signal, TurnView


class PureKvAffinityOptions(Options, frozen=True):
    """As Dynamo's selector, which this policy is a reduction of.

    - `ties`: who wins among equally long matches, no match at all included. `random` as there; `first` herds from the
      first request on; `least-recent` spreads cold prompts evenly.
    - `count_copies`: whether a block that an engine holds twice takes two removals to go [ours].
    """

    ties: TieBreak = "random"
    count_copies: bool = True


class PureKvAffinity(BasePolicy):
    about = "the replica that holds the longest prefix of the prompt, whatever its load (herds on purpose)"
    believes = "The engines' KV events say what each replica holds. Load is not looked at."
    source = 'published comparisons, which describe a router "optimized solely for KV cache overlap"'
    fails = (
        "Whenever prompts share a beginning: the first replica that holds it wins every request (144 of 144 in the "
        "reference example, makespan 3.6 times that of a router that looks at load)."
    )
    Options = PureKvAffinityOptions
    needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._index = PrefixIndex(count_copies=self.options.count_copies)
        self._recency = Recency()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        if turn.prompt is None:
            replica = break_tie(fleet.replicas, self.options.ties, self.rng, self._recency)
            return Decision(replica.name, f"prompt not tokenised, one of {len(fleet)} tied", "no-tokens")
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size))
        matched = self._index.match(keys)
        scores = {replica.name: float(matched.get(replica.name, 0)) for replica in fleet}
        best = max(scores.values())
        tied = [replica for replica in fleet if scores[replica.name] == best]
        replica = break_tie(tied, self.options.ties, self.rng, self._recency)
        held = int(best)
        reason = f"longest prefix: {held} of {count(len(keys), 'block')} resident"
        rule = "longest-prefix"
        if len(tied) > 1:
            reason, rule = f"{reason}, one of {len(tied)} tied", "tie" if held else "cold"
        return Decision(replica.name, reason, rule, scores, held * self.block_size)

    def observe(self, event: Observation) -> None:
        self._index.observe(event)
        self._recency.observe(event)

    def index_size(self) -> int:
        return self._index.held_blocks()

    def stats(self) -> dict[str, Any]:
        return self._index.state()
