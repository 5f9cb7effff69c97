"""vLLM's KV event batches as bytes on the wire, read into events that an index can use.

Reads what vLLM 0.33 sends (events as maps) and what older ones sent (events as arrays of a version's length), block
hashes as integers or as digest bytes. Law: a batch is understood whole or refused whole with a `WireError`, so that
whoever counts batches knows when belief and truth part. What is understood but of no use (another block size, a
sliding-window group) is left out and counted by reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from routers.errors import WireError
from routers.hashing import MASK, local_block_hashes, with_extra_keys
from routers.view import Cleared, KvEvent, Removed, Stored

# Order of the array form, whose length grew with vLLM's versions (spec of the 0.33 contract, section C).
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})


class WireStored(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    session_id: str | None = None


class WireRemoved(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None


class WireCleared(msgspec.Struct, frozen=True):
    pass


WireEvent = WireStored | WireRemoved | WireCleared


class Batch(msgspec.Struct, frozen=True):
    """`ts` is the engine's wall clock in seconds; only its order means something here."""

    ts: float
    events: tuple[WireEvent, ...]
    dp_rank: int | None


class Skipped(msgspec.Struct):
    """Events left out because an index cannot use them, by reason."""

    block_size: int = 0  # hashed in blocks of another size than this router's prompts
    kind: int = 0  # a cache group that forgets (sliding window, mamba), whose blocks are no prefix
    remote: int = 0  # a block that lies on another machine
    short: int = 0  # fewer tokens than the blocks that are named


def decode_sequence(frame: bytes) -> int:
    """The second of a message's three frames."""
    if len(frame) != 8:
        raise WireError(f"a sequence frame of {len(frame)} bytes is no KV event message: vLLM sends 8, big-endian")
    return int.from_bytes(frame, "big")


def decode_batch(payload: bytes) -> Batch:
    try:
        value = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"{len(payload)} bytes are not msgpack ({error}): is this vLLM's event port?") from error
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise WireError(f"a batch must be an array [ts, events, dp_rank], found {_shape(value)}")
    ts, events = value[0], value[1]
    rank = value[2] if len(value) == 3 else None
    if not isinstance(ts, int | float) or isinstance(ts, bool):
        raise WireError(f"a batch's time must be a number of seconds, found {_shape(ts)}")
    if not isinstance(events, list):
        raise WireError(f"a batch's events must be an array, found {_shape(events)}")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise WireError(f"a batch's dp_rank must be a whole number or nil, found {_shape(rank)}")
    return Batch(float(ts), tuple(_event(event) for event in events), rank)


def to_events(
    batch: Batch, block_size: int, skipped: Skipped, *, ignore_extra_keys: bool = False
) -> tuple[KvEvent, ...]:
    """Events for an index of blocks of `block_size` tokens; what is left out is counted in `skipped`.

    A block's extra keys (salt, image) are part of its content here, so that only a prompt with the same ones matches;
    `ignore_extra_keys` is the fault of taking tokens for all there is.
    """
    found: list[KvEvent] = []
    for event in batch.events:
        if isinstance(event, WireCleared):
            found.append(Cleared())
        elif isinstance(event, WireRemoved):
            found.append(Removed(event.block_hashes, event.medium))
        elif event.kv_cache_spec_kind not in _FULL_ATTENTION:
            skipped.kind += 1
        elif event.locality == "REMOTE":
            skipped.remote += 1
        elif event.block_size != block_size:
            skipped.block_size += 1
        else:
            content = local_block_hashes(event.token_ids, block_size, event.lora_name).tolist()
            hashes = event.block_hashes
            if len(content) != len(hashes):
                skipped.short += len(content) < len(hashes)
                complete = min(len(content), len(hashes))
                content, hashes = content[:complete], hashes[:complete]
            if event.extra_keys is not None and not ignore_extra_keys:
                content = [
                    with_extra_keys(value, rest) if (rest := _beyond_lora(extra, event.lora_name)) else value
                    for value, extra in zip_longest(content, event.extra_keys[: len(content)])
                ]
            if hashes:
                found.append(
                    Stored(
                        hashes,
                        event.parent_block_hash,
                        tuple(content),
                        block_size,
                        event.medium,
                        event.lora_name,
                        event.extra_keys,
                    )
                )
    return tuple(found)


def _beyond_lora(extra: object, lora_name: str | None) -> tuple[Any, ...]:
    """A block's extra keys without the adapter's name, which stands first and is in the content hash already."""
    if extra is None:
        return ()
    keys = extra if isinstance(extra, tuple) else (extra,)
    return keys[1:] if lora_name and keys and keys[0] == lora_name else keys


def _event(value: object) -> WireEvent:
    if isinstance(value, dict):
        fields = value
        tag = value.get("type")
    elif isinstance(value, list) and value:
        tag = value[0]
        names = _STORED_FIELDS if tag == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, value[1:], strict=False))
    else:
        raise WireError(f"an event must be a map with a type or an array that starts with one, found {_shape(value)}")
    if tag == "BlockStored":
        return WireStored(
            block_hashes=_hashes(fields, tag),
            parent_block_hash=None if fields.get("parent_block_hash") is None else _hash(fields["parent_block_hash"]),
            token_ids=_tokens(fields),
            block_size=_whole(fields, tag, "block_size", required=True) or 0,
            lora_id=_whole(fields, tag, "lora_id"),
            medium=_text(fields, tag, "medium"),
            lora_name=_text(fields, tag, "lora_name"),
            extra_keys=_extra_keys(fields),
            group_idx=_whole(fields, tag, "group_idx"),
            kv_cache_spec_kind=_text(fields, tag, "kv_cache_spec_kind"),
            locality=_text(fields, tag, "locality"),
            session_id=_text(fields, tag, "session_id"),
        )
    if tag == "BlockRemoved":
        return WireRemoved(
            block_hashes=_hashes(fields, tag),
            medium=_text(fields, tag, "medium"),
            group_idx=_whole(fields, tag, "group_idx"),
        )
    if tag == "AllBlocksCleared":
        return WireCleared()
    raise WireError(f"no event is called {tag!r}: known are BlockStored, BlockRemoved, AllBlocksCleared")


def _hashes(fields: dict[str, Any], tag: str) -> tuple[int, ...]:
    value = fields.get("block_hashes")
    if not isinstance(value, list):
        raise WireError(f"{tag}: block_hashes must be an array, found {_shape(value)}")
    return tuple(_hash(item) for item in value)


def _hash(value: object) -> int:
    """An integer (negatives wrap to 64 bits) or digest bytes, whose last eight are vLLM's integer form."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value & MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise WireError(f"a block hash must be an integer or bytes, found {_shape(value)}")


def _tokens(fields: dict[str, Any]) -> tuple[int, ...]:
    value = fields.get("token_ids")
    if not isinstance(value, list):
        raise WireError(f"BlockStored: token_ids must be an array, found {_shape(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item <= 0xFFFFFFFF:
            raise WireError(f"BlockStored: a token id must be a whole number below 2**32, found {_shape(item)}")
    return tuple(value)


def _extra_keys(fields: dict[str, Any]) -> tuple[Any, ...] | None:
    value = fields.get("extra_keys")
    if value is None:
        return None
    if not isinstance(value, list):
        raise WireError(f"BlockStored: extra_keys must be an array or nil, found {_shape(value)}")
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _whole(fields: dict[str, Any], tag: str, name: str, *, required: bool = False) -> int | None:
    value = fields.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or (required and value < 1):
        raise WireError(f"{tag}: {name} must be a {'positive ' if required else ''}whole number, found {_shape(value)}")
    return value


def _text(fields: dict[str, Any], tag: str, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise WireError(f"{tag}: {name} must be text or nil, found {_shape(value)}")
    return value


def _shape(value: object) -> str:
    if value is None:
        return "nil"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"an array of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:60]
