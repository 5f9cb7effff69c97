"""Filters of llm-d's endpoint picker: each takes replicas out before the rest are scored, in the profile's order.

The odd thing: what a filter does when nobody passes differs. The saturation filter then lets everybody pass, the
concurrency filter nobody, which is an error for the request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from routers.config import at_least
from routers.errors import OptionError
from routers.policies.scorer_base import Look
from routers.view import ReplicaView, Signal


class FilterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a profile's `filters`. Only the named filter reads an option that is its own; defaults are llm-d's.

    - `filter`: its name.
    - `queue_threshold`, `kv_threshold`, `headroom`, `stale_s`: `utilization`: a replica passes with fewer waiting
      requests and less KV usage than these times 1 + headroom, by gauges no older than that.
    - `max_requests`, `max_tokens`: `concurrency`: a replica passes with fewer requests in flight; with `max_tokens`
      set, with fewer prompt tokens in flight instead (llm-d: 1,000,000).
    - `threshold`, `exploration`: `prefix-cache-affinity`: share of the prompt that a match needs, and share of requests
      for which all pass nevertheless.
    """

    filter: str
    queue_threshold: float = 5.0
    kv_threshold: float = 0.8
    headroom: float = 0.0
    stale_s: float = 0.2
    max_requests: int = 100
    max_tokens: int | None = None
    threshold: float = 0.8
    exploration: float = 0.01

    def __post_init__(self) -> None:
        at_least(
            0,
            queue_threshold=self.queue_threshold,
            kv_threshold=self.kv_threshold,
            headroom=self.headroom,
            stale_s=self.stale_s,
            threshold=self.threshold,
            exploration=self.exploration,
        )
        at_least(1, max_requests=self.max_requests, max_tokens=1 if self.max_tokens is None else self.max_tokens)


class Filter:
    """Base: takes nobody out. `matches`: reads what prefix scorers matched, so one of them must be in the profile."""

    needs: ClassVar[frozenset[Signal]] = frozenset()
    reads: ClassVar[tuple[str, ...]] = ()
    matches: ClassVar[bool] = False

    def __init__(self, options: FilterOptions, rng: random.Random) -> None:
        self.options = options
        self.rng = rng

    def keep(self, replicas: Sequence[ReplicaView], look: Look) -> Sequence[ReplicaView]:
        return replicas


class UtilizationFilter(Filter):
    """`utilization`: the saturation detector's: takes out who waits too much, is too full, or was not heard of lately;
    when that is everybody, all pass."""

    needs = frozenset({Signal.ENGINE_METRICS})
    reads = ("queue_threshold", "kv_threshold", "headroom", "stale_s")

    def keep(self, replicas: Sequence[ReplicaView], look: Look) -> Sequence[ReplicaView]:
        options, now_us = self.options, look.fleet.now_us
        room = 1.0 + options.headroom
        kept = [
            view
            for view in replicas
            if view.metrics is not None
            and now_us - view.metrics.at_us <= round(1e6 * options.stale_s)
            and view.metrics.waiting < options.queue_threshold * room
            and view.metrics.kv_usage < options.kv_threshold * room
        ]
        return kept or replicas


class ConcurrencyFilter(Filter):
    """`concurrency`: takes out who has too many of this router's requests in flight, everybody if need be."""

    reads = ("max_requests", "max_tokens")

    def keep(self, replicas: Sequence[ReplicaView], look: Look) -> Sequence[ReplicaView]:
        most = self.options.max_tokens
        if most is not None:
            return [view for view in replicas if view.in_flight_tokens < most]
        return [view for view in replicas if view.in_flight < self.options.max_requests]


class PrefixCacheAffinityFilter(Filter):
    """`prefix-cache-affinity`: keeps those that match enough of the prompt, if anybody does. llm-d also lets all pass
    when the best predicted TTFT among them is 5 s worse; nothing predicts TTFT here."""

    reads = ("threshold", "exploration")
    matches = True

    def keep(self, replicas: Sequence[ReplicaView], look: Look) -> Sequence[ReplicaView]:
        kept = [view for view in replicas if look.matched.get(view.name, 0.0) >= self.options.threshold]
        if not kept or len(kept) == len(replicas):
            return replicas
        return replicas if self.rng.random() < self.options.exploration else kept


FILTERS: dict[str, type[Filter]] = {
    "utilization": UtilizationFilter,
    "concurrency": ConcurrencyFilter,
    "prefix-cache-affinity": PrefixCacheAffinityFilter,
}
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(FilterOptions) if field.name != "filter"}


def make_filters(entries: Sequence[FilterOptions], rng: random.Random) -> list[Filter]:
    """Raises OptionError for a name that is none, or an option that its filter does not read."""
    return [_make(entry, rng) for entry in entries]


def _make(entry: FilterOptions, rng: random.Random) -> Filter:
    kind = FILTERS.get(entry.filter)
    if kind is None:
        raise OptionError(f"no filter named {entry.filter!r}: choose one of {', '.join(FILTERS)}")
    for name, default in _DEFAULTS.items():
        if name not in kind.reads and getattr(entry, name) != default:
            raise OptionError(f"filter {entry.filter!r} has no option {name!r}: it reads {', '.join(kind.reads)}")
    return kind(entry, rng)
