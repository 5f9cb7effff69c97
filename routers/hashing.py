"""Names of prompt blocks: content hashes as Dynamo makes them, and the prefix keys our index looks up.

A *content* (or local) hash names the tokens of one block alone; a *sequence* hash chains contents as Dynamo does. Our
own index uses neither chain but `PrefixKeys`: the key of a prefix is the sum, modulo 2**64, of each block's
content mixed with its position. A sum needs no chain, so keys of 8,192 blocks come out of one vector operation, and
the key after one more block is one addition. Law: equal keys at depth d mean equal content at every depth up to d
(up to the chance of a 64-bit collision, about n**2 / 2**65 for n prefixes).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from routers.errors import EventError

LOCAL_SEED = 1337  # Dynamo `lib/kv-router/src/protocols.rs`
MASK = (1 << 64) - 1

_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_GOLDEN_V, _MUL1_V, _MUL2_V = np.uint64(_GOLDEN), np.uint64(_MUL1), np.uint64(_MUL2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def lora_seed(lora_name: str | None) -> int:
    """Seed of the content hash under a LoRA adapter; an empty name is no adapter."""
    if not lora_name:
        return LOCAL_SEED
    return (LOCAL_SEED + xxhash.xxh3_64_intdigest(lora_name.encode())) & MASK


def local_block_hashes(
    token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int, lora_name: str | None = None
) -> npt.NDArray[np.uint64]:
    """XXH3-64 over the u32 little-endian tokens of each full block; a trailing partial block has no name."""
    count = len(token_ids) // block_size
    try:
        words = np.asarray(token_ids[: count * block_size], dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise EventError(f"these are not token ids ({error}): send whole numbers from 0 to 4294967295") from error
    if count and (words.min() < 0 or words.max() > 0xFFFFFFFF):
        raise EventError(f"token ids reach from {words.min()} to {words.max()}: they must fit 0..4294967295")
    data = memoryview(words.astype("<u4").tobytes())
    step, seed, digest = 4 * block_size, lora_seed(lora_name), xxhash.xxh3_64_intdigest
    return np.array([digest(data[at : at + step], seed) for at in range(0, count * step, step)], dtype=np.uint64)


def with_extra_keys(content: int, extra_keys: Sequence[object]) -> int:
    """Content hash of a block that the engine tells apart from others of the same tokens: by a salt, an image."""
    return xxhash.xxh3_64_intdigest(
        content.to_bytes(8, "little") + msgspec.msgpack.encode(list(extra_keys)), LOCAL_SEED
    )


def sequence_hashes(local_hashes: Sequence[int] | npt.NDArray[np.uint64]) -> list[int]:
    """Dynamo's chained hashes: s0 = local0, s_i = XXH3-64(LE64(s_(i-1)) || LE64(local_i), seed 1337)."""
    chained: list[int] = []
    for local in local_hashes:
        value = int(local)
        if chained:
            value = xxhash.xxh3_64_intdigest(
                chained[-1].to_bytes(8, "little") + value.to_bytes(8, "little"), LOCAL_SEED
            )
        chained.append(value)
    return chained


def prefix_token_hashes(token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> list[int]:
    """XXH3-64 with seed 1337 over the u32 little-endian tokens of every leading run of full blocks, shortest first:
    the `token_hash` by which an engine that reports its prefixes and a router name them alike."""
    count = len(token_ids) // block_size
    data = memoryview(np.asarray(token_ids[: count * block_size], dtype=np.int64).astype("<u4").tobytes())
    step, running = 4 * block_size, xxhash.xxh3_64(seed=LOCAL_SEED)
    found = []
    for at in range(0, count * step, step):
        running.update(data[at : at + step])
        found.append(running.intdigest())
    return found


def bloom_positions(value: int, bits: int, hashes: int) -> list[int]:
    """Bits that a 64-bit hash sets in a Bloom filter of that many bits: (low + i * high) mod bits for i < hashes, where
    low and high are its lower and upper 32 bits, high made odd. Bit p is bit p % 8 of byte p // 8."""
    low, high = value & 0xFFFFFFFF, (value >> 32) | 1
    return [(low + i * high) % bits for i in range(hashes)]


def mix(content: int, depth: int) -> int:
    """Share of the block at 1-based `depth` in the key of every prefix that holds it (the splitmix64 finaliser)."""
    x = (content + depth * _GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * _MUL1) & MASK
    x = ((x ^ (x >> 27)) * _MUL2) & MASK
    return x ^ (x >> 31)


def extend_keys(key: int, depth: int, contents: Sequence[int] | npt.NDArray[np.uint64]) -> list[int]:
    """Keys of the prefixes that grow from prefix `key` of `depth` blocks by these contents, one after the other."""
    if len(contents) > 16:  # below that the vector form costs more than it saves
        found: list[int] = (_vector(contents, depth) + np.uint64(key)).tolist()
        return found
    keys = []
    for content in contents:
        depth += 1
        key = (key + mix(int(content), depth)) & MASK
        keys.append(key)
    return keys


def _vector(contents: Sequence[int] | npt.NDArray[np.uint64], depth: int) -> npt.NDArray[np.uint64]:
    x = np.array(contents, dtype=np.uint64)
    x += np.arange(depth + 1, depth + 1 + len(x), dtype=np.uint64) * _GOLDEN_V
    x ^= x >> _S30
    x *= _MUL1_V
    x ^= x >> _S27
    x *= _MUL2_V
    x ^= x >> _S31
    summed: npt.NDArray[np.uint64] = np.add.accumulate(x, dtype=np.uint64)
    return summed


class PrefixKeys:
    """Keys of every leading run of blocks of one prompt: `at(d)` names its first d blocks, d = 1..len."""

    __slots__ = ("_at", "_length", "array")

    def __init__(self, contents: Sequence[int] | npt.NDArray[np.uint64]) -> None:
        self.array = _vector(contents, 0)
        self._at = self.array.item
        self._length = len(self.array)

    def __len__(self) -> int:
        return self._length

    def at(self, depth: int) -> int:
        return self._at(depth - 1)

    def common(self, other: PrefixKeys, at_least: int, at_most: int) -> int:
        """Blocks that both share, knowing that they share `at_least` and looking no deeper than `at_most`."""
        mine, theirs = self._at, other._at
        low, high = at_least, min(at_most, len(self), len(other))
        if high > low and mine(high - 1) == theirs(high - 1):
            return high
        while high - low > 1:  # shared at low, not shared at high
            middle = (low + high) // 2
            if mine(middle - 1) == theirs(middle - 1):
                low = middle
            else:
                high = middle
        return low


NO_KEYS = PrefixKeys(())
