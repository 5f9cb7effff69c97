"""Policies of vLLM's production-stack: `stack-prefix-aware`, `stack-load-aware`, and what they fall back to.

The fallback is the odd thing: "QPS" is arrivals per replica in the last minute, whatever became of them, and a
replica that never had one is taken before any other.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from routers.config import Options, at_least
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy, count
from routers.rates import WindowCounts
from routers.ring import HashRing
from routers.view import (
    Decision,
    Dispatched,
    FleetView,
    Observation,
    ReplicaRemoved,
    ReplicaView,
    Signal,
    TurnView,
)

CHUNK_CHARS = 128
QPS_WINDOW_S = 60.0
_RING_POINTS = 160


def md5_integer(text: str) -> int:
    """How uhashing places points and keys by default."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)


class LowestQps:
    """The first replica without any arrival ever, else the fewest arrivals in the window, the first at a tie."""

    def __init__(self) -> None:
        self._arrivals = WindowCounts(QPS_WINDOW_S)

    def choose(self, fleet: FleetView) -> tuple[ReplicaView, int | None]:
        counts = {replica.name: self._arrivals.count(replica.name, fleet.now_us) for replica in fleet}
        best = min(fleet, key=lambda replica: -1 if counts[replica.name] is None else counts[replica.name] or 0)
        return best, counts[best.name]

    def decide(self, fleet: FleetView, why: str) -> Decision:
        best, arrivals = self.choose(fleet)
        load = "never used" if arrivals is None else f"fewest arrivals in {QPS_WINDOW_S:.0f} s: {arrivals}"
        return Decision(best.name, f"{why}; {load}", "qps")

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched) and event.counted:
            self._arrivals.add(event.replica, event.at_us)
        elif isinstance(event, ReplicaRemoved):
            self._arrivals.forget(event.replica)


class StackPrefixAwareOptions(Options, frozen=True):
    """Names and defaults of production-stack's `prefixaware` (commit a6c01db).

    - `prefix_min_match_length`: a match of fewer characters goes to the fewest arrivals; 0 never does, so that a
      prompt that nobody matches is placed at random.
    """

    prefix_min_match_length: int = 0

    def __post_init__(self) -> None:
        at_least(0, prefix_min_match_length=self.prefix_min_match_length)


class StackPrefixAware(BasePolicy):
    about = "production-stack's prefixaware: at random among those sent the longest run of 128-character chunks"
    believes = "A replica holds every chunk of text that it was ever sent. Load is not looked at."
    source = "vllm-project/production-stack a6c01db, src/vllm_router/routers/routing_logic.py and prefix/hashtrie.py"
    fails = (
        "Nothing is ever forgotten and load never counts, so a shared beginning herds once one replica has it. "
        "Memory grows with every prompt. Token-id prompts have no text and are placed at random."
    )
    Options = StackPrefixAwareOptions
    index_unit = "chunks"
    needs = frozenset({Signal.TEXT})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._qps = LowestQps()
        self._owners: dict[int, set[str]] = {}  # key of a run of chunks -> replicas that were sent it
        self._held = 0  # owners of all runs together
        self._last: tuple[str, PrefixKeys] = ("", NO_KEYS)

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        keys = _chunk_keys(turn)
        self._last = (turn.request_id, keys)
        survivors, depth = {replica.name for replica in fleet}, 0
        for place in range(1, len(keys) + 1):
            able = self._owners.get(keys.at(place), set()) & survivors
            if not able:
                break
            survivors, depth = able, place
        matched = CHUNK_CHARS * depth
        if matched < self.options.prefix_min_match_length:
            return self._qps.decide(fleet, f"only {matched} characters match")
        names = [replica.name for replica in fleet if replica.name in survivors]
        chosen = names[self.rng.randrange(len(names))] if len(names) > 1 else names[0]
        reason = f"drawn from {count(len(names), 'replica')} sent the first {depth} of {count(len(keys), 'chunk')}"
        return Decision(chosen, reason, "match" if depth else "random")

    def observe(self, event: Observation) -> None:
        self._qps.observe(event)
        if isinstance(event, Dispatched):
            request_id, keys = self._last
            if request_id != event.request_id:
                keys = _chunk_keys(event.turn)
            for place in range(1, len(keys) + 1):
                owners = self._owners.setdefault(keys.at(place), set())
                self._held += event.replica not in owners
                owners.add(event.replica)
            self._last = ("", NO_KEYS)

    def index_size(self) -> int:
        return self._held

    def stats(self) -> dict[str, Any]:
        return {"chunk_runs": len(self._owners)}


def _chunk_keys(turn: TurnView) -> PrefixKeys:
    """Keys of leading chunks; the last one may be short and counts as a whole one."""
    text = turn.prompt.text() or "" if turn.prompt is not None else ""
    chunks: Iterable[str] = (text[at : at + CHUNK_CHARS] for at in range(0, len(text), CHUNK_CHARS))
    hashes = [xxhash.xxh64_intdigest(chunk.encode("utf-8", "surrogatepass")) for chunk in chunks]
    return PrefixKeys(np.array(hashes, dtype=np.uint64))


class StackLoadAwareOptions(Options, frozen=True):
    """Defaults of production-stack's `loadaware` (pull request 1035).

    - `beta`: weight of the load above the mean against the matched share; `LOADAWARE_BETA` there.
    - `count_copies`: whether a block that an engine holds twice takes two removals to go [ours].
    """

    beta: float = 1.0
    count_copies: bool = True

    def __post_init__(self) -> None:
        at_least(0, beta=self.beta)


class StackLoadAware(BasePolicy):
    about = "production-stack's loadaware: cached share of the prompt minus load above the mean, highest wins"
    believes = (
        "Which leading blocks each replica holds; there as LMCache's controller says, here as the engines' KV events "
        "do. Load is this router's requests in flight, prefilling and decoding alike."
    )
    source = "vllm-project/production-stack, pull request 1035, src/vllm_router/routers/routing_logic.py"
    fails = (
        "Load is relative to the mean, so at low load one request more weighs as much as a whole prompt in cache. "
        "When nobody holds anything it falls back to a session ring, which does not look at load."
    )
    Options = StackLoadAwareOptions
    needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS, Signal.SESSION_ID})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._index = PrefixIndex(count_copies=self.options.count_copies)
        self._qps = LowestQps()
        self._ring = HashRing(points=_RING_POINTS, hash_text=md5_integer, label="{name}-{i}", inclusive=False)
        self._members: dict[str, str] = {}  # URL (or name, where there is none) -> name

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        tokens = turn.prompt.tokens if turn.prompt is not None else 0
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size)) if turn.prompt is not None else NO_KEYS
        matched = self._index.match(keys)
        if not any(matched.get(replica.name) for replica in fleet):
            return self._nobody(turn, fleet)
        mean = sum(replica.in_flight for replica in fleet) / len(fleet)
        scores = {
            replica.name: min(matched.get(replica.name, 0) * self.block_size, tokens) / max(tokens, 1)
            - self.options.beta * (replica.in_flight - mean) / max(1.0, mean)
            for replica in fleet
        }
        best = min(fleet, key=lambda replica: (-scores[replica.name], _label(replica)))
        held = matched.get(best.name, 0)
        reason = (
            f"highest score {scores[best.name]:.3f}: {held} of {len(keys)} blocks cached, "
            f"{best.in_flight} in flight, mean {mean:.1f}"
        )
        return Decision(best.name, reason, "score", scores, held * self.block_size)

    def observe(self, event: Observation) -> None:
        self._qps.observe(event)
        self._index.observe(event)

    def index_size(self) -> int:
        return self._index.held_blocks()

    def stats(self) -> dict[str, Any]:
        return self._index.state()

    def _nobody(self, turn: TurnView, fleet: FleetView) -> Decision:
        believed = 0 if turn.prompt is not None else None
        if turn.session_id is None:
            found = self._qps.decide(fleet, "nobody holds any of it")
            return Decision(found.replica, found.reason, found.rule, None, believed)
        members = {_label(replica): replica.name for replica in (*fleet, *fleet.ramping)}
        for label in self._members.keys() - members.keys():
            self._ring.remove(label)
        for label in members.keys() - self._members.keys():
            self._ring.add(label)
        self._members = members
        # The fleet is not empty, so somebody of it is on the ring.
        owner = next(name for label in self._ring.walk(turn.session_id) if (name := members[label]) in fleet)
        return Decision(owner, "nobody holds any of it; owner of the session", "ring", None, believed)


def _label(replica: ReplicaView) -> str:
    return replica.url or replica.name
