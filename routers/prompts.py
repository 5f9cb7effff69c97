"""A prompt as a policy may see it: token ids, block hashes, text, or as much of that as somebody knows.

Lazy by law: hashing tokens is paid for only by a policy that asks, once per block size, and the simulation can answer
from spans without ever making a token. A prompt that cannot say something says so in an error, never by a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from routers.errors import EventError
from routers.hashing import local_block_hashes, with_extra_keys

Hashes = Sequence[int] | npt.NDArray[np.uint64]


class Prompt(Protocol):
    """A prompt as somebody tokenised it."""

    @property
    def tokens(self) -> int:
        """Length in tokens; 0 when only the text is known."""

    def block_hashes(self, block_size: int) -> Hashes:
        """Content hash of each full block, not chained (live: XXH3-64 as Dynamo's local hash)."""

    def token_ids(self) -> Sequence[int]: ...

    def text(self) -> str | None: ...


class TokenPrompt:
    """A prompt known by its token ids, hashed once per block size when first asked."""

    __slots__ = ("_cache_salt", "_hashes", "_ids", "_lora_name", "_text")

    def __init__(
        self,
        token_ids: Sequence[int],
        text: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._ids = token_ids
        self._text = text
        self._lora_name = lora_name
        self._cache_salt = cache_salt
        self._hashes: dict[int, npt.NDArray[np.uint64]] = {}

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def router_salt(self) -> str | None:
        return self._cache_salt

    @property
    def lora_name(self) -> str | None:
        return self._lora_name

    def block_hashes(self, block_size: int) -> npt.NDArray[np.uint64]:
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes = self._hashes[block_size] = local_block_hashes(self._ids, block_size, self._lora_name)
            if self._cache_salt and len(hashes):  # the engine salts the first block, and with it every prefix
                hashes[0] = with_extra_keys(int(hashes[0]), (self._cache_salt,))
        return hashes

    def token_ids(self) -> Sequence[int]:
        return self._ids

    def text(self) -> str | None:
        return self._text


def salt_of(prompt: Prompt | None) -> str | None:
    """What keeps the prompt's blocks apart from equal ones, as far as this router looks at it."""
    return getattr(prompt, "router_salt", None) or None


def namespace_of(prompt: Prompt | None) -> str:
    """Adapter and salt: prompts of different ones share no block, whatever their tokens. Empty for neither."""
    lora, salt = getattr(prompt, "lora_name", None) or "", salt_of(prompt) or ""
    return f"{lora}\0{salt}\0" if lora or salt else ""


class HashedPrompt:
    """A prompt known by its length and the content hashes of its full blocks; has no tokens to give."""

    __slots__ = ("_block_size", "_hashes", "_tokens")

    def __init__(self, tokens: int, hashes: Hashes, block_size: int) -> None:
        if len(hashes) != tokens // block_size:
            raise EventError(
                f"{len(hashes)} block hashes cannot describe {tokens} tokens in blocks of {block_size}: "
                f"give one hash per full block, {tokens // block_size} in all"
            )
        self._tokens = tokens
        self._hashes = hashes
        self._block_size = block_size

    @property
    def tokens(self) -> int:
        return self._tokens

    def block_hashes(self, block_size: int) -> Hashes:
        if block_size != self._block_size:
            raise EventError(
                f"this prompt is hashed in blocks of {self._block_size} tokens and was asked for {block_size}: "
                f"give the policy block_size={self._block_size}"
            )
        return self._hashes

    def token_ids(self) -> Sequence[int]:
        raise EventError("this prompt is known by block hashes only: a policy that reads token ids needs a TokenPrompt")

    def text(self) -> str | None:
        return None


class TextPrompt:
    """A prompt of which only the text is known."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def tokens(self) -> int:
        return 0

    def block_hashes(self, block_size: int) -> Hashes:
        return ()

    def token_ids(self) -> Sequence[int]:
        return ()

    def text(self) -> str | None:
        return self._text
