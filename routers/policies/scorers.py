"""Scorers of llm-d's endpoint picker: each gives every replica a score, which a profile weighs and sums.

A scorer scores, and remembers through `observe` what it needs for that; it never chooses. Scores are cut to 0..1 by
the profile before weighing. The odd thing: `no-hit-lru` reads the prefix matches that an earlier scorer of the same
profile found, so the order of a profile's list matters to it alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from routers.config import at_least
from routers.errors import OptionError
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import PrefixIndex
from routers.sequences import RouteGuesses
from routers.view import (
    Cleared,
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
        if self.scorer not in SCORERS:
            raise OptionError(f"no scorer named {self.scorer!r}: choose one of {', '.join(SCORERS)}")
        at_least(0, weight=self.weight, idle_threshold=self.idle_threshold, max_busy_score=self.max_busy_score)
        at_least(1, blocks_max=self.blocks_max, capacity=1 if self.capacity is None else self.capacity)
        at_least(0, speculative_ttl_s=self.speculative_ttl_s or 0, threshold=self.threshold or 0)
        own = SCORERS[self.scorer].reads
        for name, default in _DEFAULTS.items():
            if name not in own and getattr(self, name) != default:
                raise OptionError(f"scorer {self.scorer!r} has no option {name!r}: it reads {', '.join(own) or 'none'}")


_DEFAULTS = {
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

    def __init__(self, options: ScorerOptions) -> None:
        self.options = options

    def score(self, look: Look) -> Scores:
        raise NotImplementedError(f"{type(self).__name__} has no score(look): write one returning a score per replica")

    def observe(self, event: Observation, look: Look | None) -> None:
        """`look` is the decision that a Dispatched belongs to, where this router made it."""


class PrefixCacheScorer(Scorer):
    """`prefix-cache`: share of the prompt's blocks that a replica was sent, by llm-d's approximate index.

    Blocks of a replica are an LRU that only a dispatch refreshes, from the head on, so that heads go first. A match
    stops at the first block that nobody has and adds one to everybody who has a block, with or without those before.
    A trailing partial block counts in the prompt's length and is never matched (there: by the very same prompt)."""

    needs = frozenset({Signal.TOKENS})
    reads = ("capacity", "blocks_max")

    def __init__(self, options: ScorerOptions) -> None:
        super().__init__(options)
        self._capacity = options.capacity if options.capacity is not None else 31_250
        self._holders: dict[int, set[str]] = {}
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def score(self, look: Look) -> Scores:
        keys = look.keys()
        tokens = look.turn.prompt.tokens if look.turn.prompt is not None else 0
        total = min(-(-tokens // look.block_size), self.options.blocks_max)
        matched: dict[str, int] = {}
        for place in range(1, min(len(keys), self.options.blocks_max) + 1):
            holders = self._holders.get(keys.at(place))
            if not holders:
                break
            for name in holders:
                matched[name] = matched.get(name, 0) + 1
        look.hit_blocks, look.blocks = matched, total
        scores = {replica.name: matched.get(replica.name, 0) / max(1, total) for replica in look.fleet}
        look.matched = dict(scores)
        return scores

    def observe(self, event: Observation, look: Look | None) -> None:
        if isinstance(event, Dispatched) and look is not None:
            keys = look.keys()
            recent = self._recent.setdefault(event.replica, OrderedDict())
            for place in range(1, min(len(keys), self.options.blocks_max) + 1):
                key = keys.at(place)
                recent[key] = None
                recent.move_to_end(key)
                self._holders.setdefault(key, set()).add(event.replica)
                if len(recent) > self._capacity:
                    self._lose(recent.popitem(last=False)[0], event.replica)
        elif isinstance(event, ReplicaRemoved):
            for key in self._recent.pop(event.replica, ()):
                self._lose(key, event.replica)

    def _lose(self, key: int, replica: str) -> None:
        holders = self._holders[key]
        holders.discard(replica)
        if not holders:
            del self._holders[key]


class PrecisePrefixScorer(Scorer):
    """`precise-prefix`: share of the prompt's blocks that a replica announced, by its KV events; a device block weighs
    1, one on the host 0.8, any other 1. Lower tiers count where they continue the run of device blocks."""

    needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS})
    reads = ("ignore_clears", "speculative_ttl_s")
    _HOST_WEIGHT = 0.8

    def __init__(self, options: ScorerOptions) -> None:
        super().__init__(options)
        self._index = PrefixIndex()
        self._guesses = RouteGuesses(options.speculative_ttl_s) if options.speculative_ttl_s else None

    def score(self, look: Look) -> Scores:
        keys = look.keys()
        device = self._index.match(keys)
        if self._guesses is not None:
            self._guesses.expire(look.fleet.now_us)
            for name, blocks in self._guesses.match(keys).items():
                device[name] = max(blocks, device.get(name, 0))
        lower = self._index.lower_tiers(keys, device)
        scores = {}
        look.hit_blocks, look.blocks = {}, len(keys)
        for replica in look.fleet:
            host, disk = lower.get(replica.name, (0, 0))
            look.hit_blocks[replica.name] = device.get(replica.name, 0) + host + disk
            found = device.get(replica.name, 0) + self._HOST_WEIGHT * host + disk
            scores[replica.name] = min(1.0, found / max(1, len(keys)))
        look.matched = {name: float(value > 0) for name, value in scores.items()}  # there: hit or no hit
        return scores

    def observe(self, event: Observation, look: Look | None) -> None:
        if isinstance(event, KvEvents):
            events = event.events
            if self.options.ignore_clears:
                events = tuple(one for one in events if not isinstance(one, Cleared))
            self._index.apply(event.replica, events)
        elif isinstance(event, EventGap):
            self._index.gap(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._index.forget(event.replica)
            if self._guesses is not None:
                self._guesses.forget(event.replica)
        elif isinstance(event, Dispatched) and self._guesses is not None and look is not None:
            self._guesses.routed(event.replica, look.keys(), event.at_us)


class KvCacheUtilizationScorer(Scorer):
    """`kv-cache-utilization`: 1 minus the engine's KV usage as last polled; 1 for one never heard of."""

    needs = frozenset({Signal.ENGINE_METRICS})

    def score(self, look: Look) -> Scores:
        return {view.name: 1.0 - (view.metrics.kv_usage if view.metrics is not None else 0.0) for view in look.fleet}


class QueueDepthScorer(Scorer):
    """`queue-depth`: (max - q) / (max - min) of the polled waiting queues; all equal score 1."""

    needs = frozenset({Signal.ENGINE_METRICS})

    def score(self, look: Look) -> Scores:
        return _spread({view.name: _waiting(view) for view in look.fleet})


class RunningRequestsScorer(Scorer):
    """`running-requests`: as `queue-depth`, of the polled running requests."""

    needs = frozenset({Signal.ENGINE_METRICS})

    def score(self, look: Look) -> Scores:
        return _spread({view.name: view.metrics.running if view.metrics is not None else 0 for view in look.fleet})


class LoadAwareScorer(Scorer):
    """`load-aware`: 0.5 for an empty polled queue, falling to 0 at `threshold`."""

    needs = frozenset({Signal.ENGINE_METRICS})
    reads = ("threshold",)

    def score(self, look: Look) -> Scores:
        top = self.options.threshold or 128.0
        return {view.name: 0.5 * (1.0 - min(_waiting(view), top) / top) for view in look.fleet}


class ActiveRequestScorer(Scorer):
    """`active-request`: of this router's requests in flight; up to `idle_threshold` scores 1, else
    (max - count) / max * `max_busy_score`."""

    reads = ("idle_threshold", "max_busy_score")

    def score(self, look: Look) -> Scores:
        most = max(view.in_flight for view in look.fleet)
        return {
            view.name: 1.0
            if view.in_flight <= self.options.idle_threshold
            else (most - view.in_flight) / most * self.options.max_busy_score
            for view in look.fleet
        }


class TokenLoadScorer(Scorer):
    """`token-load`: 1 - tokens / `threshold`, where a request weighs its prompt and one and a half times that for its
    answer. llm-d divides bytes by four to guess the prompt; here its tokens are counted."""

    needs = frozenset({Signal.TOKENS})
    reads = ("threshold",)

    def score(self, look: Look) -> Scores:
        top = self.options.threshold or 4_194_304.0
        return {view.name: 1.0 - min(round(2.5 * view.in_flight_tokens), top) / top for view in look.fleet}


class SessionAffinityScorer(Scorer):
    """`session-affinity`: 1 for the replica that the session went to last, else 0. In llm-d the client carries that
    name in a header; here the router remembers it."""

    needs = frozenset({Signal.SESSION_ID})
    reads = ("capacity",)

    def __init__(self, options: ScorerOptions) -> None:
        super().__init__(options)
        self._last: OrderedDict[str, str] = OrderedDict()

    def score(self, look: Look) -> Scores:
        last = self._last.get(look.turn.session_id) if look.turn.session_id is not None else None
        return {view.name: float(view.name == last) for view in look.fleet}

    def observe(self, event: Observation, look: Look | None) -> None:
        if isinstance(event, Dispatched) and event.turn.session_id is not None:
            self._last[event.turn.session_id] = event.replica
            self._last.move_to_end(event.turn.session_id)
            if len(self._last) > (self.options.capacity or 10_000):
                self._last.popitem(last=False)


class NoHitLruScorer(Scorer):
    """`no-hit-lru`: spreads cold prompts. If anybody has a match all score 0.5; else the replica that got a cold
    prompt longest ago, or never, scores highest. Place it after a prefix scorer, or every prompt is cold."""

    reads = ("capacity",)

    def __init__(self, options: ScorerOptions) -> None:
        super().__init__(options)
        self._used: OrderedDict[str, None] = OrderedDict()  # oldest first

    def score(self, look: Look) -> Scores:
        names = [view.name for view in look.fleet]
        if any(look.matched.get(name, 0) > 0 for name in names):
            return dict.fromkeys(names, 0.5)
        if len(names) == 1:
            return {names[0]: 1.0}
        span = len(names) - 1
        unused = [name for name in names if name not in self._used]
        scores = {name: 1.0 - place / span for place, name in enumerate(unused)}
        for place, name in enumerate(name for name in self._used if name in names):
            scores[name] = max(0.0, 1.0 - (len(unused) + place) / span)
        return scores

    def observe(self, event: Observation, look: Look | None) -> None:
        if isinstance(event, Dispatched) and look is not None:
            if not any(value > 0 for value in look.matched.values()):
                self._used[event.replica] = None
                self._used.move_to_end(event.replica)
                if len(self._used) > (self.options.capacity or 1024):
                    self._used.popitem(last=False)
        elif isinstance(event, ReplicaRemoved):
            self._used.pop(event.replica, None)


SCORERS: dict[str, type[Scorer]] = {
    "prefix-cache": PrefixCacheScorer,
    "precise-prefix": PrecisePrefixScorer,
    "kv-cache-utilization": KvCacheUtilizationScorer,
    "queue-depth": QueueDepthScorer,
    "running-requests": RunningRequestsScorer,
    "load-aware": LoadAwareScorer,
    "active-request": ActiveRequestScorer,
    "token-load": TokenLoadScorer,
    "session-affinity": SessionAffinityScorer,
    "no-hit-lru": NoHitLruScorer,
}


def make_scorers(entries: Sequence[ScorerOptions]) -> list[Scorer]:
    return [SCORERS[entry.scorer](entry) for entry in entries]


def _waiting(view: ReplicaView) -> int:
    return view.metrics.waiting if view.metrics is not None else 0


def _spread(values: Mapping[str, int]) -> Scores:
    low, high = min(values.values()), max(values.values())
    return {name: (high - value) / (high - low) if high > low else 1.0 for name, value in values.items()}
