"""`affinity-load-score`: one weighted score of cached share and load, the plainest blend there is.

score = w_cache * (cached tokens / prompt tokens) - w_load * load, highest wins; the ratio of the two weights runs
from pure load (0) to pure affinity (w_load = 0).
"""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec

from routers.config import Options, at_least
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy, Recency, TieBreak, break_tie
from routers.view import (
    Decision,
    Dispatched,
    EventGap,
    FleetView,
    KvEvents,
    Observation,
    ReplicaRemoved,
    ReplicaView,
    Signal,
    TurnView,
)


class AffinityLoadScoreOptions(Options, frozen=True):
    """Weights as the reference text on prefix-aware routing has them: with 1.0 and 1.5 a full hit outweighs a load
    difference of 0.67. `load`: `kv-usage` is the engine's polled gauge, 0..1, as there; `requests` is this router's
    in-flight count over the largest one, which needs no polling and is never stale. `ties` as in `least-requests`."""

    w_cache: float = 1.0
    w_load: float = 1.5
    load: Literal["kv-usage", "requests"] = "kv-usage"
    ties: TieBreak = "least-recent"
    count_copies: bool = True

    def __post_init__(self) -> None:
        at_least(0, w_cache=self.w_cache, w_load=self.w_load)


class AffinityLoadScore(BasePolicy):
    about = "highest w_cache * cached share of the prompt - w_load * load, from pure load to pure affinity"
    Options = AffinityLoadScoreOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        polled = {Signal.ENGINE_METRICS} if self.options.load == "kv-usage" else set()
        self.needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS} | polled)
        self._index = PrefixIndex(count_copies=self.options.count_copies)
        self._recency = Recency()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        tokens = turn.prompt.tokens if turn.prompt is not None else 0
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size)) if turn.prompt is not None else NO_KEYS
        matched = self._index.match(keys)
        loads = self._loads(fleet)
        scores = {
            replica.name: self.options.w_cache * matched.get(replica.name, 0) * self.block_size / max(1, tokens)
            - self.options.w_load * loads[replica.name]
            for replica in fleet
        }
        best = max(scores.values())
        tied = [replica for replica in fleet if scores[replica.name] == best]
        chosen = break_tie(tied, self.options.ties, self.rng, self._recency)
        held = matched.get(chosen.name, 0)
        reason = f"highest score {best:.3f}: {held} of {len(keys)} blocks cached, load {loads[chosen.name]:.2f}"
        rule = "score"
        if len(tied) > 1:
            reason, rule = f"{reason}, one of {len(tied)} tied", "tie"
        believed = held * self.block_size if turn.prompt is not None else None
        return Decision(chosen.name, reason, rule, scores, believed)

    def observe(self, event: Observation) -> None:
        if isinstance(event, KvEvents):
            self._index.apply(event.replica, event.events)
        elif isinstance(event, EventGap):
            self._index.gap(event.replica)
        elif isinstance(event, Dispatched):
            self._recency.chosen(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._index.forget(event.replica)
            self._recency.forget(event.replica)

    def stats(self) -> dict[str, Any]:
        return {"index": msgspec.structs.asdict(self._index.stats), "index_blocks": len(self._index)}

    def _loads(self, fleet: FleetView) -> dict[str, float]:
        if self.options.load == "requests":
            most = max(1, max(replica.in_flight for replica in fleet))
            return {replica.name: replica.in_flight / most for replica in fleet}
        return {replica.name: _usage(replica) for replica in fleet}


def _usage(replica: ReplicaView) -> float:
    return replica.metrics.kv_usage if replica.metrics is not None else 0.0
