"""Murmur hashes as routers in the field use them, in plain Python: keys are short and hashed once a request.

`murmur64a` and `vllm_hash` are vllm-router's (its sharding hash first reduces a key to 23 bits, a fold that this file
repeats bit by bit); `murmur3_low64` is the half of MurmurHash3 x64-128 that Ray's ring takes.
"""

from __future__ import annotations

from routers.hashing import MASK

_A_MUL = 0xC6A4A7935BD1E995
_VLLM_SEED = 4193360111
_C1, _C2 = 0x87C37B91114253D5, 0x4CF5AD432745937F
_SHARDS = (1 << 23) - 1


def murmur64a(data: bytes, seed: int) -> int:
    """MurmurHash64A."""
    h = (seed ^ (len(data) * _A_MUL)) & MASK
    whole = len(data) & ~7
    for at in range(0, whole, 8):
        k = (int.from_bytes(data[at : at + 8], "little") * _A_MUL) & MASK
        k = ((k ^ (k >> 47)) * _A_MUL) & MASK
        h = ((h ^ k) * _A_MUL) & MASK
    if len(data) > whole:
        h = ((h ^ int.from_bytes(data[whole:], "little")) * _A_MUL) & MASK
    h = ((h ^ (h >> 47)) * _A_MUL) & MASK
    return h ^ (h >> 47)


def vllm_hash(key: str) -> int:
    """Point of a key on vllm-router 0.1.17's ring (`src/policies/consistent_hash.rs`)."""
    return murmur64a(_fold(key.encode(), _SHARDS).to_bytes(4, "little"), _VLLM_SEED)


def _fold(key: bytes, shards: int) -> int:
    """A number below `shards` that moves few keys when `shards` changes; reads a stream of hash bits."""
    words = [murmur64a(key, _VLLM_SEED)]

    def bit(place: int) -> int:
        while len(words) <= place // 64:
            words.append(murmur64a(words[-1].to_bytes(8, "little"), _VLLM_SEED))
        return words[place // 64] >> (place % 64) & 1

    depth = (shards - 1).bit_length()
    place = depth
    for _ in range(32):
        while not bit(place):
            if depth == 0:
                return 0
            depth -= 1
            place = depth
        place += 23
        number = 1
        for _ in range(depth - 1):
            number = 2 * number + bit(place)
            place += 23
        if number < shards:
            return number
    return 0


def murmur3_low64(data: bytes, seed: int) -> int:
    """First (low) 64 bits of MurmurHash3 x64-128, unsigned."""
    h1 = h2 = seed & 0xFFFFFFFF
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        h1 ^= _mix1(int.from_bytes(data[at : at + 8], "little"))
        h1 = ((_rotate(h1, 27) + h2) * 5 + 0x52DCE729) & MASK
        h2 ^= _mix2(int.from_bytes(data[at + 8 : at + 16], "little"))
        h2 = ((_rotate(h2, 31) + h1) * 5 + 0x38495AB5) & MASK
    tail = data[whole:]
    h2 ^= _mix2(int.from_bytes(tail[8:], "little"))
    h1 ^= _mix1(int.from_bytes(tail[:8], "little"))
    h1 ^= len(data)
    h2 ^= len(data)
    h1 = (h1 + h2) & MASK
    h2 = (h2 + h1) & MASK
    return (_final(h1) + _final(h2)) & MASK


def _mix1(k: int) -> int:
    return (_rotate((k * _C1) & MASK, 31) * _C2) & MASK


def _mix2(k: int) -> int:
    return (_rotate((k * _C2) & MASK, 33) * _C1) & MASK


def _rotate(x: int, by: int) -> int:
    return ((x << by) | (x >> (64 - by))) & MASK


def _final(k: int) -> int:
    k = ((k ^ (k >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    k = ((k ^ (k >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return k ^ (k >> 33)
