"""One question put to every replica at intervals: what the polls of gauges and of reported prefixes share.

Law: all replicas are asked at once, the next round begins an interval after the last one began, or when its slowest
answer has come, and a replica that does not answer keeps what it said before. What is polled is old by up to an
interval plus the engine's step; that is part of what policies that read it are, so nothing is smoothed or predicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from routers.router import Router

ANSWER_S = 2.0
"""A replica that takes longer to say how it is counts as one that does not say."""


class Poll:
    """Derive and write `ask`."""

    def __init__(
        self, router: Router, session: aiohttp.ClientSession, now_us: Callable[[], int], interval_ms: int
    ) -> None:
        self.router = router
        self.now_us = now_us
        self._session = session
        self._interval_s = interval_ms / 1000

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            started = asyncio.get_running_loop().time()
            await asyncio.gather(*(self.ask(view.name, view.url) for view in self.router.replicas() if view.url))
            spent = asyncio.get_running_loop().time() - started
            await asyncio.sleep(max(0.0, self._interval_s - spent))

    async def ask(self, name: str, url: str) -> None:
        """Asks one replica and tells the router. Whatever goes wrong there is counted, never raised."""
        raise NotImplementedError(f"{type(self).__name__} has no ask(name, url): write one")

    async def fetch(self, url: str) -> tuple[int, bytes]:
        """(status, body) of a GET. Raises what aiohttp does."""
        async with self._session.get(
            url,
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        ) as reply:
            return reply.status, await reply.read()
