"""Where engines that already run publish their KV events, as vLLM tells on `GET /kv_event_sources`.

An engine names the address that it binds, often of every interface, so the host is taken from its URL. An engine with
several data-parallel ranks publishes from each, and no router here tells them apart, so it counts as telling nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from harness.processes import get_json

ANY_HOST = ("*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where one replica is reached; `kv_events` is None for one that publishes nothing, `kv_replay` for one that
    repeats nothing."""

    name: str
    url: str
    kv_events: str | None = None
    kv_replay: str | None = None


def replica_that_runs(name: str, url: str) -> ReplicaAddress:
    """An engine that was started elsewhere, and what it tells of its events."""
    try:
        told = get_json(f"{url}/kv_event_sources")
    except OSError:  # an older engine, or another one
        told = {}
    sources = list(told.values()) if isinstance(told, dict) else []
    if len(sources) != 1 or not isinstance(sources[0], dict) or sources[0].get("publisher", "zmq") != "zmq":
        return ReplicaAddress(name, url)
    events = seen_from_here(sources[0].get("endpoint"), url)
    replay = seen_from_here(sources[0].get("replay_endpoint"), url)
    return ReplicaAddress(name, url, events, replay if events else None)


def seen_from_here(endpoint: Any, url: str) -> str | None:
    """An address that the engine at `url` binds, as others connect to it; None for one that only it can reach."""
    if not isinstance(endpoint, str):
        return None
    scheme, separator, place = endpoint.partition("://")
    if not separator or scheme == "inproc":
        return None
    host, colon, port = place.rpartition(":")
    if scheme != "tcp" or not colon or host not in ANY_HOST:
        return endpoint
    own = urlsplit(url).hostname or ""
    return f"tcp://{f'[{own}]' if ':' in own else own}:{port}"


def deaf_note(router: str, replicas: Sequence[ReplicaAddress]) -> str | None:
    """Of a router that decides by KV events: whose it does not hear, in a sentence; None where it hears all."""
    deaf = [replica.name for replica in replicas if replica.kv_events is None]
    if not deaf:
        return None
    return (
        f"{router} routes by KV events and hears none of {', '.join(deaf)}: start these engines with "
        '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq"}\', which they tell on GET '
        "/kv_event_sources"
    )
