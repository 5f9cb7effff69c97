"""llm-d's endpoint picker as two ready profiles: `llmd-approx-prefix`, `llmd-precise-prefix`.

A profile is a list of filters, one of weighted scorers, and a picker; both policies take any of them, and differ in the
scorers that they start from. total = sum of weight * score cut to 0..1; the picker takes the highest, ties at random,
or draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from routers.config import Options
from routers.errors import NoReplica, OptionError
from routers.policies.base import BasePolicy
from routers.policies.filters import FilterOptions, make_filters
from routers.policies.scorer_base import Look, ScorerOptions
from routers.policies.scorers import make_scorers
from routers.view import Decision, Dispatched, FleetView, Observation, ReplicaView, Signal, TurnView


class LlmdApproxPrefixOptions(Options, frozen=True):
    """llm-d-inference-scheduler at 520af47: its default profile.

    - `scorers`: list of {scorer, weight, ...} out of prefix-cache, precise-prefix, kv-cache-utilization, queue-depth,
      running-requests, load-aware, active-request, token-load, session-affinity, lora-affinity and no-hit-lru; what
      else each reads stands at `routers.policies.scorer_base.ScorerOptions`.
    - `filters`: list of {filter, ...} out of utilization, concurrency and prefix-cache-affinity, which take replicas
      out before they are scored; what each reads stands at `routers.policies.filters.FilterOptions`.
    - `shed_saturated`: turn a request of negative priority away while the pool is saturated: mean of the larger of
      queue / 5 and KV usage / 0.8, at least 1 [on there, by the priority of an InferenceObjective; here it is the
      body's `priority`, which vLLM reads the other way round, so it is off].
    - `picker`: `max-score` takes the highest total, ties at random; `weighted-random` draws by U^(1/total).
    """

    scorers: tuple[ScorerOptions, ...] = (
        ScorerOptions(scorer="queue-depth", weight=2),
        ScorerOptions(scorer="kv-cache-utilization", weight=2),
        ScorerOptions(scorer="prefix-cache", weight=3),
    )
    filters: tuple[FilterOptions, ...] = ()
    shed_saturated: bool = False
    picker: Literal["max-score", "weighted-random"] = "max-score"

    def __post_init__(self) -> None:
        if not self.scorers:
            raise OptionError('scorers=[] leaves nothing to score by: give at least one, as {scorer = "queue-depth"}')


class LlmdApproxPrefix(BasePolicy):
    about = "llm-d's default profile: queue, KV usage and the prefixes it sent before, weighed and summed"
    believes = (
        "A replica holds the last 31,250 blocks that it was sent. Queue and KV usage are the engines' gauges as last "
        "polled."
    )
    source = "llm-d/llm-d-inference-scheduler 520af47, pkg/epp/framework/plugins"
    fails = (
        "Polled gauges are old: a wave that arrives between two polls lands on one replica. Blocks count without "
        "those before them, and evictions in the engine are not heard of."
    )
    Options = LlmdApproxPrefixOptions

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._scorers = make_scorers(self.options.scorers)
        self._filters = make_filters(self.options.filters, rng)
        needs = {Signal.ENGINE_METRICS} if self.options.shed_saturated else set()
        self.needs = frozenset(needs).union(
            *(scorer.needs for scorer in self._scorers), *(one.needs for one in self._filters)
        )
        self._look: Look | None = None
        # A filter that reads matches needs them before anybody is scored.
        self._matcher = next((scorer for scorer in self._scorers if scorer.matches), None)
        if self._matcher is None and any(one.matches for one in self._filters):
            raise OptionError(
                "a prefix-cache-affinity filter needs a match to go by: add the scorer prefix-cache or precise-prefix"
            )

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        look = self._look = Look(turn, fleet, self.block_size)
        if self.options.shed_saturated and turn.priority < 0 and saturation(fleet) >= 1.0:
            raise NoReplica("the pool is saturated and the request's priority is negative: send it later")
        if self._filters:
            fleet = look.fleet = self._kept(look)
        totals = dict.fromkeys((replica.name for replica in fleet), 0.0)
        parts: list[tuple[str, dict[str, float]]] = []
        for scorer in self._scorers:
            scores = scorer.score(look)
            parts.append((scorer.options.scorer, scores))
            for name in totals:
                totals[name] += scorer.options.weight * min(1.0, max(0.0, scores[name]))
        name, rule = self._pick(totals)
        detail = ", ".join(f"{scorer} {scores[name]:.2f}" for scorer, scores in parts)
        believed = None
        if look.hit_blocks is not None and turn.prompt is not None:
            believed = look.hit_blocks.get(name, 0) * self.block_size
        return Decision(name, f"total {totals[name]:.2f}: {detail}", rule, totals, believed)

    def _kept(self, look: Look) -> FleetView:
        replicas: Sequence[ReplicaView] = look.fleet.replicas
        if self._matcher is not None and any(one.matches for one in self._filters):
            self._matcher.score(look)
        for one in self._filters:
            replicas = one.keep(replicas, look)
            if not replicas:
                raise NoReplica(
                    f"filter {one.options.filter!r} lets no replica pass: send it later, or raise its limit"
                )
        return look.fleet.narrowed(replicas)

    def observe(self, event: Observation) -> None:
        look = None
        if isinstance(event, Dispatched):
            if self._look is not None and self._look.turn.request_id == event.request_id:
                look = self._look
            else:  # placed by somebody else
                look = Look(event.turn, FleetView([]), self.block_size)
            self._look = None
        for scorer in self._scorers:
            scorer.observe(event, look)

    def index_size(self) -> int | None:
        sizes = [size for scorer in self._scorers if (size := scorer.index_size()) is not None]
        return sum(sizes) if sizes else None

    def _pick(self, totals: dict[str, float]) -> tuple[str, str]:
        names = list(totals)
        if self.options.picker == "weighted-random":
            if not any(totals.values()):
                return names[self.rng.randrange(len(names))], "draw"
            keys = {name: self.rng.random() ** (1.0 / total) if total else -1.0 for name, total in totals.items()}
            return max(names, key=lambda name: keys[name]), "draw"
        best = max(totals.values())
        tied = [name for name in names if totals[name] == best]
        if len(tied) == 1:
            return tied[0], "score"
        return tied[self.rng.randrange(len(tied))], "tie"


def saturation(fleet: FleetView) -> float:
    """Mean over the pool of the larger of queue / 5 and KV usage / 0.8; gauges that are absent or older than 200 ms
    count as 1, and so does an empty pool (llm-d's utilization detector)."""
    if not len(fleet):
        return 1.0
    total = 0.0
    for view in fleet:
        fresh = view.metrics is not None and fleet.now_us - view.metrics.at_us <= 200_000
        total += max(view.metrics.waiting / 5, view.metrics.kv_usage / 0.8) if fresh and view.metrics else 1.0
    return total / len(fleet)


class LlmdPrecisePrefixOptions(LlmdApproxPrefixOptions, frozen=True):
    """llm-d-inference-scheduler at 520af47: the sample configuration for precise prefix caching.

    - `scorers`: as in `llmd-approx-prefix`.
    """

    scorers: tuple[ScorerOptions, ...] = (
        ScorerOptions(scorer="precise-prefix", weight=2),
        ScorerOptions(scorer="kv-cache-utilization", weight=1),
        ScorerOptions(scorer="queue-depth", weight=1),
    )


class LlmdPrecisePrefix(LlmdApproxPrefix):
    about = "llm-d with the engines' KV events: cached share of the prompt 2, KV usage 1, queue 1, weighed and summed"
    believes = "The engines' KV events say what each replica holds. Queue and KV usage are the gauges as last polled."
    source = "llm-d/llm-d-inference-scheduler 520af47 and llm-d/llm-d-kv-cache-manager a378f5b"
    fails = (
        "Prefill that is owed already is not seen, only the polled queue: a burst of one prefix herds on its holder. "
        "Scores are shares, so a long prompt's cached thousand tokens weigh less than a short one's hundred."
    )
    Options = LlmdPrecisePrefixOptions
