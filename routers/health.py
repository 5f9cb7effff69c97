"""Looks at replicas that are down until they answer, and says on stderr who went and who came back.

Carries out what `routers.down` says: asked is `/health`, at once and then once an interval, and only of those that are
down, so a healthy replica never hears of it. An answer below 500 is one; a server whose engine is dead says 503 and
stays down, and one that has no such route is there all the same. The odd thing: an answer that is cut short only makes
a replica doubtful, because many a reason for that is the request's own; it is down if it does not answer then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from routers.poll import ANSWER_S
from routers.router import Router


class Health:
    """`spawn` starts a task and answers for its failure."""

    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        now_us: Callable[[], int],
        interval_ms: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._router = router
        self._session = session
        self._now_us = now_us
        self._interval_s = interval_ms / 1000
        self._spawn = spawn
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._doubted: set[str] = set()

    def broken(self, replica: str, error: Exception) -> None:
        """It took no connection, or broke one before it answered."""
        if not self._router.unreachable(replica, self._now_us()):
            return
        _say(f"replica {replica} is down: {error}")
        before = self._looking.get(replica)
        if before is not None:  # it was down before, and the next look would come late
            before.cancel()
        self._looking[replica] = self._spawn(self._look(replica))

    def doubted(self, replica: str, error: Exception) -> None:
        """It broke off in the middle of an answer."""
        if self._interval_s and replica not in self._doubted and replica not in self._router.down:
            self._doubted.add(replica)
            self._spawn(self._ask(replica, error))

    def answered(self, replica: str) -> None:
        """It answered a request."""
        since_us = self._router.down.since_us().get(replica) if self._router.down else None
        if since_us is not None and self._router.reachable(replica, self._now_us()):
            _say(f"replica {replica} is back after {(self._now_us() - since_us) / 1e6:.3f} s")

    def state(self) -> list[dict[str, Any]]:
        """What `/router/state` says of it."""
        return [{"replica": name, "since_us": since_us} for name, since_us in self._router.down.since_us().items()]

    async def _ask(self, replica: str, error: Exception) -> None:
        try:
            if not await self._answers(replica):
                self.broken(replica, error)
        finally:
            self._doubted.discard(replica)

    async def _look(self, replica: str) -> None:
        while replica in self._router.down:
            if await self._answers(replica):
                self.answered(replica)
            else:
                await asyncio.sleep(self._interval_s)

    async def _answers(self, replica: str) -> bool:
        url = self._router.url(replica)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
            async with self._session.get(
                f"{url}/health", timeout=aiohttp.ClientTimeout(total=ANSWER_S), allow_redirects=False
            ) as answer:
                return answer.status < 500
        return False


def _say(text: str) -> None:
    print(f"router: {text}", file=sys.stderr, flush=True)
