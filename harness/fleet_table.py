"""A scenario's `[fleet]`: which engines the routers under test see at the start. Pure."""

from __future__ import annotations

import msgspec

REPLICAS_MAX = 4096
"""Far beyond any fleet that somebody compared; a typing error is found before it takes the memory."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engines the routers under test see."""

    replicas: int = 4
    """Mock replicas to start, each a process of its own (live) or an engine of its own (sim)."""
    urls: tuple[str, ...] = ()
    """Engines that already run, used instead of starting mocks; live only."""

    def __post_init__(self) -> None:
        if self.replicas > REPLICAS_MAX:
            raise ValueError(f"replicas = {self.replicas}: at most {REPLICAS_MAX} can be simulated")
        if self.replicas < 1:
            raise ValueError(f"replicas = {self.replicas}: a fleet needs at least 1 replica")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls has {url!r}: give a full address such as 'http://127.0.0.1:8000'")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"r{i}" for i in range(len(self.urls) or self.replicas))
