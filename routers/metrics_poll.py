"""Polls the replicas' `/metrics` for policies that look at the engines' own gauges.

Of a replica with several ranks requests add up and usage is the mean. The odd thing: an adapter's gauge is one series
for every state that there has been, whose value is the time of that state.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import aiohttp
import msgspec

from routers.poll import Poll
from routers.router import Router
from routers.view import EngineMetrics

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


class MetricsPoll(Poll):
    def __init__(
        self, router: Router, session: aiohttp.ClientSession, now_us: Callable[[], int], interval_ms: int
    ) -> None:
        super().__init__(router, session, now_us, interval_ms)
        self.stats = PollStats()

    async def ask(self, name: str, url: str) -> None:
        self.stats.polls += 1
        found: EngineMetrics | None = None
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
            status, body = await self.fetch(f"{url}/metrics")
            if status == 200:
                found = parse_metrics(body.decode(), self.now_us())
        if found is None:
            self.stats.failed += 1
        else:
            self.router.metrics(name, found, self.now_us())
