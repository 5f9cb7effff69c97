"""What scorers of llm-d's endpoint picker share: their options, one decision as they see it, and the shape of a scorer.

A scorer scores, and remembers through `observe` what it needs for that; it never chooses.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from routers.config import at_least
from routers.hashing import NO_KEYS, PrefixKeys
from routers.view import FleetView, Observation, Signal, TurnView

Scores = dict[str, float]


class ScorerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a profile. Only the named scorer reads an option that is its own; defaults are llm-d's.

    - `scorer`: its name.
    - `weight`: factor of its score in the sum; 1 where llm-d's configuration gives none.
    - `capacity`: `prefix-cache`: blocks remembered per replica (31250); `no-hit-lru`: replicas (1024);
      `session-affinity`: sessions (10,000, ours).
    - `blocks_max`: `prefix-cache`: leading blocks of a prompt that are looked at.
    - `threshold`: `load-aware`: queue length that scores 0 (128); `token-load`: tokens that do (4,194,304).
    - `idle_threshold`, `max_busy_score`: `active-request`: count that still scores 1, and the best score above it.
    - `ignore_clears`: `precise-prefix`: AllBlocksCleared changes nothing, as in the versions read; later ones honour
      it.
    - `speculative_ttl_s`: `precise-prefix`: believe in what was routed for so long besides; 2 where it is on.
    """

    scorer: str
    weight: float = 1.0
    capacity: int | None = None
    blocks_max: int = 256
    threshold: float | None = None
    idle_threshold: int = 0
    max_busy_score: float = 1.0
    ignore_clears: bool = False
    speculative_ttl_s: float | None = None

    def __post_init__(self) -> None:
        at_least(0, weight=self.weight, idle_threshold=self.idle_threshold, max_busy_score=self.max_busy_score)
        at_least(1, blocks_max=self.blocks_max, capacity=1 if self.capacity is None else self.capacity)
        at_least(0, speculative_ttl_s=self.speculative_ttl_s or 0, threshold=self.threshold or 0)


SCORER_DEFAULTS = {
    "capacity": None,
    "blocks_max": 256,
    "threshold": None,
    "idle_threshold": 0,
    "max_busy_score": 1.0,
    "ignore_clears": False,
    "speculative_ttl_s": None,
}


class Look(msgspec.Struct):
    """One decision as its scorers share it: `matched` is filled by prefix scorers (leading blocks per replica)."""

    turn: TurnView
    fleet: FleetView
    block_size: int
    matched: dict[str, float] = {}
    blocks: int = 0
    hit_blocks: dict[str, int] | None = None
    keys_made: PrefixKeys | None = None

    def keys(self) -> PrefixKeys:
        if self.keys_made is None:
            prompt = self.turn.prompt
            self.keys_made = NO_KEYS if prompt is None else PrefixKeys(prompt.block_hashes(self.block_size))
        return self.keys_made


class Scorer:
    """Base: scores nobody, remembers nothing."""

    needs: ClassVar[frozenset[Signal]] = frozenset()
    reads: ClassVar[tuple[str, ...]] = ()
    matches: ClassVar[bool] = False  # fills `Look.matched`

    def __init__(self, options: ScorerOptions) -> None:
        self.options = options

    def score(self, look: Look) -> Scores:
        raise NotImplementedError(f"{type(self).__name__} has no score(look): write one returning a score per replica")

    def index_size(self) -> int | None:
        """As a policy's."""
        return None

    def observe(self, event: Observation, look: Look | None) -> None:
        """`look` is the decision that a Dispatched belongs to, where this router made it."""
