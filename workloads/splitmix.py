"""splitmix64 (Steele, Lea and Flood 2014), the one mixer by which text and blocks get their numbers.

Law: `mix` is a bijection of 64 bits that spreads every bit over all, the same for arrays as for single numbers. It
takes the generator's state before its step, so `mix(seed + k * INCREMENT)` is the k-th output, from 0, of that seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, made odd."""
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(words: Words) -> Words:
    with np.errstate(over="ignore"):
        x = words + INCREMENT
        x = (x ^ (x >> _SHIFT_1)) * _MIX_1
        x = (x ^ (x >> _SHIFT_2)) * _MIX_2
        return x ^ (x >> _SHIFT_3)


def mix_one(value: int) -> int:
    """`mix` of one number; any Python int, taken modulo 2**64."""
    x = (value + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
