"""vLLM's block hashes: a chain in which block i's digest covers its parent's digest, its token ids and its extra keys.

A block is H((parent digest, tuple of ids, extra keys or None)), H being sha256 or xxh3-128 over pickle protocol 5 or
canonical CBOR. The first block's parent is NONE_HASH, itself a hash of a seed string. The odd thing: pickle writes
an object that occurs twice as a back-reference, so equal strings inside the extra keys must be distinct objects.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from random import Random

import cbor2
import msgspec
import xxhash

from mock_engine.config import HASH_ALGORITHMS
from mock_engine.errors import ConfigError

NONE_HASH_SEED = "vllm-none-hash"

HashKeys = tuple[tuple[object, ...], ...] | None


class Lora(msgspec.Struct, frozen=True):
    """An adapter: the path counts in the hash, the number (from 1) and the name ride in events."""

    name: str
    path: str
    lora_id: int = 1


class BlockHasher:
    """The hash function of one engine; replicas with the same algorithm and seed give equal digests."""

    __slots__ = ("_digest", "algorithm", "none_hash")

    def __init__(
        self, algorithm: str = HASH_ALGORITHMS[0], *, seed: str | None = None, rng: Random | None = None
    ) -> None:
        """`seed` is what the environment's PYTHONHASHSEED says, None if unset; `rng` then draws the xxhash algorithms'
        NONE_HASH, which vLLM leaves to chance."""
        if algorithm not in HASH_ALGORITHMS:
            raise ConfigError(f"no block hash named {algorithm!r}: choose one of {', '.join(HASH_ALGORITHMS)}")
        self.algorithm = algorithm
        encode = _cbor if algorithm.endswith("_cbor") else _pickle
        digest = _sha256 if algorithm.startswith("sha256") else xxhash.xxh3_128_digest
        self._digest: Callable[[object], bytes] = lambda value: digest(encode(value))
        if seed is None and digest is not _sha256:
            if rng is None:
                raise ConfigError(
                    f"{algorithm} without PYTHONHASHSEED starts its chains at random: give a seed, or an rng"
                )
            self.none_hash = rng.randbytes(16)
        else:
            self.none_hash = self._digest(NONE_HASH_SEED if seed is None else seed)

    def chain(self, parent: bytes | None, token_ids: Sequence[int], block_size: int, extra: "BlockKeys") -> list[bytes]:
        """Digests of the full blocks of `token_ids`, continuing after `parent` (None: the sequence starts here)."""
        digests = []
        digest = self._digest
        keys = extra.first if parent is None else extra.later
        parent = parent or self.none_hash
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            parent = digest((parent, tuple(token_ids[start : start + block_size]), keys))
            digests.append(parent)
            keys = extra.later
        return digests


class BlockKeys:
    """What besides its tokens distinguishes a block: adapter (every block) and cache salt (the first block)."""

    __slots__ = ("event_first", "event_later", "first", "later")

    def __init__(self, lora: Lora | None = None, cache_salt: str | None = None) -> None:
        adapter = () if lora is None else (("lora", _fresh(lora.name), _fresh(lora.path)),)
        salt = () if cache_salt is None else (("cache_salt", _fresh(cache_salt)),)
        self.later: HashKeys = adapter or None
        self.first: HashKeys = (adapter + salt) or None
        names = () if lora is None else (lora.name,)
        self.event_later = names or None
        self.event_first = (names if cache_salt is None else (*names, cache_salt)) or None


def _fresh(text: str) -> str:
    """An equal string that is no other string's object."""
    return text.encode().decode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)
