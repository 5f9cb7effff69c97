"""A request and its token sequence, real or symbolic; the scheduler only ever asks a sequence for block keys.

`TokenSequence` holds token ids and vLLM's digests. `RunSequence` holds runs `(run id, tokens)` and never expands a
token: its block key chains 64-bit hashes of the run slices in each block, so two prompts share keys exactly when they
agree block by block. Both know their answer in advance, because token k of an answer is a pure function of k.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from struct import Struct
from typing import Protocol, cast

import msgspec
from xxhash import xxh3_64_intdigest

from mock_engine.config import DEFAULT_BLOCK_SIZE
from mock_engine.errors import EngineError
from mock_engine.events import BlockStored
from mock_engine.generate import generated_token_ids
from mock_engine.hashing import BlockHasher, BlockKeys, Lora

_STOP_SCAN = 128  # tokens looked ahead for a stop id at a time

_PAIR = Struct("<QQ")
_SLICE = Struct("<QQQ")
_ROOT_KEY = 0


class TokenSource(Protocol):
    """What the scheduler needs of a sequence."""

    prompt_tokens: int
    block_size: int

    def block_keys(self, count: int) -> Sequence[bytes] | Sequence[int]:
        """At least `count` keys of leading full blocks, each chained over all before it; the answer's included."""

    def stored(self, first: int, stop: int, session_id: str | None) -> BlockStored:
        """The event that says: blocks first .. stop - 1 are resident now."""

    def first_stop(self, start: int, stop_ids: frozenset[int]) -> tuple[int, bool]:
        """(position, True) of the first output token from `start` on that is a stop id, or (position, False): none
        before this position, ask again from there."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is submitted. `max_tokens` is clamped to the model's length; every other field is the HTTP body's."""

    request_id: str
    sequence: TokenSource
    max_tokens: int
    priority: int = 0  # lower is sooner; ignored under fcfs
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # stop ids before this many output tokens do not stop
    session_id: str | None = None  # only rides in BlockStored
    skip_cache_read: bool = False  # prompt-logprobs requests: no lookup, not counted as queries
    report_full: bool = False  # every lookup with a hit announces the reused prefix again


class TokenSequence:
    """A prompt of token ids; `output` is a seed of `generated_token_ids` or a function from position to id."""

    __slots__ = ("_extra", "_hasher", "_ids", "_keys", "_output", "_vocab_size", "block_size", "lora", "prompt_tokens")

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        hasher: BlockHasher,
        output: Callable[[int], int] | int,
        cache_salt: str | None = None,
        lora: Lora | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        vocab_size: int | None = None,
    ) -> None:
        tolist = getattr(prompt_token_ids, "tolist", None)  # digests need plain ints
        self._ids: list[int] = list(prompt_token_ids) if tolist is None else cast("list[int]", tolist())
        self.prompt_tokens = len(self._ids)
        self.block_size = block_size
        self.lora = lora
        self._hasher = hasher
        self._output = output
        self._vocab_size = vocab_size
        self._extra = BlockKeys(lora, cache_salt)
        self._keys: list[bytes] = []

    def block_keys(self, count: int) -> list[bytes]:
        keys = self._keys
        if count > len(keys):
            start = len(keys) * self.block_size
            # A whole prompt is hashed at once; an answer's blocks come one by one.
            stop = max(count * self.block_size, self.prompt_tokens)
            parent = keys[-1] if keys else None
            keys += self._hasher.chain(parent, self.token_ids(start, stop), self.block_size, self._extra)
        return keys

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Ids of prompt and answer at positions start .. stop - 1."""
        missing = stop - len(self._ids)
        if missing > 0:
            self._ids += self._generate(len(self._ids) - self.prompt_tokens, missing)
        return self._ids[start:stop]

    def output_token_ids(self, start: int, stop: int) -> list[int]:
        """Ids of the answer at output positions start .. stop - 1."""
        return self.token_ids(self.prompt_tokens + start, self.prompt_tokens + stop)

    def _generate(self, start: int, count: int) -> list[int]:
        if callable(self._output):
            return [self._output(k) for k in range(start, start + count)]
        return generated_token_ids(self._output, start, count, self._vocab_size)

    def stored(self, first: int, stop: int, session_id: str | None) -> BlockStored:
        self.block_keys(stop)
        extra = self._extra
        return BlockStored(
            block_hashes=tuple(self._keys[first:stop]),
            parent_block_hash=self._keys[first - 1] if first else None,
            token_ids=self.token_ids(first * self.block_size, stop * self.block_size),
            block_size=self.block_size,
            lora_id=None if self.lora is None else self.lora.lora_id,
            lora_name=None if self.lora is None else self.lora.name,
            extra_keys=tuple(extra.event_later if i else extra.event_first for i in range(first, stop)),
            session_id=session_id,
        )

    def first_stop(self, start: int, stop_ids: frozenset[int]) -> tuple[int, bool]:
        if callable(self._output):  # a foreign function is asked for no token before its time
            return (start, True) if self._output(start) in stop_ids else (start + 1, False)
        for k, token in enumerate(self.output_token_ids(start, start + _STOP_SCAN), start):
            if token in stop_ids:
                return k, True
        return start + _STOP_SCAN, False


class RunSequence:
    """A prompt of runs, each starting at its own token 0, answered by the tokens of `output_run`.

    `memo` may be an earlier sequence, of any prompt: block keys are taken over as far as both agree token by token,
    so the next turn of a session only hashes what is new. A salt starts the chain of keys elsewhere and is the first
    block's extra key, as on the wire; contents are what they are without it.
    """

    __slots__ = ("_bounds", "_contents", "_cursor", "_ids", "_keys", "block_size", "cache_salt", "prompt_tokens")

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        output_run: int,
        memo: "RunSequence | None" = None,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        cache_salt: str | None = None,
    ) -> None:
        self.block_size = block_size
        self.cache_salt = cache_salt
        self._ids: list[int] = []  # run ids, the answer's last
        self._bounds: list[int] = [0]  # run i covers tokens _bounds[i] .. _bounds[i + 1] - 1; the last one is endless
        for run_id, tokens in runs:
            if tokens:
                self._ids.append(run_id)
                self._bounds.append(self._bounds[-1] + tokens)
        self._ids.append(output_run)
        self.prompt_tokens = self._bounds[-1]
        alike = memo is not None and (memo.block_size, memo.cache_salt) == (block_size, cache_salt)
        shared = self._common_tokens(memo) // block_size if memo is not None and alike else 0
        self._contents: list[int] = [] if memo is None else memo._contents[:shared]
        self._keys: list[int] = [] if memo is None else memo._keys[:shared]
        self._cursor = 0  # run that holds the first token not hashed yet, or one before it

    def _common_tokens(self, other: "RunSequence") -> int:
        last, other_last = len(self._ids) - 1, len(other._ids) - 1
        for i, (run_id, other_id) in enumerate(zip(self._ids, other._ids, strict=False)):
            if run_id != other_id:
                return self._bounds[i]
            if i == last and i == other_last:
                return len(other._keys) * self.block_size
            if i in (last, other_last) or self._bounds[i + 1] != other._bounds[i + 1]:
                ends = [s._bounds[i + 1] for s, end in ((self, last), (other, other_last)) if i != end]
                return min(ends)
        return 0

    def _extend(self, blocks: int) -> None:
        size, ids, bounds, last = self.block_size, self._ids, self._bounds, len(self._ids) - 1
        contents, keys = self._contents, self._keys
        key = keys[-1] if keys else self._root_key()
        cursor = self._cursor
        position = len(keys) * size
        pack_slice, pack_pair = _SLICE.pack, _PAIR.pack
        for _ in range(blocks - len(keys)):
            end = position + size
            while cursor < last and bounds[cursor + 1] <= position:
                cursor += 1
            start = bounds[cursor]
            if cursor == last or bounds[cursor + 1] >= end:
                packed = pack_slice(ids[cursor], position - start, end - start)
            else:
                parts = []
                while position < end:
                    stop = end if cursor == last else min(end, bounds[cursor + 1])
                    parts.append(pack_slice(ids[cursor], position - bounds[cursor], stop - bounds[cursor]))
                    position = stop
                    if position < end:
                        cursor += 1
                packed = b"".join(parts)
            position = end
            content = xxh3_64_intdigest(packed)
            key = xxh3_64_intdigest(pack_pair(key, content))
            contents.append(content)
            keys.append(key)
        self._cursor = cursor

    def _root_key(self) -> int:
        return _ROOT_KEY if self.cache_salt is None else xxh3_64_intdigest(self.cache_salt.encode())

    def block_keys(self, count: int) -> list[int]:
        if count > len(self._keys):
            self._extend(max(count, self.prompt_tokens // self.block_size))
        return self._keys

    def block_content(self, index: int) -> int:
        """Hash of what block `index` holds, whatever precedes it."""
        self.block_keys(index + 1)
        return self._contents[index]

    def block_contents(self) -> list[int]:
        """Contents of the prompt's full blocks."""
        blocks = self.prompt_tokens // self.block_size
        self.block_keys(blocks)
        return self._contents[:blocks]

    def stored(self, first: int, stop: int, session_id: str | None) -> BlockStored:
        self.block_keys(stop)
        return BlockStored(
            block_hashes=tuple(self._keys[first:stop]),
            parent_block_hash=self._keys[first - 1] if first else None,
            token_ids=None,
            block_size=self.block_size,
            extra_keys=None if first or self.cache_salt is None else ((self.cache_salt,), *[None] * (stop - 1)),
            session_id=session_id,
            contents=tuple(islice(self._contents, first, stop)),
        )

    def first_stop(self, start: int, stop_ids: frozenset[int]) -> tuple[int, bool]:
        raise EngineError("a symbolic sequence has no token ids to stop at: give the request no stop_token_ids")
