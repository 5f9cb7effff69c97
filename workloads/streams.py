"""Named streams of chance: one seed, one generator per name.

Law: drawing from one stream never shifts another, and the same seed and name give the same numbers on every
machine, Python version and hash seed. Therefore a name is mixed with the seed by a digest, never by `hash()`,
and whoever wants the last part of the law too draws with `random()` and `getrandbits()` only: the Mersenne
twister behind these two is fixed, while the recipes of the other methods have changed between versions.
"""

from __future__ import annotations

import hashlib
import random


class Streams:
    """`streams[name]` is that name's generator; asking again gives the same object, further along."""

    __slots__ = ("_open", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._open: dict[str, random.Random] = {}

    def __getitem__(self, name: str) -> random.Random:
        stream = self._open.get(name)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
            stream = self._open[name] = random.Random(int.from_bytes(digest, "little"))
        return stream

    def __repr__(self) -> str:
        return f"Streams(seed={self.seed})"
