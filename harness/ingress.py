"""A scenario's `[router]`: how routers are run, how many side by side, and which of them a request meets.

Several ingresses share nothing unless they are told to tell each other their load. Any entry of `routers` may override
each key for itself. `ingresses` and `spread` hold for every router that we start, the other keys for those of ours.
"""

from __future__ import annotations

from typing import Any

import msgspec

from harness.drive import TIME_S_MAX
from harness.spread import Spread, ingress_name
from routers import POLL_INTERVALS_MS, Signal

INGRESSES_MAX = 64
"""Every one is a process (live) or a whole policy with its index (sim)."""
OF_ANY_ROUTER = ("ingresses", "spread")


class RouterSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one router is run."""

    ingresses: int = 1
    """Router processes (live) or `Router` objects (sim) side by side."""
    spread: Spread = "turn"
    """turn: requests go round the ingresses, so that a session's next turn meets the next one; session: a session stays
    with its ingress."""
    share_load: bool = False
    """Ingresses tell each other what they have in flight."""
    share_delay_ms: float = 0.0
    """Age at which that counts."""
    ramp_s: float = 0.0
    """Time in which a replica that joins is let in bit by bit; 0: at once."""
    metrics_interval_ms: int = POLL_INTERVALS_MS[Signal.ENGINE_METRICS]
    """How often policies that need it read the engines' gauges."""
    prefix_interval_ms: int = POLL_INTERVALS_MS[Signal.REPORTED_PREFIXES]
    """How often policies that need it read what engines say they hold."""

    def __post_init__(self) -> None:
        if not 1 <= self.ingresses <= INGRESSES_MAX:
            raise ValueError(f"ingresses = {self.ingresses}: give a whole number from 1 to {INGRESSES_MAX}")
        for key, longest in (("share_delay_ms", 1000 * TIME_S_MAX), ("ramp_s", TIME_S_MAX)):
            value = getattr(self, key)
            if not 0 <= value <= longest:
                raise ValueError(f"{key} = {value}: give a time of at least 0, at most {longest:g}")
        for key in ("metrics_interval_ms", "prefix_interval_ms"):
            if not 1 <= getattr(self, key) <= 1000 * TIME_S_MAX:
                raise ValueError(f"{key} = {getattr(self, key)}: give at least 1, at most {1000 * TIME_S_MAX:g}")

    @property
    def names(self) -> tuple[str, ...]:
        """As the column `ingress` has them."""
        return tuple(ingress_name(i) for i in range(self.ingresses))

    @property
    def exchanges(self) -> bool:
        """Whether anybody is there to tell the load to."""
        return self.share_load and self.ingresses > 1

    def polls_us(self) -> dict[Signal, int]:
        """Spacing of what is polled."""
        return {
            Signal.ENGINE_METRICS: 1000 * self.metrics_interval_ms,
            Signal.REPORTED_PREFIXES: 1000 * self.prefix_interval_ms,
        }

    def describe(self) -> str:
        """What is not as a lone router would be, in words; empty where all is."""
        parts = []
        if self.ingresses > 1:
            told = f"share load {self.share_delay_ms:g} ms old" if self.share_load else "share nothing"
            parts.append(f"{self.ingresses} ingresses (by {self.spread}) that {told}")
        if self.ramp_s:
            parts.append(f"a ramp of {self.ramp_s:g} s")
        return ", ".join(parts)


SETUP_KEYS = RouterSetup.__struct_fields__


def overridden(setup: RouterSetup, given: dict[str, Any]) -> RouterSetup:
    """The setup with an entry's own keys. Raises ValueError."""
    return RouterSetup(**{**msgspec.structs.asdict(setup), **given})
