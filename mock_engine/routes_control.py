"""Routes about the replica itself: health, models, metrics, LoRA adapters, vLLM's development switches, our /mock/.

The development routes exist only with VLLM_SERVER_DEV_MODE=1, adapters change only with
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: as in vLLM, they are absent otherwise.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import msgspec
from aiohttp import web

from mock_engine.bodies import encode_json
from mock_engine.generation import Generation
from mock_engine.log import state
from mock_engine.metrics import CONTENT_TYPE
from mock_engine.options import VERSION
from mock_engine.protocol import check, invalid
from mock_engine.replica import Replica
from mock_engine.schemas import ABORT_REQUESTS, LOAD_LORA, UNLOAD_LORA
from mock_engine.validate import Bool, Int, Kind, Literal, Problem

PAUSE_MODES = ("abort", "wait", "keep")


class ControlRoutes:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def add(self, app: web.Application) -> None:
        router = app.router
        router.add_get("/health", self.health, allow_head=False)
        router.add_get("/ping", self.health, allow_head=False)
        router.add_post("/ping", self.health)
        router.add_get("/version", self.version, allow_head=False)
        router.add_get("/v1/models", self.models, allow_head=False)
        router.add_get("/load", self.load, allow_head=False)
        router.add_get("/metrics", self.metrics, allow_head=False)
        router.add_get("/kv_event_sources", self.kv_event_sources, allow_head=False)
        router.add_get("/mock/state", self.mock_state, allow_head=False)
        if self._replica.options.allow_runtime_lora:
            router.add_post("/v1/load_lora_adapter", self.load_lora)
            router.add_post("/v1/unload_lora_adapter", self.unload_lora)
        if self._replica.options.dev_mode:
            self._add_dev_routes(router)

    def _add_dev_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/server_info", self.server_info, allow_head=False)
        router.add_get("/is_sleeping", self.is_sleeping, allow_head=False)
        router.add_get("/is_paused", self.is_paused, allow_head=False)
        router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        router.add_post("/reset_mm_cache", self.nothing)
        router.add_post("/reset_encoder_cache", self.nothing)
        router.add_post("/sleep", self.sleep)
        router.add_post("/wake_up", self.wake_up)
        router.add_post("/pause", self.pause)
        router.add_post("/resume", self.resume)
        router.add_post("/abort_requests", self.abort_requests)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._replica.death is not None else 200)

    async def nothing(self, request: web.Request) -> web.Response:
        return _empty()

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def models(self, request: web.Request) -> web.Response:
        return _json(self._replica.models.cards())

    async def load(self, request: web.Request) -> web.Response:
        tracked = self._replica.options.enable_server_load_tracking
        return _json({"server_load": self._replica.in_flight if tracked else 0})

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._replica.metrics.exposition(self._replica.options.metrics_staleness_ms)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def kv_event_sources(self, request: web.Request) -> web.Response:
        config = self._replica.options.kv_events
        sources: dict[str, Any] = {}
        for rank, publisher in enumerate(self._replica.publishers):
            sources[str(rank)] = {
                **msgspec.structs.asdict(config),
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
            }
        return _json(sources)

    async def mock_state(self, request: web.Request) -> web.Response:
        replica = self._replica
        return _json(
            {
                "name": replica.name,
                "preset": replica.preset.name,
                "pid": os.getpid(),
                "epoch_ns": replica.clock.epoch_ns,
                "now_us": replica.clock.now_us(),
                **state(replica.drivers, take=False),
                "restarts": replica.restarts,
                "faults": replica.faults.plan.faults.active(),
                "event_seq": [publisher.next_seq for publisher in replica.publishers],
                "config": msgspec.structs.asdict(replica.config),
                "ranks": [msgspec.structs.asdict(driver.snapshot()) for driver in replica.drivers],
            }
        )

    # -- LoRA ------------------------------------------------------------------------------------------------------

    async def load_lora(self, request: web.Request) -> web.Response:
        fields = check(LOAD_LORA, await Generation.read(request))
        self._replica.models.load(fields["lora_name"], fields["lora_path"])
        return web.Response(text=f"Success: LoRA adapter '{fields['lora_name']}' added successfully.")

    async def unload_lora(self, request: web.Request) -> web.Response:
        fields = check(UNLOAD_LORA, await Generation.read(request))
        self._replica.models.unload(fields["lora_name"])
        return web.Response(text=f"Success: LoRA adapter '{fields['lora_name']}' removed successfully.")

    # -- development -----------------------------------------------------------------------------------------------

    async def server_info(self, request: web.Request) -> web.Response:
        replica = self._replica
        config: Any = {
            "model_config": {"model": replica.models.root, "max_model_len": replica.config.max_model_len},
            "cache_config": {
                "block_size": replica.config.block_size,
                "num_gpu_blocks": replica.config.num_gpu_blocks,
                "enable_prefix_caching": replica.config.enable_prefix_caching,
            },
            "scheduler_config": {
                "max_num_seqs": replica.config.max_num_seqs,
                "max_num_batched_tokens": replica.config.max_num_batched_tokens,
            },
        }
        if request.query.get("config_format") != "json":
            config = str(config)
        env = {key: value for key, value in os.environ.items() if key.startswith("VLLM_") and "KEY" not in key}
        system = {"python_version": sys.version, "os": platform.platform()}
        return _json({"vllm_config": config, "vllm_env": env, "system_env": system})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return _json({"is_sleeping": self._replica.sleep_level is not None})

    async def is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self._replica.paused is not None})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = _query(request, "reset_running_requests", Bool(), False)
        _query(request, "reset_external", Bool(), False)  # there is no connector whose cache it could reset
        return _json({"success": self._replica.reset_prefix_cache(preempt=preempt)})

    async def sleep(self, request: web.Request) -> web.Response:
        level = _query(request, "level", Int(ge=0, le=2), 1)
        await self._replica.sleep(level, _query(request, "mode", Literal(PAUSE_MODES), "abort"))
        return _json({"status": "sleeping", "level": level})

    async def wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", [])
        self._replica.wake_up()
        return _json({"status": "awake", "tags": tags or None})

    async def pause(self, request: web.Request) -> web.Response:
        mode = _query(request, "mode", Literal(PAUSE_MODES), "abort")
        await self._replica.pause(mode, _query(request, "clear_cache", Bool(), True))
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self._replica.resume()
        return _json({"status": "resumed"})

    async def abort_requests(self, request: web.Request) -> web.Response:
        fields = check(ABORT_REQUESTS, await Generation.read(request))
        aborted = self._replica.abort_all(counted=False, only=fields["request_ids"])
        return _json({"status": "aborted", "aborted": aborted})


def _query(request: web.Request, name: str, kind: Kind, default: Any) -> Any:
    """A query parameter, checked as the real server checks it."""
    if name not in request.query:
        return default
    problems: list[Problem] = []
    value = kind.parse(request.query[name], ("query", name), problems)
    if problems:
        raise invalid(problems)
    return value


def _json(value: Any) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")


def _empty() -> web.Response:
    return web.Response()
