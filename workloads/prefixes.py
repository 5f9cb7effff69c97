"""What a cache without a limit would have served: the ceiling of every hit rate.

Prompts and answers are kept as a tree of spans, a tree for each cache salt, so cost and memory grow with spans and not
with tokens. Hits are counted in the engine's block arithmetic: whole leading blocks only, and never the last token of a
prompt, because something must be computed to get a first token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from workloads.sessions import Session
from workloads.spans import Span, prompt_tokens


class _Node:
    """A point in stored text: whole spans that go on from here, and how far any span of an id goes."""

    __slots__ = ("longest", "next")

    def __init__(self) -> None:
        self.next: dict[Span, _Node] = {}
        self.longest: dict[int, int] = {}


class InfiniteCache:
    """One prefix cache that never evicts."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: a block holds at least 1 token")
        self.block_size = block_size
        self._roots: defaultdict[str | None, _Node] = defaultdict(_Node)

    def lookup(self, prompt: Sequence[Span], salt: str | None = None) -> int:
        """Cached tokens of a prompt, as an engine reports them. `salt` is that of its session: text that was stored
        under another one is not there."""
        reusable = prompt_tokens(prompt) - 1
        shared = min(self.shared_tokens(prompt, salt), reusable)
        return max(0, shared // self.block_size * self.block_size)

    def store(self, text: Iterable[Span], salt: str | None = None) -> None:
        """Makes a prompt, or a prompt with its answer, reusable."""
        node = self._roots[salt]
        for span in text:
            span_id, tokens = span
            if tokens <= 0:
                continue
            if node.longest.get(span_id, 0) < tokens:
                node.longest[span_id] = tokens
            below = node.next.get(span)
            if below is None:
                below = node.next[span] = _Node()
            node = below

    def store_answer(self, prompt: Sequence[Span], answer: Span, salt: str | None = None) -> None:
        """Makes a finished turn reusable. An engine never computes the last token that it generates, so the answer
        counts without it."""
        self.store((*prompt, (answer[0], answer[1] - 1)), salt)

    def shared_tokens(self, prompt: Iterable[Span], salt: str | None = None) -> int:
        """Leading tokens of a prompt that any text stored under its salt also begins with, before block arithmetic."""
        node, shared = self._roots[salt], 0
        for span in prompt:
            span_id, tokens = span
            if tokens <= 0:
                continue
            below = node.next.get(span)
            if below is None:
                return shared + min(tokens, node.longest.get(span_id, 0))
            shared += tokens
            node = below
        return shared


class Exchange(NamedTuple):
    """A request and its answer, as a cache sees them."""

    prompt: Sequence[Span]
    answer: Span
    salt: str | None = None


def ceiling_cached_tokens(exchanges: Iterable[Exchange], block_size: int) -> int:
    """Cached prompt tokens of one infinite cache over exchanges in the order of their admission.

    Each answer counts as known before the next exchange, so this is an upper bound for requests that overlap; drive
    an `InfiniteCache` by hand where the overlap matters.
    """
    cache = InfiniteCache(block_size)
    hits = 0
    for prompt, answer, salt in exchanges:
        hits += cache.lookup(prompt, salt)
        cache.store_answer(prompt, answer, salt)
    return hits


def turn_by_turn(sessions: Iterable[Session]) -> Iterator[Exchange]:
    """Sessions as exchanges, one session after the other, for `ceiling_cached_tokens`."""
    for session in sessions:
        for turn, prompt in session.prompts():
            yield Exchange(prompt, turn.output, session.cache_salt)
