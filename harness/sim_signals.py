"""What a router in the simulation hears of engines, made from what the engines report: cache events and gauges."""

from __future__ import annotations

from mock_engine import BlockRemoved, BlockStored, Snapshot
from mock_engine import KvEvent as EngineEvent
from routers import Cleared, EngineMetrics, KvEvent, Removed, Stored, with_extra_keys


def gauges(snapshot: Snapshot, at_us: int) -> EngineMetrics:
    """An engine's state as its `/metrics` shows it."""
    return EngineMetrics(
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_usage=snapshot.used_blocks / (snapshot.used_blocks + snapshot.free_blocks),
        at_us=at_us,
    )


def router_event(event: EngineEvent, *, overlook_salts: bool = False) -> KvEvent:
    """An engine's cache event as a router hears it; contents stand where tokens would be hashed, and a salt is part of
    its block's content unless the router overlooks it."""
    if isinstance(event, BlockStored):
        content = event.contents or ()
        if event.extra_keys is not None and not overlook_salts:
            content = tuple(
                with_extra_keys(value, extra) if extra else value
                for value, extra in zip(content, event.extra_keys, strict=True)
            )
        return Stored(
            hashes=_names(event.block_hashes),
            parent=_name(event.parent_block_hash),
            content=content,
            block_size=event.block_size,
            medium=event.medium,
            lora_name=event.lora_name,
        )
    if isinstance(event, BlockRemoved):
        return Removed(hashes=_names(event.block_hashes), medium=event.medium)
    return Cleared()


def _names(hashes: tuple[int | bytes, ...]) -> tuple[int, ...]:
    return hashes  # type: ignore[return-value]  # symbolic sequences name their blocks by whole numbers


def _name(key: int | bytes | None) -> int | None:
    return key  # type: ignore[return-value]  # as above
