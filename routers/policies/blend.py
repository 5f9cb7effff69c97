"""One weighted score of cached share and load, the plainest blend there is: `affinity-load-score`, which knows the
caches by KV events, and `reported-prefixes`, which asks the engines now and then what they hold.

score = w_cache * (cached tokens / prompt tokens) - w_load * load, highest wins; the ratio of the two weights runs
from pure load (0) to pure affinity (w_load = 0).
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

from routers.config import Options, at_least
from routers.hashing import NO_KEYS, PrefixKeys, prefix_token_hashes
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy, Recency, TieBreak, break_tie, kv_usage
from routers.prompts import namespace_of
from routers.view import (
    Decision,
    FleetView,
    Observation,
    ReplicaRemoved,
    ReportedPrefixes,
    Signal,
    TurnView,
)


class AffinityLoadScoreOptions(Options, frozen=True):
    """Weights as the reference text on prefix-aware routing has them.

    - `w_cache`: weight of the cached share of the prompt.
    - `w_load`: weight of the load; with 1.0 and 1.5 a full hit outweighs a load difference of 0.67.
    - `load`: `kv-usage` is the engine's polled gauge, 0..1, as there; `requests` is this router's in-flight count over
      the largest one, which needs no polling and is never stale [ours].
    - `ties`: as in `least-requests` [ours].
    - `count_copies`: whether a block that an engine holds twice takes two removals to go [ours].
    """

    w_cache: float = 1.0
    w_load: float = 1.5
    load: Literal["kv-usage", "requests"] = "kv-usage"
    ties: TieBreak = "least-recent"
    count_copies: bool = True

    def __post_init__(self) -> None:
        at_least(0, w_cache=self.w_cache, w_load=self.w_load)


class AffinityLoadScore(BasePolicy):
    about = "highest w_cache * cached share of the prompt - w_load * load, from pure load to pure affinity"
    believes = "The engines' KV events say what each replica holds; load is their KV usage as last polled."
    source = "the combined score of the reference text on prefix-aware routing"
    fails = (
        "The share hides the size: a short prompt that is cached whole weighs as much as a long one. Polled KV usage "
        "is old when a burst comes, and says nothing of prefill that is owed. Weights are to be tuned by TTFT."
    )
    Options = AffinityLoadScoreOptions
    cache_signal: ClassVar[Signal] = Signal.KV_EVENTS

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        polled = {Signal.ENGINE_METRICS} if self.options.load == "kv-usage" else set()
        self.needs = frozenset({Signal.TOKENS, self.cache_signal} | polled)
        self._index = PrefixIndex(count_copies=self.options.count_copies)
        self._recency = Recency()

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        tokens = turn.prompt.tokens if turn.prompt is not None else 0
        matched, blocks = self.matched(turn, fleet)
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
        reason = f"highest score {best:.3f}: {held} of {blocks} blocks cached, load {loads[chosen.name]:.2f}"
        rule = "score"
        if len(tied) > 1:
            reason, rule = f"{reason}, one of {len(tied)} tied", "tie"
        believed = held * self.block_size if turn.prompt is not None else None
        return Decision(chosen.name, reason, rule, scores, believed)

    def matched(self, turn: TurnView, fleet: FleetView) -> tuple[dict[str, int], int]:
        """Leading blocks of the prompt that each replica is believed to hold, and the prompt's full blocks."""
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size)) if turn.prompt is not None else NO_KEYS
        return self._index.match(keys), len(keys)

    def observe(self, event: Observation) -> None:
        self._index.observe(event)
        self._recency.observe(event)

    def index_size(self) -> int:
        return self._index.held_blocks()

    def stats(self) -> dict[str, Any]:
        return self._index.state()

    def _loads(self, fleet: FleetView) -> dict[str, float]:
        if self.options.load == "requests":
            most = max(1, max(replica.in_flight for replica in fleet))
            return {replica.name: replica.in_flight / most for replica in fleet}
        return {replica.name: kv_usage(replica) for replica in fleet}


class ReportedPrefixesOptions(AffinityLoadScoreOptions, frozen=True):
    """Third strategy of the reference text on prefix-aware routing, scored by its combined score.

    - `load`: `requests` unless given, so that one poll is enough [ours].
    - `report`: what engines are asked for: `top-k`, their longest prefixes by name, or a `bloom` filter of all.
    - `min_prefix_tokens`: a shorter match counts as none; the text thinks shorter ones not worth the distortion.
    """

    load: Literal["kv-usage", "requests"] = "requests"
    report: Literal["top-k", "bloom"] = "top-k"
    min_prefix_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, min_prefix_tokens=self.min_prefix_tokens)


class ReportedPrefixesPolicy(AffinityLoadScore):
    """The last report counts until the next one comes; a replica that serves no reports is scored by load alone."""

    about = "as affinity-load-score, with caches as engines report them at /prefix_cache_state now and then"
    believes = (
        "A replica holds the prefixes of its last report: its longest ones by name, or all of them in a Bloom filter "
        "that may err. Load is this router's own requests in flight."
    )
    source = "the third strategy of the reference text on prefix-aware routing (replica-reported prefix state)"
    fails = (
        "Between two reports it knows nothing new: a burst of one prefix is cold everywhere, and evicted blocks are "
        "believed in. A list of the longest prefixes names their ends only, so a beginning that many prompts share is "
        "not found unless it is listed itself; a small Bloom filter says yes too often. Salted prompts are in no "
        "report and count as cached nowhere. No real engine has the route."
    )
    Options = ReportedPrefixesOptions
    index_unit = "prefixes"
    cache_signal = Signal.REPORTED_PREFIXES

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._reports: dict[str, ReportedPrefixes] = {}
        self._listed: dict[str, set[int]] = {}

    def matched(self, turn: TurnView, fleet: FleetView) -> tuple[dict[str, int], int]:
        prompt, reports = turn.prompt, {name: self._reports[name] for name in self._reports if name in fleet}
        if prompt is None or not prompt.tokens:
            return {}, 0
        if namespace_of(prompt):  # reports leave out what has a salt or an adapter
            return {}, prompt.tokens // self.block_size
        hashes: dict[bool, list[int]] = {}
        for by_content in {report.by_content for report in reports.values()}:
            if by_content:
                hashes[True] = PrefixKeys(prompt.block_hashes(self.block_size)).array.tolist()
            else:
                hashes[False] = prefix_token_hashes(prompt.token_ids(), self.block_size)
        found = {}
        for name, report in reports.items():
            blocks = self._depth(report, self._listed[name], hashes[report.by_content])
            if blocks and blocks * self.block_size >= self.options.min_prefix_tokens:
                found[name] = blocks
        return found, prompt.tokens // self.block_size

    def observe(self, event: Observation) -> None:
        if isinstance(event, ReportedPrefixes):
            known = self._reports.get(event.replica)
            if known is None or known.generation != event.generation:
                self._listed[event.replica] = {value for value, _ in event.prefixes}
            self._reports[event.replica] = event
        elif isinstance(event, ReplicaRemoved):
            self._reports.pop(event.replica, None)
            self._listed.pop(event.replica, None)
        super().observe(event)

    def index_size(self) -> int:
        """Of a Bloom filter nobody can say how many prefixes it names, so it counts as none."""
        return sum(map(len, self._listed.values()))

    def stats(self) -> dict[str, Any]:
        return {
            "reports": {
                name: {"generation": report.generation, "prefixes": len(report.prefixes), "at_us": report.at_us}
                for name, report in self._reports.items()
            }
        }

    @staticmethod
    def _depth(report: ReportedPrefixes, listed: set[int], hashes: list[int]) -> int:
        """Blocks of the longest prefix that the report names; of a Bloom filter, those before the first no."""
        if report.bloom is not None:
            depth = 0
            while depth < len(hashes) and hashes[depth] in report.bloom:
                depth += 1
            return depth
        for depth in range(len(hashes), 0, -1):
            if hashes[depth - 1] in listed:
                return depth
        return 0
