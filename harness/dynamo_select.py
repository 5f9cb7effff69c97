"""NVIDIA Dynamo's selection service as a child process, and the few calls that placing a request takes.

The service decides, books and frees; we only tell it what happened. Its traps are respected here: an empty token
list makes its scheduler fail for good, so it is never asked without tokens, and a worker is registered once, because
doing it again wipes what is known of it. Everything is spoken over loopback HTTP, one keep-alive pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from harness.errors import ProcessLost, StartError, UsageError, choose_from
from harness.processes import PYTHON
from routers import OptionError
from routers.policies.dynamo_options import NO_WISHES, Wishes

HOST = "127.0.0.1"
READY_S = 30.0
CALL_S = 10.0
_POLL_S = 0.05

OPTIONS = {
    "assume_kv_reuse": "DYN_ROUTER_ASSUME_KV_REUSE",
    "decode_active_request_weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
    "overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "overlap_score_credit_decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
    "prefill_load_scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",
    "queue_threshold": "DYN_ROUTER_QUEUE_THRESHOLD",
    "temperature": "DYN_ROUTER_TEMPERATURE",
    "track_prefill_tokens": "DYN_ROUTER_TRACK_PREFILL_TOKENS",
    "use_kv_events": "DYN_USE_KV_EVENTS",
}
"""Our `dynamo-kv`'s option names -> the environment that the service reads."""


class Worker(msgspec.Struct, frozen=True):
    """A replica as the service is told of it."""

    name: str
    url: str
    events: str | None = None
    replay: str | None = None


class Overlap(msgspec.Struct):
    """Tokens that the chosen worker is believed to hold, by tier."""

    gpu: int = 0
    longest_matched: int = 0


class Selection(msgspec.Struct):
    """The service's answer. `effective_prefill_tokens` is what it books as prefill."""

    selection_id: str
    worker_id: int
    effective_prefill_tokens: int = 0
    overlap: Overlap = msgspec.field(default_factory=Overlap)


_SELECTION = msgspec.json.Decoder(Selection)


def environment_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as the service's environment variables. Raises UsageError for a name it cannot be told."""
    found = {}
    for key, value in options.items():
        if key not in OPTIONS:
            raise UsageError(f"dynamo-select has no option {key!r}: {choose_from(key, OPTIONS)}")
        found[OPTIONS[key]] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def wishes_body(wishes: Wishes, names: Sequence[str]) -> dict[str, Any]:
    """What a request asks of its routing, as fields of `/select`; replicas are named here and numbered there."""

    def number(name: str) -> int:
        if name not in names:
            raise OptionError(f"no worker is called {name!r}: choose from {', '.join(names)}")
        return names.index(name)

    found: dict[str, Any] = {
        key: value
        for key, value in msgspec.structs.asdict(wishes).items()
        if key not in ("pinned_worker", "allowed_worker_ids") and value
    }
    if wishes.pinned_worker is not None:
        found["pinned_worker"] = {"worker_id": number(wishes.pinned_worker), "dp_rank": 0}
    if wishes.allowed_worker_ids is not None:
        found["allowed_worker_ids"] = [number(name) for name in wishes.allowed_worker_ids]
    return found


class SelectionService:
    """One running service; `async with` starts it and ends it."""

    def __init__(
        self,
        port: int,
        workers: Sequence[Worker],
        *,
        block_size: int,
        model: str,
        options: Mapping[str, Any],
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.workers = tuple(workers)
        self.url = f"http://{HOST}:{port}"
        self._port = port
        self._block_size = block_size
        self._model = model
        self._environment = environment_of(options)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> SelectionService:
        # -P: a file named dynamo.py where we were started must not stand in for the package.
        self._process = await asyncio.create_subprocess_exec(
            *(*PYTHON, "-m", "dynamo.select_service", "--port", str(self._port)),
            env={"DYN_LOG": "warn", **os.environ, **self._environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=CALL_S), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            await self._wait("/health")
            for worker_id, worker in enumerate(self.workers):
                await self._register(worker_id, worker)
            await self._wait("/ready")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 3)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def select(self, selection_id: str, token_ids: Sequence[int], wishes: Wishes = NO_WISHES) -> Selection:
        """Chooses and books in one step, however long the service holds the request in its queue. Raises ProcessLost
        when it does not answer as it should, OptionError for wishes that name no worker of ours."""
        body = {
            "selection_id": selection_id,
            "model_name": self._model,
            "token_ids": token_ids,
            **wishes_body(wishes, [worker.name for worker in self.workers]),
        }
        return _SELECTION.decode(await self._call("POST", "/select_and_reserve", body, patient=True))

    async def prefill_complete(self, selection_id: str) -> None:
        await self._call("POST", f"/reservations/{selection_id}/prefill_complete")

    async def free(self, selection_id: str) -> None:
        await self._call("DELETE", f"/reservations/{selection_id}")

    async def loads(self) -> Any:
        """What the service believes every worker owes."""
        return msgspec.json.decode(await self._call("GET", "/loads"))

    async def _register(self, worker_id: int, worker: Worker) -> None:
        record: dict[str, Any] = {
            "worker_id": worker_id,
            "endpoint": worker.url,
            "block_size": self._block_size,
            "model_name": self._model,
        }
        if worker.events is not None:
            record["kv_events_endpoint"] = worker.events
        if worker.replay is not None:
            record["replay_endpoint"] = worker.replay
        if self._max_num_batched_tokens is not None:
            record["max_num_batched_tokens"] = self._max_num_batched_tokens
        try:
            await self._call("POST", "/workers", record)
        except ProcessLost as error:
            raise StartError(f"replica {worker.name} was refused: {error}") from error

    async def _call(self, method: str, path: str, body: Any = None, *, patient: bool = False) -> bytes:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            limit = aiohttp.ClientTimeout(total=None if patient else CALL_S)
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=limit
            ) as reply:
                text = await reply.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ProcessLost(
                f"the selection service does not answer {path}: {error or type(error).__name__}"
            ) from error
        if reply.status >= 300:
            said = text.decode("utf-8", "replace").strip()[:300]
            raise ProcessLost(f"the selection service answered {path} with {reply.status}: {said}")
        return text

    async def _wait(self, path: str) -> None:
        assert self._session is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self.running:
                code = self._process.returncode if self._process is not None else None
                raise StartError(f"the selection service ended with exit code {code} before it was ready")
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with self._session.get(self.url + path) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
        raise StartError(f"the selection service did not answer {path} with 200 within {READY_S:.0f} s")
