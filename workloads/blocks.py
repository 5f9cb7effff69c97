"""Keys of a prompt's blocks, straight from its spans: equal exactly when everything up to the block's end is equal.

Tokens are never laid out. A slice of a span within a block is hashed with its place, and a block's key is the mixed
sum of all slice hashes up to its end, so that a whole prompt is a handful of numpy calls. Keys have 64 bits; that
two different prefixes meet has a chance of about n**2 / 2**65 for n blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workloads.spans import Span
from workloads.splitmix import INCREMENT, Words, mix

_PLACE = np.uint64(0xD6E8FEB86659FD93)
"""Odd, so that places differ; any odd number does."""


def block_keys(spans: Sequence[Span], block_size: int, salt: int = 0) -> Words:
    """One key for each full block; with another `salt` all keys are others."""
    kept = [span for span in spans if span[1] > 0]
    ends = np.cumsum(np.array([tokens for _, tokens in kept], dtype=np.int64))
    blocks = int(ends[-1]) // block_size if kept else 0
    if not blocks:
        return np.empty(0, dtype=np.uint64)
    ids = np.array([span_id for span_id, _ in kept], dtype=np.uint64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
    edges = np.arange(blocks + 1, dtype=np.int64) * block_size
    cuts = np.union1d(edges[:-1], starts[starts < edges[-1]])
    inside = np.searchsorted(starts, cuts, side="right") - 1
    with np.errstate(over="ignore"):
        first = (cuts - starts[inside]).astype(np.uint64)
        hashes = mix(mix(ids[inside] + first * INCREMENT) + cuts.astype(np.uint64) * _PLACE)
        sums = np.cumsum(hashes, dtype=np.uint64)
    return mix(sums[np.searchsorted(cuts, edges[1:], side="left") - 1]) ^ np.uint64(salt)
