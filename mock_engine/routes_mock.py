"""Routes that no vLLM has: the replica's faults, its restart, and the prefixes that it says it holds.

`/prefix_cache_state` is what the text on prefix-aware routing asks engines for; no engine serves it yet. The rest lives
under /mock/ and needs no flag to be open: a mock has nothing to guard.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from mock_engine.bodies import encode_json
from mock_engine.errors import ConfigError, RequestError
from mock_engine.faults import OFF
from mock_engine.generation import Generation
from mock_engine.prefix_report import FORMS
from mock_engine.protocol import bad_request
from mock_engine.replica import Replica


class MockRoutes:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def add(self, app: web.Application) -> None:
        app.router.add_get("/prefix_cache_state", self.prefix_cache_state, allow_head=False)
        app.router.add_get("/mock/faults", self.faults, allow_head=False)
        app.router.add_post("/mock/faults", self.change_faults)
        app.router.add_delete("/mock/faults", self.clear_faults)
        app.router.add_post("/mock/restart", self.restart)

    async def prefix_cache_state(self, request: web.Request) -> web.Response:
        form = request.query.get("form", FORMS[0])
        if form not in FORMS:
            raise bad_request(f"No report of form {form!r}: choose one of {', '.join(FORMS)}.", "form")
        return _json(self._replica.prefix_report.body(form))

    async def faults(self, request: web.Request) -> web.Response:
        return _json(self._told())

    async def change_faults(self, request: web.Request) -> web.Response:
        """Sets the faults that the body names and leaves the others; null puts one back to its default."""
        changes = await Generation.read(request)
        if not isinstance(changes, dict):
            raise bad_request('Send an object of faults, as {"http_500": 0.1}.')
        injector = self._replica.faults
        try:
            faults = injector.plan.faults.changed(changes)
        except ConfigError as error:
            raise RequestError(400, str(error)) from error
        injector.set(faults, keep=request.transport)
        return _json(self._told())

    async def clear_faults(self, request: web.Request) -> web.Response:
        self._replica.faults.set(OFF)
        return _json(self._told())

    async def restart(self, request: web.Request) -> web.Response:
        """In place: same address, empty cache, nothing announced. The port stays closed for `slow_start_ms`."""
        self._replica.faults.trigger("restart", keep=request.transport)
        return _json({"status": "restarted", "restarts": self._replica.restarts})

    def _told(self) -> dict[str, Any]:
        injector = self._replica.faults
        return {
            "faults": msgspec.structs.asdict(injector.plan.faults),
            "injected": dict(sorted(injector.counts.items())),
        }


def _json(value: Any) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")
