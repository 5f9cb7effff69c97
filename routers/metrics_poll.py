"""Polls the replicas' `/metrics` for policies that look at the engines' own gauges.

Polled values are stale by up to one interval plus the engine's step; that staleness is part of what such policies
are, so nothing is smoothed or predicted here. A replica that does not answer keeps its last values.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable

import aiohttp
import msgspec

from routers.router import Router
from routers.view import EngineMetrics

POLL_TIMEOUT_S = 2.0

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_ADAPTERS = "vllm:lora_requests_info"
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class PollStats(msgspec.Struct):
    polls: int = 0
    failed: int = 0


def parse_metrics(text: str, at_us: int) -> EngineMetrics | None:
    """Gauges of all ranks of one replica: requests add up, usage is the mean. None if a gauge is missing."""
    values: dict[str, list[float]] = {_RUNNING: [], _WAITING: [], _USAGE: []}
    adapters: dict[str, str] = {}
    told = -1.0
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name == _ADAPTERS:
            # One series for every state there has been; its value is the time at which it was so.
            labels, _, value = rest.rpartition("}")
            with contextlib.suppress(ValueError, IndexError):
                if float(value.split()[0]) >= told:
                    told, adapters = float(value.split()[0]), dict(_LABEL.findall(labels))
        elif name in values:
            try:
                values[name].append(float(rest.rpartition("}")[2].split()[0]))
            except (ValueError, IndexError):
                continue
    if not all(values.values()):
        return None
    return EngineMetrics(
        running=round(sum(values[_RUNNING])),
        waiting=round(sum(values[_WAITING])),
        kv_usage=sum(values[_USAGE]) / len(values[_USAGE]),
        adapters_running=_names(adapters.get("running_lora_adapters", "")),
        adapters_waiting=_names(adapters.get("waiting_lora_adapters", "")),
        adapters_max=int(most) if (most := adapters.get("max_lora", "")).isdigit() else 0,
        at_us=at_us,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


class MetricsPoll:
    def __init__(
        self, router: Router, session: aiohttp.ClientSession, now_us: Callable[[], int], interval_ms: int
    ) -> None:
        self.stats = PollStats()
        self._router = router
        self._session = session
        self._now_us = now_us
        self._interval_s = interval_ms / 1000

    async def run(self) -> None:
        """Polls all replicas at once, every interval, until cancelled."""
        while True:
            started = asyncio.get_running_loop().time()
            await asyncio.gather(*(self._poll(view.name, view.url) for view in self._router.replicas() if view.url))
            spent = asyncio.get_running_loop().time() - started
            await asyncio.sleep(max(0.0, self._interval_s - spent))

    async def _poll(self, name: str, url: str) -> None:
        self.stats.polls += 1
        try:
            async with self._session.get(
                f"{url}/metrics",
                headers={"Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=POLL_TIMEOUT_S),
            ) as reply:
                found = parse_metrics(await reply.text(), self._now_us()) if reply.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
            found = None
        if found is None:
            self.stats.failed += 1
        else:
            self._router.metrics(name, found, self._now_us())
