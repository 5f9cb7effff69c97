"""Scorers of llm-d's endpoint picker: each gives every replica a score, which a profile weighs and sums.

Here are those of load, sessions and adapters, and the dict of all; those of caches are in `prefix_scorers`. Scores are
cut to 0..1 by the profile before weighing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from routers.errors import OptionError
from routers.policies.base import kv_usage
from routers.policies.prefix_scorers import NoHitLruScorer, PrecisePrefixScorer, PrefixCacheScorer
from routers.policies.scorer_base import SCORER_DEFAULTS, Look, Scorer, ScorerOptions, Scores
from routers.view import Dispatched, Observation, ReplicaView, Signal


class KvCacheUtilizationScorer(Scorer):
    """`kv-cache-utilization`: 1 minus the engine's KV usage as last polled; 1 for one never heard of."""

    needs = frozenset({Signal.ENGINE_METRICS})

    def score(self, look: Look) -> Scores:
        return {view.name: 1.0 - kv_usage(view) for view in look.fleet}


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


class LoraAffinityScorer(Scorer):
    """`lora-affinity`: 1 where the request's model is an adapter in use as last polled; else 0.8 where one more adapter
    has room, 0.6 where it is waited for, 0 otherwise. Engines that tell of no adapters have room for none."""

    needs = frozenset({Signal.ENGINE_METRICS})

    def score(self, look: Look) -> Scores:
        return {view.name: self._one(look.turn.model, view) for view in look.fleet}

    @staticmethod
    def _one(model: str | None, view: ReplicaView) -> float:
        metrics = view.metrics
        if metrics is None:
            return 0.0
        if model in metrics.adapters_running:
            return 1.0
        if len(metrics.adapters_running) + len(metrics.adapters_waiting) < metrics.adapters_max:
            return 0.8
        return 0.6 if model in metrics.adapters_waiting else 0.0


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
    "lora-affinity": LoraAffinityScorer,
    "no-hit-lru": NoHitLruScorer,
}


def make_scorers(entries: Sequence[ScorerOptions]) -> list[Scorer]:
    """Raises OptionError for a name that is none, or an option that its scorer does not read."""
    return [_make(entry) for entry in entries]


def _make(entry: ScorerOptions) -> Scorer:
    kind = SCORERS.get(entry.scorer)
    if kind is None:
        raise OptionError(f"no scorer named {entry.scorer!r}: choose one of {', '.join(SCORERS)}")
    for name, default in SCORER_DEFAULTS.items():
        if name not in kind.reads and getattr(entry, name) != default:
            raise OptionError(
                f"scorer {entry.scorer!r} has no option {name!r}: it reads {', '.join(kind.reads) or 'none'}"
            )
    return kind(entry)


def _waiting(view: ReplicaView) -> int:
    return view.metrics.waiting if view.metrics is not None else 0


def _spread(values: Mapping[str, int]) -> Scores:
    low, high = min(values.values()), max(values.values())
    return {name: (high - value) / (high - low) if high > low else 1.0 for name, value in values.items()}
