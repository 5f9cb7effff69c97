"""What a cache without a limit would have served: the ceiling of every hit rate.

Prompts and answers are kept as a tree of spans, so cost and memory grow with spans and not with tokens. Hits are
counted in the engine's block arithmetic: whole leading blocks only, and never the last token of a prompt, because
something must be computed to get a first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
        self._root = _Node()

    def lookup(self, prompt: Sequence[Span]) -> int:
        """Cached tokens of a prompt, as an engine reports them."""
        reusable = prompt_tokens(prompt) - 1
        shared = min(self.shared_tokens(prompt), reusable)
        return max(0, shared // self.block_size * self.block_size)

    def store(self, text: Iterable[Span]) -> None:
        """Makes a prompt, or a prompt with its answer, reusable."""
        node = self._root
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

    def store_answer(self, prompt: Sequence[Span], answer: Span) -> None:
        """Makes a finished turn reusable. An engine never computes the last token that it generates, so the answer
        counts without it."""
        self.store((*prompt, (answer[0], answer[1] - 1)))

    def shared_tokens(self, prompt: Iterable[Span]) -> int:
        """Leading tokens of a prompt that any stored text also begins with, before block arithmetic."""
        node, shared = self._root, 0
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


def ceiling_cached_tokens(turns: Iterable[tuple[Sequence[Span], Span]], block_size: int) -> int:
    """Cached prompt tokens of one infinite cache over (prompt, answer) pairs in the order of their admission.

    Each answer counts as known before the next pair, so this is an upper bound for requests that overlap; drive
    an `InfiniteCache` by hand where the overlap matters.
    """
    cache = InfiniteCache(block_size)
    hits = 0
    for prompt, answer in turns:
        hits += cache.lookup(prompt)
        cache.store_answer(prompt, answer)
    return hits


def turn_by_turn(sessions: Iterable[Session]) -> Iterator[tuple[tuple[Span, ...], Span]]:
    """Sessions as (prompt, answer) pairs, one session after the other, for `ceiling_cached_tokens`."""
    for session in sessions:
        for turn, prompt in session.prompts():
            yield prompt, turn.output
