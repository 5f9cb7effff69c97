"""Policies that guess from what was sent: `prefix-hash`.

No engine says anything here: a replica is thought warm because a prompt with the same beginning went there once. The
guess outlives the blocks, which is its flaw, and costs nothing, which is its charm.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

from routers.config import Options, at_least
from routers.hashing import PrefixKeys
from routers.policies.base import BasePolicy, count, kv_usage
from routers.policies.load import PowerOfTwo
from routers.view import Decision, Dispatched, FleetView, Observation, ReplicaRemoved, Signal, TurnView


class PrefixHashOptions(Options, frozen=True):
    """Second strategy of the reference text on prefix-aware routing.

    - `window_tokens`: leading tokens that are one prefix; counted in full blocks.
    - `kv_usage_limit`: share of its KV blocks in use at which a warm replica is passed over.
    - `capacity`: prefixes remembered, least recently used forgotten first [ours; the text says "bounded"].
    """

    window_tokens: int = 512
    kv_usage_limit: float = 0.85
    capacity: int = 100_000

    def __post_init__(self) -> None:
        at_least(1, window_tokens=self.window_tokens, capacity=self.capacity)
        at_least(0, kv_usage_limit=self.kv_usage_limit)


class PrefixHash(BasePolicy):
    """The window counts in full blocks, so prompts that differ only in a trailing partial block are one prefix. Among
    warm replicas below the limit the one with the lowest usage is taken (usage never heard of counts as none); if
    there is none, power of two, and the replica so found is warm from then on."""

    about = "replicas that got the same first 512 tokens before, if their KV usage allows; else power of two"
    believes = "A replica that was sent a prompt with the same first tokens still holds them."
    source = "the second strategy of the reference text on prefix-aware routing (prefix hash)"
    fails = (
        "Prompts that differ within the window share nothing, those that agree beyond it count no more; the map does "
        "not hear of evictions. A popular prefix stays with few replicas until their KV usage is at the limit."
    )
    Options = PrefixHashOptions
    index_unit = "prefixes"
    needs = frozenset({Signal.TOKENS, Signal.ENGINE_METRICS})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._two = PowerOfTwo(rng=rng, block_size=block_size)
        self._warm: OrderedDict[int, list[str]] = OrderedDict()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        key = self._key(turn)
        warm = self._warm.get(key, ()) if key is not None else ()
        able = [fleet[name] for name in warm if name in fleet and kv_usage(fleet[name]) < self.options.kv_usage_limit]
        if able:
            best = min(able, key=kv_usage)
            reason = f"warm for this prefix, KV usage {kv_usage(best):.0%}, lowest of {count(len(able), 'replica')}"
            return Decision(best.name, reason, "warm")
        other = self._two.choose(turn, fleet)
        why = "prompt shorter than a block or not tokenised" if key is None else "nobody warm can take it"
        return Decision(other.replica, f"{why}; {other.reason}", "no-prefix" if key is None else "cold")

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            key = self._key(event.turn)
            if key is None:
                return
            warm = self._warm.setdefault(key, [])
            if event.replica not in warm:
                warm.append(event.replica)
            self._warm.move_to_end(key)
            if len(self._warm) > self.options.capacity:
                self._warm.popitem(last=False)
        elif isinstance(event, ReplicaRemoved):
            for warm in self._warm.values():
                if event.replica in warm:
                    warm.remove(event.replica)

    def index_size(self) -> int:
        return len(self._warm)

    def stats(self) -> dict[str, Any]:
        return {"prefixes": len(self._warm)}

    def _key(self, turn: TurnView) -> int | None:
        if turn.prompt is None:
            return None
        blocks = max(1, self.options.window_tokens // self.block_size)
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size)[:blocks])
        return keys.at(len(keys)) if len(keys) else None
