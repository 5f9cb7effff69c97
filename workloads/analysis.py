"""What a workload or a trace holds for a prefix cache, before anything runs: one pass over its requests.

Requests are taken in the order in which drivers would send them (`order`), each at once with its answer, and counted
in whole blocks. A request's text is its prompt and all of its answer but the last token, as a cache would hold it; of
a prompt the last token is never a hit. Nothing is laid out as tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workloads.blocks import block_keys
from workloads.order import Sent, requests_in_order
from workloads.spans import prompt_tokens
from workloads.stack_distance import StackDistances
from workloads.streams import Streams
from workloads.table import WorkloadTable
from workloads.traces.rows import digest
from workloads.value import Verdict, verdict

REPLICAS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Dilution:
    """Requests placed at random on some replicas, each with a cache that never evicts."""

    replicas: int
    hit_rate: float
    """Expected cached share of prompt tokens: a block that m earlier requests had is on the replica with the chance
    1 - (1 - 1/N)^m."""
    rule_of_thumb: float
    """hit_rate of one cache, divided by N: exact when every prefix was seen once before."""


@dataclass(frozen=True, slots=True)
class SharedLengths:
    """Requests whose longest prefix in common with a recent one has so many tokens."""

    low: int
    high: int
    """Both included, whole blocks; 0 and 0 for those that share no block."""
    requests: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """Figures of one workload; shares are from 0 to 1."""

    requests: int
    sessions: int
    distinct_prompts: int
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_median: float
    block_size: int
    min_prefix_tokens: int
    window_requests: int
    sharing_requests: int
    """Requests that begin with at least `min_prefix_tokens` of one of the last `window_requests` requests' text."""
    shared_tokens_mean: float | None
    """Mean length of the longest such prefix, over these; None without any."""
    shared_fraction_mean: float | None
    """The same as a share of the prompt."""
    shared_lengths: tuple[SharedLengths, ...]
    """Every request by its shared length; each bin but the first goes to twice its lowest length."""
    hit_rate: float
    """Cached share of prompt tokens in one cache that never evicts: the ceiling."""
    distinct_blocks: int
    """Blocks that such a cache ends with."""
    cache_blocks: tuple[int, ...]
    cache_hit_rates: tuple[float, ...]
    """Hit rate of one LRU cache by its size; grows with size, never above `hit_rate`."""
    dilution: tuple[Dilution, ...]

    @property
    def sharing(self) -> float:
        """Share of requests that share."""
        return self.sharing_requests / self.requests if self.requests else 0.0

    def verdict(self, replicas: int, prefill_fraction: float, blocks_per_replica: int | None = None) -> Verdict:
        """Whether routing on prefixes pays for that many replicas, when so much of the GPU's time is prefill.

        In the formula's terms: the shared part of a prompt is what one endless cache would serve of all prompt tokens;
        achievable is how much of that the fleet's caches together hold (all of it when their size is not given), the
        baseline how much of it random placement finds.
        """
        diluted = next((d.hit_rate for d in self.dilution if d.replicas == replicas), None)
        if diluted is None:
            known = ", ".join(str(d.replicas) for d in self.dilution)
            raise ValueError(f"replicas = {replicas}: the analysis was made for {known}; make it again with this one")
        best = self.hit_rate
        if blocks_per_replica is not None:
            best = min(best, float(np.interp(replicas * blocks_per_replica, self.cache_blocks, self.cache_hit_rates)))
        return verdict(
            replicas=replicas,
            prefill_fraction=prefill_fraction,
            achievable=_share_of(best, self.hit_rate),
            baseline=_share_of(min(best, diluted), self.hit_rate),
            shared_fraction=min(1.0, self.hit_rate),
            sharing=self.sharing,
            min_prefix_tokens=self.min_prefix_tokens,
            prompt_tokens_median=self.prompt_tokens_median,
            turns_a_session=self.requests / self.sessions if self.sessions else 1.0,
        )


def _share_of(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def analyze(
    workload: WorkloadTable,
    streams: Streams,
    *,
    block_size: int = 16,
    min_prefix_tokens: int = 256,
    window_requests: int = 1000,
    replicas: Sequence[int] = REPLICAS,
    concurrency: int = 16,
    cache_blocks: Sequence[int] | None = None,
    requests_max: int | None = None,
) -> Analysis:
    """Reads the workload once. 256 tokens are what the seed of this analysis calls worth routing for.

    `concurrency` slots interleave closed-loop sessions. `cache_blocks`: sizes of the curve; by default powers of two up
    to the size that holds everything. Memory grows with different blocks; `requests_max` stops early.
    """
    for name, value in (("block_size", block_size), ("window_requests", window_requests)):
        if value < 1:
            raise ValueError(f"{name} = {value}: at least 1 is needed")
    if min_prefix_tokens < block_size:
        raise ValueError(f"min_prefix_tokens = {min_prefix_tokens} is less than one block of {block_size}: raise it")
    if not replicas or min(replicas) < 1:
        raise ValueError(f"replicas = {tuple(replicas)}: give numbers of at least 1")
    walk = _Walk(block_size, min_prefix_tokens, window_requests, sorted({1, *replicas}))
    for number, sent in enumerate(requests_in_order(workload.sessions(streams), concurrency)):
        if number == requests_max:
            break
        walk.take(sent)
    return walk.result(cache_blocks)


class _Walk:
    def __init__(self, block_size: int, min_prefix: int, window: int, replicas: list[int]) -> None:
        self._size, self._min_prefix, self._window, self._replicas = block_size, min_prefix, window, replicas
        self._distances = StackDistances()
        self._seen = np.zeros(1 << 12, dtype=np.int64)
        """How many requests had each block."""
        self._last = np.zeros(1 << 12, dtype=np.int64)
        """The last request that had it."""
        self._lengths = array("q")
        self._prompts: set[int] = set()
        self._sessions = self._outputs = self._sharing = self._hits = 0
        self._shared_sum = self._fraction_sum = 0.0
        self._shared_bins: Counter[int] = Counter()
        """By the bits of the number of shared blocks."""
        self._expected = np.zeros(len(replicas))
        self._miss = np.array([1 - 1 / n for n in replicas])

    def take(self, sent: Sent) -> None:
        size, number = self._size, len(self._lengths)
        prompt, answer, salt = sent.prompt, sent.turn.output, sent.session.cache_salt
        length = prompt_tokens(prompt)
        keys = block_keys((*prompt, (answer[0], answer[1] - 1)), size, 0 if salt is None else digest(salt)).tolist()
        self._lengths.append(length)
        self._outputs += answer[1]
        self._sessions += sent.turn.index == 0
        self._prompts.add(int(block_keys(prompt, length)[0]))  # the prompt as one block
        hits, slots = self._distances.request(keys, (length - 1) // size)
        self._hits += hits
        self._grow()
        seen = self._seen[slots[: length // size]]
        known = int(np.count_nonzero(seen))
        if known:
            self._expected += (1 - self._miss[:, None] ** seen[None, :hits]).sum(axis=1)
        self._share(self._last[slots[:known]], number, length)
        self._seen[slots] += 1
        self._last[slots] = number

    def _grow(self) -> None:
        if self._distances.distinct > len(self._seen):
            more = np.zeros(self._distances.distinct, dtype=np.int64)
            self._seen, self._last = np.concatenate((self._seen, more)), np.concatenate((self._last, more))

    def _share(self, last: npt.NDArray[np.int64], number: int, length: int) -> None:
        old = np.flatnonzero(last < number - self._window)
        blocks = int(old[0]) if len(old) else len(last)
        self._shared_bins[blocks.bit_length()] += 1
        shared = blocks * self._size
        if shared >= self._min_prefix:
            self._sharing += 1
            self._shared_sum += shared
            self._fraction_sum += shared / length

    def result(self, cache_blocks: Sequence[int] | None) -> Analysis:
        requests, total = len(self._lengths), sum(self._lengths)
        per_token = self._size / total if total else 0.0
        distinct = self._distances.distinct
        if cache_blocks is None:
            cache_blocks = [1 << power for power in range(4, max(distinct, 16).bit_length() + 1)]
        sizes, hits = self._distances.curve()
        rates = np.interp(np.array(cache_blocks, dtype=np.float64), sizes, hits) * per_token
        ceiling = self._hits * per_token
        return Analysis(
            requests=requests,
            sessions=self._sessions,
            distinct_prompts=len(self._prompts),
            prompt_tokens=total,
            output_tokens=self._outputs,
            prompt_tokens_median=float(np.median(np.array(self._lengths))) if requests else 0.0,
            block_size=self._size,
            min_prefix_tokens=self._min_prefix,
            window_requests=self._window,
            sharing_requests=self._sharing,
            shared_tokens_mean=self._shared_sum / self._sharing if self._sharing else None,
            shared_fraction_mean=self._fraction_sum / self._sharing if self._sharing else None,
            shared_lengths=tuple(
                SharedLengths(self._size << bits >> 1, self._size * ((1 << bits) - 1), self._shared_bins[bits])
                if bits
                else SharedLengths(0, 0, self._shared_bins[0])
                for bits in range(max(self._shared_bins, default=-1) + 1)
            ),
            hit_rate=ceiling,
            distinct_blocks=distinct,
            cache_blocks=tuple(int(size) for size in cache_blocks),
            cache_hit_rates=tuple(float(rate) for rate in rates),
            dilution=tuple(
                Dilution(
                    replicas=n,
                    hit_rate=float(self._expected[i]) * per_token,
                    rule_of_thumb=ceiling / n,
                )
                for i, n in enumerate(self._replicas)
            ),
        )
