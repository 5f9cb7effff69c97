"""What other ingresses have in flight: N router processes that tell each other their load, with a set delay.

Pure: messages come in with an instant, and count from `delay_us` later on. Law: what is believed of a peer is its
newest message that is old enough, and nothing once it has been silent for `silence_us`, so that a peer that died does
not weigh on the fleet for ever. Without a `PeerLoads` an ingress knows its own load alone, as real ones do by default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from routers.config import at_least
from routers.view import NO_LOAD, PeerLoad

SILENCE_US = 5_000_000


class PeerStats(msgspec.Struct):
    messages: int = 0
    out_of_order: int = 0  # older than what the same peer said already
    silenced: int = 0  # peers forgotten because they said nothing for too long


class _Peer:
    __slots__ = ("coming", "heard_us", "incarnation", "loads", "sequence")

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.sequence = -1
        self.heard_us = 0
        self.loads: Mapping[str, PeerLoad] = {}
        self.coming: deque[tuple[int, Mapping[str, PeerLoad]]] = deque()


class PeerLoads:
    """`delay_us`: age that a message must have before it counts, on top of what its transport took."""

    def __init__(self, delay_us: int = 0, silence_us: int = SILENCE_US) -> None:
        at_least(0, delay_us=delay_us)
        self.stats = PeerStats()
        self._delay_us = delay_us
        self._silence_us = silence_us
        self._peers: dict[str, _Peer] = {}
        self._sum: dict[str, PeerLoad] | None = {}

    def hear(
        self, peer: str, loads: Mapping[str, PeerLoad], now_us: int, *, sequence: int, incarnation: str = ""
    ) -> None:
        """All that `peer` has in flight, by replica. Numbers of one incarnation only grow; another one starts anew."""
        self.stats.messages += 1
        known = self._peers.get(peer)
        if known is None or known.incarnation != incarnation:
            known = self._peers[peer] = _Peer(incarnation)
            self._sum = None
        if sequence <= known.sequence:
            self.stats.out_of_order += 1
            return
        known.sequence, known.heard_us = sequence, now_us
        known.coming.append((now_us + self._delay_us, dict(loads)))

    def loads(self, now_us: int) -> Mapping[str, PeerLoad]:
        """Load of all peers together, by replica, as far as it is known by now."""
        for name, peer in list(self._peers.items()):
            while peer.coming and peer.coming[0][0] <= now_us:
                peer.loads = peer.coming.popleft()[1]
                self._sum = None
            if now_us - peer.heard_us > self._silence_us + self._delay_us:
                del self._peers[name]
                self.stats.silenced += 1
                self._sum = None
        if self._sum is None:
            self._sum = {}
            for peer in self._peers.values():
                for replica, load in peer.loads.items():
                    self._sum[replica] = _add(self._sum.get(replica, NO_LOAD), load)
        return self._sum

    def peers(self) -> tuple[str, ...]:
        """Those heard of and not silent."""
        return tuple(self._peers)


def _add(one: PeerLoad, other: PeerLoad) -> PeerLoad:
    return PeerLoad(
        one.requests + other.requests,
        one.prompt_tokens + other.prompt_tokens,
        one.prefill_tokens + other.prefill_tokens,
        one.active_blocks + other.active_blocks,
    )
