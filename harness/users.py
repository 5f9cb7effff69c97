"""Locust users that send a load's requests: every request gets one Locust event and one row, whatever became of it.

Importing this module imports Locust, which patches the process, so nothing but a locustfile may do it. Locust's own
table is for watching; the rows are the measurement.
"""

from __future__ import annotations

import logging
import socket
import time
from http.client import HTTPException
from typing import Any

import gevent
from locust import FastHttpUser, LoadTestShape, task
from locust.event import EventHook
from locust.exception import StopUser

from harness.load_plan import PATHS, AnswerError, Conversation
from harness.load_rows import Row
from harness.load_run import LoadRun
from harness.sse import (
    ERROR,
    ERROR_CLASSES,
    INCOMPLETE,
    OK,
    BrokenStreamError,
    TokenMeter,
    error_text,
    is_engine_error,
    read_stream,
)
from workloads import Turn

logger = logging.getLogger(__name__)

row_ended = EventHook()
"""Fires once a request with `row` (see `harness.load_rows.Row`) and `environment`, after its row was written."""

CONNECTIONS_MAX = 65_536
"""Connections a user's client may hold: never the limit of a load, which would look like a plateau."""
CONNECT_TIMEOUT_S = 30.0
EVERY_STATUS = frozenset(range(100, 600))
"""Each comes back as an answer, so that its body can be read and classified. One for all users: it has 44 KB."""
ROUTER_ERROR_HEADER = "x-routebench-router-error"
"""Our router marks the errors that are its own, which otherwise look like an engine's."""
NETWORK_GRACE_S = 30.0
"""The socket's own limit lies this far behind the request's, so that the latter decides and is named."""


class LoadUser(FastHttpUser):
    """Base for users of your own: set `host`, and what else Locust's `FastHttpUser` offers.

    A user is a slot of a closed loop; requests of an open one go round the users. Needs `environment.routebench_run`,
    which `harness.locustfile` sets when a test starts.
    """

    abstract = True
    max_retries = 0
    concurrency = CONNECTIONS_MAX

    def __init__(self, environment: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        limit_s = run.plan.request_timeout_s if run else CONNECT_TIMEOUT_S
        self.network_timeout = limit_s + NETWORK_GRACE_S
        self.connection_timeout = min(limit_s + NETWORK_GRACE_S, CONNECT_TIMEOUT_S)
        super().__init__(environment)
        agent: Any = self.client.client
        agent.valid_response_codes = EVERY_STATUS
        # A session says who it is in its header; a cookie would tie all sessions of this process to one replica.
        agent.cookiejar = None

    @task
    def hold_slot(self) -> None:
        run: LoadRun | None = getattr(self.environment, "routebench_run", None)
        if run is not None:
            run.join(self)
            try:
                run.idle.wait()
            finally:
                run.leave(self)
        raise StopUser

    def send(self, run: LoadRun, conversation: Conversation, turn: Turn, row: Row) -> None:
        """One request to its end, written into `row`."""
        plan, path = run.plan, PATHS[run.plan.api]
        meter = conversation.meter(turn)
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "X-Request-Id": row.request_id,
            plan.session_header: row.session,
        }
        body = conversation.body(turn)
        row.prompt_tokens = conversation.prompt_tokens()
        sent_ns = time.monotonic_ns()
        row.sent_us = run.us(sent_ns)
        client: Any = self.client
        try:
            with (
                gevent.Timeout(plan.request_timeout_s) as limit,
                client.post(
                    f"{plan.ingresses[row.ingress]}{path}" if row.ingress else path,
                    name=path,
                    data=body,
                    headers=headers,
                    stream=True,
                    catch_response=True,
                ) as answer,
            ):
                row.status, row.error_class, row.error = self._receive(answer, meter, limit)
                limit.cancel()
                if row.status == OK:
                    _check_answer(conversation, turn, meter, row)
                end_ns = time.monotonic_ns()
                last_ns = meter.last_ns if row.status == OK and meter.last_ns is not None else end_ns
                answer.request_meta["response_time"] = (last_ns - sent_ns) / 1e6
                answer.request_meta["response_length"] = meter.bytes
                if row.status == OK:
                    answer.success()
                else:
                    answer.failure(f"{row.error_class}: {ERROR_CLASSES[row.error_class or 'client']}")
        except Exception as bug:
            row.status, row.error_class, row.error = ERROR, "client", repr(bug)
            logger.exception("request %s failed inside the load generator", row.request_id)
        finally:
            row.end_us = run.now_us()
            row.take_meter(meter, plan.epoch_ns)
        if row.status == OK:
            self._show(meter, sent_ns)

    def _receive(self, answer: Any, meter: TokenMeter, limit: gevent.Timeout) -> tuple[str, str | None, str | None]:
        """(status, error class, message) of an exchange; reads the answer to its end."""
        raw = getattr(answer, "_response", None)
        if raw is None:
            return _not_reached(answer.error, limit)
        accepted = False
        try:
            if raw.status_code != 200:
                return _refused(raw.status_code, raw.read(), by_router=ROUTER_ERROR_HEADER in raw)
            accepted = True
            if problem := _unreadable(raw):
                raw.release()
                return INCOMPLETE, "protocol", problem
            read_stream(raw, meter)
            return meter.verdict()
        except gevent.Timeout as late:
            if late is not limit:
                raise
            return (INCOMPLETE if accepted else ERROR), "timeout", f"no end within {limit.seconds:g} s"
        except (BrokenStreamError, OSError, HTTPException) as broken:
            if meter.verdict()[0] == OK and meter.done:
                return meter.verdict()
            if meter.error:
                return INCOMPLETE, *meter.error
            return (INCOMPLETE if accepted else ERROR), "truncated", f"after {meter.chunks} token chunks: {broken}"

    def _show(self, meter: TokenMeter, sent_ns: int) -> None:
        """Live rows in Locust's table that stay out of its totals."""
        stats = self.environment.stats
        if meter.first_ns is not None and meter.last_ns is not None:
            stats.get("TTFT", "METRIC").log((meter.first_ns - sent_ns) / 1e6, 0)
            if meter.output_tokens > 1:
                stats.get("TPOT", "METRIC").log((meter.last_ns - meter.first_ns) / 1e6 / (meter.output_tokens - 1), 0)


class SessionUser(LoadUser):
    """The user of routebench's own locustfile."""


class SlotStages(LoadTestShape):
    """Base for shapes of your own: so many slots of a closed loop for so many seconds, one pair after the other. A slot
    that is taken away closes when its session has ended, and the end of the last stage ends the test."""

    abstract = True
    stages: tuple[tuple[float, int], ...] = ()

    def tick(self) -> tuple[int, float] | None:
        at_s = self.get_run_time()
        for length_s, slots in self.stages:
            if at_s < length_s:
                return slots, float(slots)
            at_s -= length_s
        return None


def _check_answer(conversation: Conversation, turn: Turn, meter: TokenMeter, row: Row) -> None:
    try:
        row.answer_ok = conversation.answered(turn, meter)
    except AnswerError as wrong:
        row.status, row.error_class, row.error, row.answer_ok = ERROR, "answer", str(wrong), False


def _not_reached(error: Exception, limit: gevent.Timeout) -> tuple[str, str, str]:
    """No answer at all: what the client library raised."""
    found = getattr(error, "original", None) or error  # the client wraps what it would have tried again
    if isinstance(found, gevent.Timeout):
        return ERROR, "timeout", f"no answer within {limit.seconds:g} s"
    if isinstance(found, socket.gaierror):
        return ERROR, "client", f"the host name cannot be resolved: {found}"
    if isinstance(found, TimeoutError):
        return ERROR, "timeout", f"no connection: {found}"
    return ERROR, "router", f"no answer: {found!r}"


def _refused(status: int, body: bytes, by_router: bool) -> tuple[str, str, str]:
    """An HTTP error. Engines answer in one known form; whatever looks otherwise, is a gateway's status, or is marked as
    a router's own word, is the router's."""
    if is_engine_error(body) and not by_router and status not in (502, 504):
        return ERROR, "engine_5xx" if status >= 500 else "engine_4xx", f"HTTP {status}: {error_text(body)}"
    return ERROR, "router", f"HTTP {status}: {error_text(body)}"


def _unreadable(raw: Any) -> str | None:
    """Why an accepted answer cannot be read as a stream, or None."""
    encoding = raw.get("content-encoding")
    if encoding and encoding != "identity":
        return (
            f"the answer is encoded as {encoding!r} although 'Accept-Encoding: identity' was sent: token instants "
            "inside a compressed stream mean nothing; switch compression off"
        )
    kind = raw.get("content-type") or ""
    if not str(kind).startswith("text/event-stream"):
        return f"the answer is of type {kind!r}, not text/event-stream: stream = true was ignored on the way"
    return None
