"""llm-d's endpoint picker as two ready profiles: `llmd-approx-prefix`, `llmd-precise-prefix`.

A profile is a list of weighted scorers and a picker; both policies take any scorer, and differ in the list that they
start from. total = sum of weight * score cut to 0..1; the picker takes the highest, ties at random, or draws.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from routers.config import Options
from routers.errors import OptionError
from routers.policies.base import BasePolicy
from routers.policies.scorers import Look, ScorerOptions, make_scorers
from routers.view import Decision, Dispatched, FleetView, Observation, TurnView


class LlmdApproxPrefixOptions(Options, frozen=True):
    """llm-d-inference-scheduler at 520af47: its default profile.

    - `scorers`: list of {scorer, weight, ...}; queue depth 2, KV utilisation 2 and approximate prefix 3 unless given.
      `routers.policies.scorers` names all of them and what else each reads.
    - `picker`: `max-score` takes the highest total, ties at random; `weighted-random` draws by U^(1/total).
    """

    scorers: tuple[ScorerOptions, ...] = (
        ScorerOptions(scorer="queue-depth", weight=2),
        ScorerOptions(scorer="kv-cache-utilization", weight=2),
        ScorerOptions(scorer="prefix-cache", weight=3),
    )
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
        self.needs = frozenset(signal for scorer in self._scorers for signal in scorer.needs)
        self._look: Look | None = None

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        look = self._look = Look(turn, fleet, self.block_size)
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


class LlmdPrecisePrefixOptions(LlmdApproxPrefixOptions, frozen=True):
    """llm-d-inference-scheduler at 520af47: the sample configuration for precise prefix caching.

    - `scorers`: as in `llmd-approx-prefix`; precise prefix 2, KV utilisation 1 and queue depth 1 unless given.
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
