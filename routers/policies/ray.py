"""`ray-prefix-affinity`: Ray Serve LLM's `PrefixCacheAffinityRouter` (2.60), a guess from the text that was sent.

One prefix tree of prompts, in characters, says which replicas were sent what. Four branches, in this order: the
queues differ too much, the match is too short, the match is long enough, and a power-of-two pair for whatever the
others leave open. The odd thing, and theirs: the pair is drawn before anything else, whether it is needed or not.

In Ray a prompt enters the tree when the replica has accepted it; here it does at the decision, one round trip sooner.
"""

from __future__ import annotations

import random
from typing import Any

from routers.config import Options, at_least
from routers.policies.base import BasePolicy, count
from routers.policies.load import PowerOfTwo
from routers.tree import PrefixTree
from routers.view import (
    Decision,
    Dispatched,
    FleetView,
    Observation,
    ReplicaAdded,
    ReplicaRemoved,
    Signal,
    TurnView,
)


class RayPrefixAffinityOptions(Options, frozen=True):
    """Names and defaults of Ray 2.60's `PrefixCacheAffinityRouter`.

    - `imbalanced_threshold`: a larger difference between the longest and the shortest queue sends a request to the
      pair, its prefix unread; unset is Ray's infinity, that is never.
    - `match_rate_threshold`: a smaller matched share of the prompt's characters goes to the replicas that were sent
      the least text.
    - `do_eviction`: whether old text is forgotten at all.
    - `eviction_threshold_chars`: size above which a replica's text is cut down.
    - `eviction_target_chars`: size it is cut down to.
    - `eviction_interval_secs`: how often that is looked at.
    """

    imbalanced_threshold: float | None = None
    match_rate_threshold: float = 0.1
    do_eviction: bool = False
    eviction_threshold_chars: int = 400_000
    eviction_target_chars: int = 360_000
    eviction_interval_secs: float = 10.0

    def __post_init__(self) -> None:
        at_least(
            0,
            imbalanced_threshold=self.imbalanced_threshold or 0,
            match_rate_threshold=self.match_rate_threshold,
            eviction_threshold_chars=self.eviction_threshold_chars,
            eviction_target_chars=self.eviction_target_chars,
            eviction_interval_secs=self.eviction_interval_secs,
        )


class RayPrefixAffinity(BasePolicy):
    about = "Ray's prefix router: owners of the longest text match, else least text, else power of two"
    believes = (
        "A replica holds what it was sent, for ever unless eviction is on. Load is this router's own count of "
        "requests in flight, and decides only among replicas that match alike."
    )
    source = "ray-project/ray 2.60.0, llm/_internal/serve/routing_policies/prefix_aware"
    fails = (
        "Prompts sent as token ids have no text and go to the pair. With the default threshold no queue is ever too "
        "long, so a shared beginning above a tenth of the prompt herds. The belief outlives the engine's blocks."
    )
    Options = RayPrefixAffinityOptions
    needs = frozenset({Signal.TEXT})
    text_join = ""
    index_unit = "characters"

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._two = PowerOfTwo(rng=rng, block_size=block_size)
        self._tree = PrefixTree()
        self._stamp = 0
        self._evicted_us = 0
        self._last: tuple[str, str] = ("", "")  # request and text of the decision whose Dispatched follows

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        pair = self._two.choose(turn, fleet)
        text = turn.prompt.text() or "" if turn.prompt is not None else ""
        self._last = (turn.request_id, text)
        if not text:
            return Decision(pair.replica, f"no text; {pair.reason}", "no-text")
        queues = [replica.in_flight for replica in fleet]
        spread, threshold = max(queues) - min(queues), self.options.imbalanced_threshold
        if threshold is not None and spread > threshold:
            return Decision(pair.replica, f"queues differ by {spread}; {pair.reason}", "imbalanced")
        owners, matched = self._tree.match_owned(text, [replica.name for replica in fleet])
        rate = matched / len(text)
        if rate < self.options.match_rate_threshold:
            tenants = self._tree.tenants()
            least = min(map(self._tree.chars, tenants), default=0)
            group = [name for name in tenants if self._tree.chars(name) == least and name in fleet]
            reason, rule = f"match {rate:.0%} is too short; least text sent: {least} characters", "smallest"
        else:
            group, reason, rule = owners, f"matches {rate:.0%} of the text", "match"
        if not group:
            return Decision(pair.replica, f"{reason}, by nobody routable; {pair.reason}", "pair")
        best = min(group, key=lambda name: fleet[name].in_flight)  # the first of the shortest queues
        if len(group) > 1:
            reason = f"{reason}, shortest queue of {count(len(group), 'replica')}"
        held = int(rate * turn.prompt.tokens) if turn.prompt is not None and turn.prompt.tokens else None
        return Decision(best, reason, rule, None, held if rule == "match" or held is None else 0)

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            request_id, text = self._last
            if request_id != event.request_id:
                text = event.turn.prompt.text() or "" if event.turn.prompt is not None else ""
            if text:
                self._stamp += 1
                self._tree.insert(text, event.replica, self._stamp, whole_path=True)
            if self.options.do_eviction:
                self._evict(event.at_us)
        elif isinstance(event, ReplicaAdded):
            self._tree.add_tenant(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._tree.remove_tenant(event.replica)

    def index_size(self) -> int:
        return self._tree.total_chars()

    def stats(self) -> dict[str, Any]:
        return {"chars": {name: self._tree.chars(name) for name in self._tree.tenants()}}

    def _evict(self, now_us: int) -> None:
        if now_us - self._evicted_us < round(1e6 * self.options.eviction_interval_secs):
            return
        self._evicted_us = now_us
        for name in self._tree.tenants():
            size = self._tree.chars(name)
            if size > self.options.eviction_threshold_chars:
                self._tree.evict_oldest(name, size - self.options.eviction_target_chars)
