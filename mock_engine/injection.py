"""Does to a replica what its fault plan decides: refuses answers, stalls or cuts streams, crashes, and writes it down.

Only the generation routes are hit, so health, metrics and the switches of the mock itself always answer (but for a
port that is closed). Every fault that happens is one line of the faults log and counted in GET /mock/faults.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web

from mock_engine.clock import Clock
from mock_engine.errors import RequestError
from mock_engine.faults import UNHARMED, FaultPlan, Faults, RequestFault
from mock_engine.log import ReplicaLog
from mock_engine.reply import Reply
from mock_engine.request_keys import request_key

FAULTY_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})
CRASH_CODE = 70  # of a process that a fault ended

FAULT: Any = request_key("fault", RequestFault)  # what becomes of a request, set as it arrives


class Outside(Protocol):
    """What only the server around a replica can do."""

    def refuse(self, wall_s: float) -> None: ...

    def restart(self, keep: object | None) -> None:
        """`keep` is the transport of whoever asked for it, to be answered."""


class Injector:
    def __init__(self, plan: FaultPlan, log: ReplicaLog, clock: Clock) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self.outside: Outside | None = None
        self._log = log
        self._clock = clock

    def note(self, fault: str, **details: Any) -> None:
        self.counts[fault] += 1
        self._log.fault(self._clock.now_us(), fault, details)

    def set(self, faults: Faults, keep: object | None = None) -> None:
        """From now on; a trigger whose count is 0 goes off."""
        for action in self.plan.set(faults):
            self.trigger(action, keep)

    def trigger(self, action: str, keep: object | None = None, **details: Any) -> None:
        """`action` is crash, restart or refuse."""
        if action == "crash":
            self.note(action, **details)
            os._exit(CRASH_CODE)
        assert self.outside is not None, "a replica without a server has no port to close"
        if action == "restart":
            self.note(action, **details)
            self.outside.restart(keep)
        else:
            self.note(action, refuse_ms=self.plan.faults.refuse_ms, **details)
            self.outside.refuse(self._clock.wall_us(self.plan.faults.refuse_ms * 1000) / 1e6)

    def arrival(self, request: web.Request) -> None:
        """Decides a generation request's fate and keeps it with the request. Raises RequestError where it is an error
        status, ConnectionResetError where the replica goes down first."""
        fault = self.plan.request()
        if fault is UNHARMED:
            return
        name = _name(request)
        for action in fault.then:
            self.trigger(action, None, **name)
            if action == "restart":
                raise ConnectionResetError("the replica restarts")
        if fault.status is not None:
            self.note(f"http_{fault.status}", **name)
            phrase = HTTPStatus(fault.status).phrase
            kind = "InternalServerError" if fault.status == 500 else phrase
            raise RequestError(fault.status, f"{phrase} (a fault that was asked for).", kind)
        if fault.stall_after is not None or fault.cut_after is not None:
            request[FAULT] = fault

    def spoil_whole(self, request: web.Request, reply: Reply) -> None:
        """Lets an answer that is no stream end in silence, if its request is to be stalled or cut."""
        fault = request.get(FAULT)
        if fault is None:
            return

        _, cuts = _end(fault)

        def never() -> None:
            self.note("cut" if cuts else "stall", **_name(request), tokens=_tokens(reply))
            if cuts and request.transport is not None:
                request.transport.abort()

        reply.on_end = never

    def spoiled(self, request: web.Request, reply: Reply, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """`write`, or one that stops somewhere if this stream is to be stalled or cut."""
        fault = request.get(FAULT)
        if fault is None:
            return write
        name, tokens_max, cuts = _name(request), *_end(fault)
        over = False

        def write_some(data: bytes) -> None:
            nonlocal over
            if over:
                return
            tokens = _tokens(reply)
            if tokens <= tokens_max:
                write(data)
                return
            over = True
            reply.on_end = _nothing
            self.note("cut" if cuts else "stall", **name, tokens=tokens_max)
            if cuts and request.transport is not None:
                request.transport.abort()

        return write_some


def _end(fault: RequestFault) -> tuple[int, bool]:
    """(tokens that still go out, whether the socket is cut then); whichever comes first."""
    stall, cut = fault.stall_after, fault.cut_after
    if cut is not None and (stall is None or cut <= stall):
        return cut, True
    assert stall is not None
    return stall, False


def _tokens(reply: Reply) -> int:
    return sum(choice.count for choice in reply.choices)


def _name(request: web.Request) -> dict[str, str | None]:
    return {"request_id": request.headers.get("X-Request-Id")}


def _nothing() -> None:
    return None
