"""Spans: text that exists only as an id and a length, until a wire needs its tokens.

A span is `(span_id, tokens)`. Its tokens are a pure function of the id (splitmix64 over the position), so a span
can be shortened, extended or compared without being laid out: two prompts share a prefix exactly as far as their
leading spans agree. An engine that is told `seed = span_id` generates these same tokens, which is how a workload
knows an answer before it was given. No run's seed enters here: a workload draws its span ids from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from workloads.errors import SpanError
from workloads.splitmix import INCREMENT, mix

Span = tuple[int, int]
"""(span_id, tokens)"""
TokenIds = npt.NDArray[np.int64]

FIRST_TOKEN_ID = 1000
"""Below it real vocabularies keep special tokens, bytes and single characters."""
TOKEN_RANGE = 30_000
"""Ids end at 30,999: every vocabulary of 31,000 entries or more has them all."""
SPAN_ID_BITS = 63
"""A span id also travels as the `seed` of a request, which is a signed 64-bit number on the wire."""


def token_ids(span_id: int, start: int, count: int) -> TokenIds:
    """Tokens `start .. start + count - 1` of a span.

    Token k is `FIRST_TOKEN_ID + splitmix64(span_id + (k + 1) * increment) mod TOKEN_RANGE`, modulo 2**64 throughout.
    """
    if not 0 <= span_id < 1 << SPAN_ID_BITS:
        raise SpanError(
            f"span id {span_id} is not in 0 .. 2**{SPAN_ID_BITS} - 1: it would not fit the wire's signed "
            f"64-bit seed; draw it with getrandbits({SPAN_ID_BITS})"
        )
    if start < 0 or count < 0:
        raise SpanError(f"tokens {start} .. {start + count} of a span do not exist: start and count begin at 0")
    with np.errstate(over="ignore"):
        states = np.arange(start, start + count, dtype=np.uint64) * INCREMENT + np.uint64(span_id)
    return (mix(states) % np.uint64(TOKEN_RANGE)).astype(np.int64) + FIRST_TOKEN_ID


def prompt_token_ids(spans: Iterable[Span]) -> TokenIds:
    """Tokens of a whole prompt."""
    parts = [token_ids(span_id, 0, tokens) for span_id, tokens in spans]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def prompt_tokens(spans: Iterable[Span]) -> int:
    """Length of a prompt in tokens."""
    return sum(tokens for _, tokens in spans)


def common_prefix_tokens(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Leading tokens that two prompts share."""
    shared = 0
    for (id_a, tokens_a), (id_b, tokens_b) in zip(a, b, strict=False):
        if id_a != id_b:
            break
        shared += min(tokens_a, tokens_b)
        if tokens_a != tokens_b:
            break
    return shared


_SYLLABLES = [consonant + vowel for consonant in "bdgklmnt" for vowel in "aeio"]
"""32 of them, so a word of three tells every token id from every other."""


def span_text(span_id: int, start: int, count: int) -> str:
    """The span as text for APIs that take no token ids: one word a token, each with a space in front.

    Token id i is spelt as the three base-32 digits of `i - FIRST_TOKEN_ID`, highest first, each a syllable; this is the
    default vocabulary of our replicas, where text therefore has the very ids of its span. Other tokenizers make
    several tokens of a word; the engine's usage tells how many.
    """
    words = _words()
    return "".join([words[i] for i in (token_ids(span_id, start, count) - FIRST_TOKEN_ID).tolist()])


@cache
def _words() -> list[str]:
    return [
        f" {_SYLLABLES[number >> 10]}{_SYLLABLES[number >> 5 & 31]}{_SYLLABLES[number & 31]}"
        for number in range(TOKEN_RANGE)
    ]
