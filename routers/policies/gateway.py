"""Cache-aware policies of SGLang's gateway and what grew from it: `sglang-cache-aware`, `smg-cache-aware`,
`vllm-cache-aware`.

All three keep a prefix tree of what they sent, in characters or in tokens, and fall back to the fewest requests in
flight. How they read the tree is what differs: 0.3.2 takes the one tenant that created the matched node, its
successor any of its owners with a check of that one's load, and vllm-router matches every replica by itself. In
the first and last a tie goes to the first of an order that is arbitrary and fixed per process (a hash map there).
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from routers.config import Options, at_least
from routers.hashing import PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import ArbitraryOrder, BasePolicy, break_tie, count, imbalanced, least_loaded
from routers.prompts import Prompt, namespace_of
from routers.tree import PrefixTree, token_text
from routers.view import (
    Decision,
    Dispatched,
    FleetView,
    Observation,
    ReplicaAdded,
    ReplicaRemoved,
    ReplicaView,
    Signal,
    TurnView,
)

SMG_OWNERS_MAX = 8
VLLM_CHARS_PER_TOKEN = 8  # vllm-router keys its tree by tokens as eight hex digits and counts those


class CacheAwareOptions(Options, frozen=True):
    """Defaults of the command line of SGLang's gateway 0.3.2, as its help prints them.

    - `cache_threshold`: a match must be more than this share of the prompt to count.
    - `balance_abs_threshold`: loads that differ by more than this number, and by more than the factor too, are out of
      balance, and then load alone decides.
    - `balance_rel_threshold`: that factor.
    - `eviction_interval_secs`: how often the tree is cut down.
    - `max_tree_size`: characters of one replica that it is cut down to.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_secs: float = 60.0
    max_tree_size: int = 67_108_864

    def __post_init__(self) -> None:
        at_least(
            0,
            cache_threshold=self.cache_threshold,
            balance_abs_threshold=self.balance_abs_threshold,
            balance_rel_threshold=self.balance_rel_threshold,
            eviction_interval_secs=self.eviction_interval_secs,
            max_tree_size=self.max_tree_size,
        )


class _TreePolicy(BasePolicy):
    """Tree, clock, arbitrary order and eviction; what is matched and inserted is the derived policy's."""

    Options = CacheAwareOptions
    budget_is_shared: ClassVar[bool] = False
    index_unit = "characters"

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._tree = PrefixTree()
        self._order = ArbitraryOrder(rng)
        self._clock = 0
        self._evicted_us = 0
        self._text = ("", "")  # request and history text of the decision whose Dispatched follows

    def text_of(self, prompt: Prompt | None) -> str:
        return prompt.text() or "" if prompt is not None else ""

    def chars_max(self) -> int:
        """Budget of the tree in its own characters."""
        size: int = self.options.max_tree_size
        return size

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def inserted(self, event: Dispatched) -> None:
        """The request went to its replica and its text into the tree."""
        request_id, text = self._text
        if request_id != event.request_id:  # placed by somebody else
            text = self.text_of(event.turn.prompt)
        self._text = ("", "")
        if text:
            self._tree.insert(text, event.replica, self.tick(), whole_path=False)

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            self.inserted(event)
            self._evict(event.at_us)
        elif isinstance(event, ReplicaAdded):
            self._order.join(event.replica)
            self._tree.add_tenant(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._order.leave(event.replica)
            self._tree.remove_tenant(event.replica)

    def index_size(self) -> int:
        return self._tree.total_chars()

    def stats(self) -> dict[str, Any]:
        return {"tree_chars": {name: self._tree.chars(name) for name in self._tree.tenants()}}

    def by_load(self, fleet: FleetView, why: str, rule: str) -> Decision:
        best = least_loaded(fleet, self._order)
        return Decision(best.name, f"{why}; fewest in flight: {best.in_flight}", rule)

    def _evict(self, now_us: int) -> None:
        if now_us - self._evicted_us < round(1e6 * self.options.eviction_interval_secs):
            return
        self._evicted_us = now_us
        if self.budget_is_shared:
            self._tree.evict_leaves(self.chars_max())
        else:
            for name in self._tree.tenants():
                self._tree.evict_leaves(self.chars_max(), name)


def _believed(rate: float, prompt: Prompt | None) -> int | None:
    """Tokens that a matched share of the text stands for, where the prompt's length in tokens is known."""
    return int(rate * prompt.tokens) if prompt is not None and prompt.tokens else None


class SglangCacheAware(_TreePolicy):
    about = "SGLang gateway 0.3.2's cache_aware: the creator of the matched text, unless loads are out of balance"
    believes = (
        "The replica that was first sent a text still holds it; others that were sent it later are never considered. "
        "Load is this router's own requests in flight."
    )
    source = "sgl-project/sglang, sgl-model-gateway 0.3.2, src/policies/cache_aware.rs and tree.rs"
    fails = (
        "A tie always goes to one replica, so an idle fleet that gets unrelated prompts one by one uses a single one. "
        "A popular prefix stays with its creator until loads differ by 65 and by half. Token-id prompts have no text."
    )
    needs = frozenset({Signal.TEXT})
    text_join = " "

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._gone: str | None = None  # tenant of the last match that cannot serve

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        options = self.options
        text = self.text_of(turn.prompt)
        self._text, self._gone = (turn.request_id, text), None
        if imbalanced(fleet, options.balance_abs_threshold, options.balance_rel_threshold):
            return self.by_load(fleet, "loads are out of balance", "imbalanced")
        node, matched = self._tree.match(text)
        rate = matched / len(text) if text else 0.0
        if rate <= options.cache_threshold:
            return self.by_load(fleet, f"match {rate:.0%} is too short" if text else "no text", "miss")
        tenant = node.creator or ""
        if tenant in fleet:
            return Decision(
                tenant, f"created the matched {rate:.0%} of the text", "match", None, _believed(rate, turn.prompt)
            )
        self._text = (turn.request_id, "")  # such a request is not inserted
        if tenant in {replica.name for replica in (*fleet.draining, *fleet.down)}:  # not one left out this time only
            self._gone = tenant
        first = self._order.first(fleet)
        return Decision(first.name, f"{tenant}, which created the matched text, cannot serve; first of all", "gone")

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            if event.decision.rule in ("match", "miss", "gone"):
                # A match refreshes what it found at every eighth tick of the clock only.
                stamp = self.tick()
                text = self._text[1]
                if stamp % 8 == 0 and text:
                    node, _ = self._tree.match(text)
                    if node.creator is not None:
                        node.owners[node.creator] = stamp
            if self._gone is not None:
                self._tree.remove_tenant(self._gone)
                self._gone = None
        super().observe(event)


class SmgCacheAwareOptions(CacheAwareOptions, frozen=True):
    """Defaults of smg at commit f8daa88.

    - `cache_threshold`: a match must be more than this share of the prompt to count.
    - `balance_abs_threshold`: an owner whose load is above the mean by more than this number, and by more than the
      factor too, is passed over for the least loaded of all.
    - `balance_rel_threshold`: that factor.
    - `eviction_interval_secs`: how often the tree is cut down.
    - `max_tree_size`: characters of all replicas together that it is cut down to.
    - `use_kv_events`: ask the engines' cache events instead of the tree: most resident blocks, then load.
    """

    eviction_interval_secs: float = 120.0
    use_kv_events: bool = False


class SmgCacheAware(_TreePolicy):
    about = "smg's cache_aware: least loaded owner of the matched text, if its load is not far above the mean"
    believes = (
        "Every replica that was sent a text still holds it (with use_kv_events: what the engines announced). "
        "Load is this router's own requests in flight."
    )
    source = "smg-project/smg f8daa88, model_gateway/src/policies/cache_aware.rs"
    fails = (
        "At low load nothing keeps a popular prefix from one replica: the gate opens at the mean plus 64 requests. "
        "Each ingress has a tree and counts of its own, so N of them loosen that gate N times."
    )
    Options = SmgCacheAwareOptions
    budget_is_shared = True
    text_join = " "

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        events = {Signal.TOKENS, Signal.KV_EVENTS}
        self.needs = frozenset(events if self.options.use_kv_events else {Signal.TEXT})
        self.index_unit = "blocks" if self.options.use_kv_events else "characters"
        self._index = PrefixIndex()
        self._processed: dict[str, int] = {}

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        if self.options.use_kv_events:
            return self._by_events(turn, fleet)
        text = self.text_of(turn.prompt)
        self._text = (turn.request_id, text)
        node, matched = self._tree.match(text)
        rate = matched / len(text) if text else 0.0
        if rate <= self.options.cache_threshold:
            return self._least(fleet, f"match {rate:.0%} is too short" if text else "no text", "miss")
        # The walk over a node's owners has no order there; here it is one that is drawn once.
        listed = sorted(node.owners, key=self._order.rank)[:SMG_OWNERS_MAX]
        owners = [fleet[name] for name in listed if name in fleet]
        if not owners:
            return self._least(fleet, "nobody who was sent the matched text can serve", "gone")
        best = self._least_of(owners)
        mean = sum(replica.in_flight for replica in fleet) / len(fleet)
        options = self.options
        if best.in_flight > mean * options.balance_rel_threshold and (
            best.in_flight > mean + options.balance_abs_threshold
        ):
            return self._least(fleet, f"{best.name} matches with {best.in_flight} in flight, mean {mean:.1f}", "gated")
        reason = f"least loaded of {count(len(owners), 'owner')} of the matched {rate:.0%} of the text"
        return Decision(best.name, reason, "match", None, _believed(rate, turn.prompt))

    def observe(self, event: Observation) -> None:
        self._index.observe(event)
        if isinstance(event, Dispatched):
            self._processed[event.replica] = self._processed.get(event.replica, 0) + 1
            if self.options.use_kv_events:
                return
        elif isinstance(event, ReplicaRemoved):
            self._processed.pop(event.replica, None)
        super().observe(event)

    def index_size(self) -> int:
        return self._index.held_blocks() if self.options.use_kv_events else super().index_size()

    def _by_events(self, turn: TurnView, fleet: FleetView) -> Decision:
        if turn.prompt is None:
            return self._least(fleet, "prompt not tokenised", "no-tokens")
        keys = PrefixKeys(turn.prompt.block_hashes(self.block_size))
        matched = self._index.match(keys)
        most = max((matched.get(replica.name, 0) for replica in fleet), default=0)
        if not most:
            return self._least(fleet, "no block is resident anywhere", "miss")
        best = self._least_of([replica for replica in fleet if matched.get(replica.name, 0) == most])
        return Decision(
            best.name, f"most blocks resident: {most} of {len(keys)}", "match", None, most * self.block_size
        )

    def _least_of(self, replicas: list[ReplicaView]) -> ReplicaView:
        fewest = min(replica.in_flight for replica in replicas)
        return break_tie([replica for replica in replicas if replica.in_flight == fewest], "random", self.rng)

    def _least(self, fleet: FleetView, why: str, rule: str) -> Decision:
        best = min(fleet, key=lambda replica: (replica.in_flight, self._processed.get(replica.name, 0)))
        return Decision(best.name, f"{why}; fewest in flight: {best.in_flight}", rule)


class VllmCacheAwareOptions(CacheAwareOptions, frozen=True):
    """Defaults of vllm-router 0.1.17's `cache_aware`.

    - `cache_threshold`: a match must be more than this share of the prompt to count.
    - `balance_abs_threshold`: loads that differ by more than this number, and by more than the factor too, are out of
      balance, and then load alone decides.
    - `balance_rel_threshold`: that factor.
    - `eviction_interval_secs`: how often the tree is cut down.
    - `max_tree_size`: characters of one replica that it is cut down to, eight for a token.
    """

    eviction_interval_secs: float = 120.0
    max_tree_size: int = 33_554_432


class VllmCacheAware(_TreePolicy):
    about = "vllm-router's cache_aware: least loaded of the longest token histories, unless out of balance"
    believes = (
        "A replica holds the token sequences that it was sent, each replica matched by itself. "
        "Load is this router's own requests in flight."
    )
    source = "vllm-project/router 0.1.17, src/policies/cache_aware.rs and src/backend/preprocess.rs"
    fails = (
        "A request that nobody tokenised goes by load and is not remembered: one slow engine is enough there. "
        "Ties go to one replica, so unrelated prompts one by one all meet there. The belief outlives the blocks."
    )
    Options = VllmCacheAwareOptions
    index_unit = "tokens"
    needs = frozenset({Signal.TOKENS})

    def text_of(self, prompt: Prompt | None) -> str:
        if prompt is None or not prompt.tokens:
            return ""
        return namespace_of(prompt) + token_text(prompt.token_ids())

    def chars_max(self) -> int:
        return super().chars_max() // VLLM_CHARS_PER_TOKEN

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        options = self.options
        history = self.text_of(turn.prompt)
        self._text = (turn.request_id, history)
        if not history:
            return self.by_load(fleet, "prompt not tokenised", "no-tokens")
        if imbalanced(fleet, options.balance_abs_threshold, options.balance_rel_threshold):
            return self.by_load(fleet, "loads are out of balance", "imbalanced")
        matched = self._tree.match_each(history)
        most = max(matched.get(replica.name, 0) for replica in fleet)
        rate = most / len(history)
        if rate <= options.cache_threshold:
            return self.by_load(fleet, f"match {rate:.0%} is too short", "miss")
        tied = [replica for replica in fleet if matched.get(replica.name, 0) == most]
        best = least_loaded(tied, self._order)
        reason = f"was sent the first {most} of {len(history)} tokens, {best.in_flight} in flight"
        scores = {replica.name: matched.get(replica.name, 0) / len(history) for replica in fleet}
        return Decision(best.name, reason, "match" if len(tied) == 1 else "tie", scores, most)
