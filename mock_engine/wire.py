"""KV events in vLLM's msgpack forms, byte for byte.

A batch is the array `[ts, [events], rank]`. Since mid-2026 an event is a map whose first key is "type" and which leaves
out optional fields at their default; before, it was an array led by its name. The odd thing: a BlockStored map takes a
16-bit map header however few keys it has, because it could have sixteen.
"""

from collections.abc import Iterable, Sequence

import msgspec

from mock_engine.errors import EngineError
from mock_engine.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent

EVENT_FORMS = ("maps", "arrays")
_GROUP = 0
_KIND = "full_attention"


class _StoredMap(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[int] | None = None


class _RemovedMap(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _ClearedMap(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    pass


def external_hash(digest: BlockHash) -> int:
    """The 64-bit form of a digest: its last 8 bytes, big-endian."""
    return digest if isinstance(digest, int) else int.from_bytes(digest[-8:], "big")


def encode_batch(
    ts: float, events: Iterable[KvEvent], rank: int = 0, *, form: str = EVENT_FORMS[0], int_hashes: bool = True
) -> bytes:
    """One payload frame. `int_hashes` False sends whole digests, as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 does."""
    if form not in EVENT_FORMS:
        raise EngineError(f"no event form named {form!r}: choose one of {', '.join(EVENT_FORMS)}")
    encode = _as_map if form == "maps" else _as_array
    return _ENCODER.encode([float(ts), [encode(event, int_hashes) for event in events], rank])


_ENCODER = msgspec.msgpack.Encoder()


def _hashes(hashes: Iterable[BlockHash], int_hashes: bool) -> list[BlockHash]:
    return [external_hash(digest) for digest in hashes] if int_hashes else list(hashes)


def _parent(event: BlockStored, int_hashes: bool) -> BlockHash | None:
    parent = event.parent_block_hash
    return external_hash(parent) if int_hashes and parent is not None else parent


def _tokens(event: BlockStored) -> list[int]:
    if event.token_ids is None:
        raise EngineError("a symbolic sequence's event has no token ids to put on a wire: submit a TokenSequence")
    return event.token_ids


def _as_map(event: KvEvent, int_hashes: bool) -> object:
    if isinstance(event, BlockStored):
        return _StoredMap(
            block_hashes=_hashes(event.block_hashes, int_hashes),
            parent_block_hash=_parent(event, int_hashes),
            token_ids=_tokens(event),
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys or (None,) * len(event.block_hashes),
            group_idx=_GROUP,
            kv_cache_spec_kind=_KIND,
            session_id=event.session_id,
        )
    if isinstance(event, BlockRemoved):
        return _RemovedMap(_hashes(event.block_hashes, int_hashes), event.medium, _GROUP)
    return _ClearedMap()


def _as_array(event: KvEvent, int_hashes: bool) -> object:
    if isinstance(event, BlockStored):
        return [
            "BlockStored",
            _hashes(event.block_hashes, int_hashes),
            _parent(event, int_hashes),
            _tokens(event),
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
        ]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", _hashes(event.block_hashes, int_hashes), event.medium]
    assert isinstance(event, AllBlocksCleared)
    return ["AllBlocksCleared"]
