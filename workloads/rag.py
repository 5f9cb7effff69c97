"""The workload `rag`: questions behind chunks of one shared corpus, in an order that differs from request to request.

Popular chunks come often, yet a prefix cache reuses only leading text: two requests with the same chunks in another
order share nothing beyond the system prompt. `chunk_order = "ranked"` puts the more popular first, which is what an
application can do about it.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import ClassVar, Literal

from workloads.distributions import Length, largest
from workloads.limits import (
    ANY,
    CHUNKS_MAX,
    CORPUS_CHUNKS_MAX,
    RETRIEVED_CHUNKS_MAX,
    SESSIONS_MAX,
    SOME,
    Whole,
    at_least,
    shown,
)
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable

REPEATS_MAX = 32
"""So many draws in a row that bring nothing new say that most of what is drawn is taken. Retrieving a few chunks of
hundreds by a law that is not steep does not come to it."""


class Rag(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "rag"`."""

    kind: ClassVar[str] = "rag"

    requests: int = 256
    corpus_chunks: int = 400
    """Chunks in the corpus."""
    chunk_tokens: Length = 512
    """Length of a chunk, drawn once a chunk."""
    chunks_per_request: Length = 6
    """Different chunks in a prompt; a spread one stands for retrieval down to a score instead of a rank."""
    popularity: float = 1.0
    """Exponent of the Zipf law by which chunks are drawn; 0: all alike."""
    chunk_order: Literal["drawn", "ranked"] = "drawn"
    """drawn: as retrieved, most often another order; ranked: more popular first."""
    system_prompt_tokens: Length = 256
    """In front of every request, the same for all, so a spread one is drawn once; 0: none."""
    question_tokens: Length = 64
    output_tokens: Length = 256

    def __post_init__(self) -> None:
        at_least("requests", self.requests, 1, SESSIONS_MAX)
        at_least("corpus_chunks", self.corpus_chunks, 1, CORPUS_CHUNKS_MAX)
        if not 0 <= self.popularity <= 5:
            raise ValueError(f"popularity = {self.popularity:g}: give an exponent from 0 (all alike) to 5")
        super().__post_init__()
        most, where = largest(self.chunks_per_request)
        if self.requests * most > RETRIEVED_CHUNKS_MAX:
            raise ValueError(
                f"requests x chunks_per_request = {shown(self.requests * most)}{where}: at most "
                f"{RETRIEVED_CHUNKS_MAX:,} chunks can be drawn, one after the other; ask for fewer"
            )

    def lengths(self) -> Mapping[str, Whole]:
        chunks = Whole(1, CHUNKS_MAX)
        if self.corpus_chunks < CHUNKS_MAX:
            few = f"the corpus has {self.corpus_chunks} chunks (corpus_chunks) and a prompt holds none twice; lower it"
            chunks = Whole(1, self.corpus_chunks, few)
        return {
            "chunk_tokens": SOME,
            "chunks_per_request": chunks,
            "system_prompt_tokens": ANY,
            "question_tokens": SOME,
            "output_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.requests

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, corpus = (streams[f"workloads.{name}"] for name in ("spans", "session_ids", "corpus"))
        retrieval = streams["workloads.retrieval"]
        length, count, question, output = (
            self.sampler(name, streams)
            for name in ("chunk_tokens", "chunks_per_request", "question_tokens", "output_tokens")
        )
        system: tuple[Span, ...] = ()
        if system_tokens := self.sampler("system_prompt_tokens", streams)():
            system = ((corpus.getrandbits(SPAN_ID_BITS), system_tokens),)
        chunks: list[Span] = [(corpus.getrandbits(SPAN_ID_BITS), length()) for _ in range(self.corpus_chunks)]
        ranks = _Zipf(self.corpus_chunks, self.popularity)
        for number in range(self.requests):
            taken = ranks.draw(count(), retrieval)
            picked = sorted(taken) if self.chunk_order == "ranked" else taken
            asked = (spans.getrandbits(SPAN_ID_BITS), question())
            yield Session(
                session_id=f"q{number:06d}-{ids.getrandbits(32):08x}",
                turns=(
                    Turn(
                        0,
                        (*system, *(chunks[chunk] for chunk in picked), asked),
                        (spans.getrandbits(SPAN_ID_BITS), output()),
                    ),
                ),
                group="corpus",
            )


class _Zipf:
    """Different ranks from 0 on, drawn one after the other with a weight of `(rank + 1) ** -exponent`.

    A rank that was drawn already is drawn again, which costs most where a prompt takes most of a corpus or the law is
    steep. There `_draw_free` goes on; it changes no chance.
    """

    def __init__(self, count: int, exponent: float) -> None:
        self._weights = [(rank + 1) ** -exponent for rank in range(count)]
        self._sums = list(accumulate(self._weights))
        self._rest = list(accumulate(reversed(self._weights)))
        """Sums from the last rank on, which keep what a sum from the first loses: the weight of a steep law's tail."""

    def draw(self, count: int, rng: random.Random) -> list[int]:
        taken: dict[int, None] = {}
        sums, weight, last = self._sums, self._sums[-1], len(self._sums) - 1
        repeats = 0
        while len(taken) < count:
            rank = min(bisect(sums, rng.random() * weight), last)
            if rank not in taken:
                taken[rank] = None
                repeats = 0
                continue
            repeats += 1
            if repeats == REPEATS_MAX:
                self._draw_free(count, taken, rng)
        return list(taken)

    def _draw_free(self, count: int, taken: dict[int, None], rng: random.Random) -> None:
        """Draws the ranks that are missing, of a law without those that were taken among the first `2 n`, when n are
        taken. A new law is made when repeats have cost about as much as making it."""
        rest, last, first = self._rest, len(self._rest) - 1, 0
        while len(taken) < count:
            while first in taken:
                first += 1
            end = min(2 * len(taken), last + 1)
            free = [rank for rank in range(end - 1, first - 1, -1) if rank not in taken]
            beyond = rest[last - end] if end <= last else 0.0
            sums = list(accumulate(map(self._weights.__getitem__, free), initial=beyond))
            weight, repeats_left = sums[-1], (REPEATS_MAX + len(taken)) // 4
            while repeats_left and len(taken) < count:
                at = rng.random() * weight
                place = min(bisect(sums, at), len(free))
                rank = free[place - 1] if place else last - bisect(rest, at, 0, last - end)
                if rank in taken:
                    repeats_left -= 1
                else:
                    taken[rank] = None
