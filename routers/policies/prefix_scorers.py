"""Scorers of llm-d that know of caches: by what was sent, by the engines' events, and for prompts that nobody holds.

The odd thing: `no-hit-lru` reads the prefix matches that an earlier scorer of the same profile found, so the order of a
profile's list matters to it alone.
"""

from __future__ import annotations

from collections import OrderedDict

from routers.index import PrefixIndex
from routers.policies.scorer_base import Look, Scorer, ScorerOptions, Scores
from routers.sequences import RouteGuesses
from routers.view import Cleared, Dispatched, KvEvents, Observation, ReplicaRemoved, Signal


class PrefixCacheScorer(Scorer):
    """`prefix-cache`: share of the prompt's blocks that a replica was sent, by llm-d's approximate index.

    Blocks of a replica are an LRU that only a dispatch refreshes, from the head on, so that heads go first. A match
    stops at the first block that nobody has and adds one to everybody who has a block, with or without those before.
    A trailing partial block counts in the prompt's length and is never matched (there: by the very same prompt)."""

    needs = frozenset({Signal.TOKENS})
    reads = ("capacity", "blocks_max")
    matches = True

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

    def index_size(self) -> int:
        return sum(map(len, self._recent.values()))

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
    matches = True
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
        if isinstance(event, KvEvents) and self.options.ignore_clears:
            heeded = tuple(one for one in event.events if not isinstance(one, Cleared))
            event = KvEvents(event.replica, heeded, event.at_us)
        self._index.observe(event)
        if self._guesses is None:
            return
        if isinstance(event, ReplicaRemoved):
            self._guesses.forget(event.replica)
        elif isinstance(event, Dispatched) and look is not None:
            self._guesses.routed(event.replica, look.keys(), event.at_us)

    def index_size(self) -> int:
        return self._index.held_blocks() + (self._guesses.blocks() if self._guesses is not None else 0)


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
