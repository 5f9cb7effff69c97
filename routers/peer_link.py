"""Tells the other ingresses what this one has in flight: a few times a second at most, over plain HTTP.

A message carries everything this router has in flight and replaces the one before, so one that is lost is made up for
by the next. It is sent when the load has changed, no more often than every 10 ms, and once a second when it has not,
so that a peer can tell silence from rest. What a peer does with it (and how late) is `PeerLoads`' affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from routers.errors import WireError
from routers.router import Router
from routers.view import PeerLoad

SEND_EVERY_S = 0.01
REST_S = 1.0
SEND_TIMEOUT_S = 1.0


class PeerMessage(msgspec.Struct, frozen=True):
    """`router` is the sender's name, `incarnation` another one for every start of it; loads by replica as
    [requests, prompt tokens, prefill tokens, active blocks]."""

    router: str
    incarnation: str
    sequence: int
    loads: dict[str, tuple[int, int, int, int]]


class LinkStats(msgspec.Struct):
    sent: int = 0
    failed: int = 0


_MESSAGE = msgspec.json.Decoder(PeerMessage)


def read_message(body: bytes) -> tuple[PeerMessage, dict[str, PeerLoad]]:
    try:
        message = _MESSAGE.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"no message of a peer ({error}): /router/peers is for other routers of this kind") from error
    return message, {name: PeerLoad(*numbers) for name, numbers in message.loads.items()}


class PeerLink:
    def __init__(
        self, router: Router, session: aiohttp.ClientSession, name: str, incarnation: str, urls: Sequence[str]
    ) -> None:
        self.stats = LinkStats()
        self._router = router
        self._session = session
        self._name = name
        self._incarnation = incarnation
        self._urls = tuple(urls)
        self._sequence = 0

    async def run(self) -> None:
        """Until cancelled. Each peer has a loop of its own, so that one that hangs keeps no other waiting."""
        await asyncio.gather(*(self._keep_telling(url) for url in self._urls))

    async def _keep_telling(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        told, told_at = -1, -REST_S
        while True:
            if self._router.load_version != told or loop.time() - told_at >= REST_S:
                told, told_at = self._router.load_version, loop.time()
                await self._post(url, self._message())
            await asyncio.sleep(SEND_EVERY_S)

    def _message(self) -> bytes:
        self._sequence += 1
        loads = {
            name: (load.requests, load.prompt_tokens, load.prefill_tokens, load.active_blocks)
            for name, load in self._router.own_loads().items()
        }
        return msgspec.json.encode(PeerMessage(self._name, self._incarnation, self._sequence, loads))

    async def _post(self, url: str, body: bytes) -> None:
        try:
            async with self._session.post(
                f"{url}/router/peers",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=SEND_TIMEOUT_S),
            ) as reply:
                await reply.read()
                ok = reply.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            ok = False
        self.stats.sent += ok
        self.stats.failed += not ok
