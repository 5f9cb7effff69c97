"""KV-cache events as the block pool records them, before any wire form.

A hash is what the sequence uses as block key: the full digest (bytes) for real tokens, a 64-bit number for a
symbolic sequence. A symbolic event carries `contents` instead of token ids and never meets a wire.
"""

import msgspec

GPU = "GPU"

BlockHash = bytes | int
ExtraKeys = tuple[object, ...] | None


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Full blocks became hittable; the parent is the block before the first one in that request, None at its start."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: list[int] | None
    block_size: int
    lora_id: int | None = None
    medium: str | None = GPU
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys, ...] | None = None
    session_id: str | None = None
    contents: tuple[int, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Evicted blocks; a pool emits one event for each."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = GPU


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The prefix cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
