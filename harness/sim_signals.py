"""What a router in the simulation hears of engines, made from what the engines report: cache events and gauges."""

from __future__ import annotations

from collections.abc import Container

from mock_engine import BlockRemoved, BlockStored, Snapshot
from mock_engine import KvEvent as EngineEvent
from routers import Cleared, EngineMetrics, KvEvent, Removed, Signal, Stored


def gauges(snapshot: Snapshot, at_us: int) -> EngineMetrics:
    """An engine's state as its `/metrics` shows it."""
    return EngineMetrics(
        running=snapshot.running,
        waiting=snapshot.waiting,
        kv_usage=snapshot.used_blocks / (snapshot.used_blocks + snapshot.free_blocks),
        at_us=at_us,
    )


def polls_us(needs: Container[Signal]) -> dict[Signal, int]:
    """What a router process with these needs polls, and its spacing unless it is told otherwise."""
    if Signal.ENGINE_METRICS not in needs and Signal.REPORTED_PREFIXES not in needs:
        return {}
    from routers.service import ServiceConfig  # the shell that polls owns the defaults; its imports take time

    config = ServiceConfig()
    spacings_ms = {
        Signal.ENGINE_METRICS: config.metrics_interval_ms,
        Signal.REPORTED_PREFIXES: config.prefix_interval_ms,
    }
    return {signal: 1000 * ms for signal, ms in spacings_ms.items() if signal in needs}


def router_event(event: EngineEvent) -> KvEvent:
    """An engine's cache event as a router hears it; contents stand where tokens would be hashed."""
    if isinstance(event, BlockStored):
        return Stored(
            hashes=_names(event.block_hashes),
            parent=_name(event.parent_block_hash),
            content=event.contents or (),
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
