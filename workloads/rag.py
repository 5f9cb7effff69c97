"""The workload `rag`: questions behind chunks of one shared corpus, in an order that differs from request to request.

Popular chunks come often, yet a prefix cache reuses only leading text: two requests with the same chunks in another
order share nothing beyond the system prompt. `chunk_order = "ranked"` puts the more popular first, which is what an
application can do about it.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from typing import ClassVar, Literal

from workloads.distributions import Length, check_length, length_sampler
from workloads.limits import CHUNKS_MAX, CORPUS_CHUNKS_MAX, SESSIONS_MAX, TOKENS_MAX, at_least
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable

REPEATS_MAX = 32


class Rag(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "rag"`."""

    kind: ClassVar[str] = "rag"

    requests: int = 256
    corpus_chunks: int = 400
    """Chunks in the corpus."""
    chunk_tokens: Length = 512
    """Length of a chunk, drawn once a chunk."""
    chunks_per_request: int = 6
    """Different chunks in a prompt."""
    popularity: float = 1.0
    """Exponent of the Zipf law by which chunks are drawn; 0: all alike."""
    chunk_order: Literal["drawn", "ranked"] = "drawn"
    """drawn: as retrieved, most often another order; ranked: more popular first."""
    system_prompt_tokens: int = 256
    """In front of every request, the same for all; 0: none."""
    question_tokens: Length = 64
    output_tokens: Length = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("requests", self.requests, 1, SESSIONS_MAX)
        at_least("corpus_chunks", self.corpus_chunks, 1, CORPUS_CHUNKS_MAX)
        at_least("chunks_per_request", self.chunks_per_request, 1, CHUNKS_MAX)
        if self.chunks_per_request > self.corpus_chunks:
            raise ValueError(
                f"chunks_per_request = {self.chunks_per_request}: the corpus has {self.corpus_chunks} chunks "
                "(corpus_chunks) and a prompt holds none twice; lower it"
            )
        if not 0 <= self.popularity <= 5:
            raise ValueError(f"popularity = {self.popularity:g}: give an exponent from 0 (all alike) to 5")
        at_least("system_prompt_tokens", self.system_prompt_tokens, 0, TOKENS_MAX)
        check_length("chunk_tokens", self.chunk_tokens, 1)
        check_length("question_tokens", self.question_tokens, 1)
        check_length("output_tokens", self.output_tokens, 1)

    @property
    def session_count(self) -> int:
        return self.requests

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, corpus = (streams[f"workloads.{name}"] for name in ("spans", "session_ids", "corpus"))
        retrieval = streams["workloads.retrieval"]
        length = length_sampler(self.chunk_tokens, streams["workloads.chunk_tokens"], 1)
        question = length_sampler(self.question_tokens, streams["workloads.question_tokens"], 1)
        output = length_sampler(self.output_tokens, streams["workloads.output_tokens"], 1)
        system: tuple[Span, ...] = ()
        if self.system_prompt_tokens:
            system = ((corpus.getrandbits(SPAN_ID_BITS), self.system_prompt_tokens),)
        chunks: list[Span] = [(corpus.getrandbits(SPAN_ID_BITS), length()) for _ in range(self.corpus_chunks)]
        ranks = _Zipf(self.corpus_chunks, self.popularity)
        for number in range(self.requests):
            taken = ranks.draw(self.chunks_per_request, retrieval)
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
    """Different ranks from 0 on, drawn one after the other with a weight of `(rank + 1) ** -exponent`."""

    def __init__(self, count: int, exponent: float) -> None:
        weights = [(rank + 1) ** -exponent for rank in range(count)]
        self._sums = list(accumulate(weights))
        self._rest = list(accumulate(reversed(weights)))
        """Sums from the last rank on, which keep what a sum from the first loses: the weight of a steep law's tail."""

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """A rank that was drawn already is drawn again. After `REPEATS_MAX` in a row the popular ones are used up: then
        only the ranks from the first free one on take part, which changes no chance."""
        taken: dict[int, None] = {}
        first = repeats = 0
        while len(taken) < count:
            before = len(taken)
            taken[self._one(first, rng)] = None
            repeats = 0 if len(taken) > before else repeats + 1
            if repeats == REPEATS_MAX:
                repeats = 0
                while first in taken:
                    first += 1
        return list(taken)

    def _one(self, first: int, rng: random.Random) -> int:
        last = len(self._sums) - 1
        if not first:
            return min(bisect(self._sums, rng.random() * self._sums[-1]), last)
        place = bisect(self._rest, rng.random() * self._rest[last - first], 0, last - first)
        return last - place
