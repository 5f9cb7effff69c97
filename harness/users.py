"""Locust users that hold sessions: one user is one slot, and takes the next session when its own has ended.

Every request gets one Locust event and one row, whatever became of it; a session whose turn failed ends there, and
its further turns are rows without `sent_us`. Importing this module imports Locust, which patches the process, so
nothing but a locustfile may do it. Locust's own table is for watching; the rows are the measurement.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any

import gevent
from gevent.event import Event
from locust import FastHttpUser, task
from locust.exception import StopUser

from harness.errors import UsageError
from harness.load_plan import PATHS, AnswerError, Conversation, LoadPlan
from harness.load_rows import Row, RowFiles
from harness.slots import Slots
from harness.sse import (
    CANCELLED,
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
from workloads import Session, Streams, Turn, make_workload

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
ROUTER_ERROR_HEADER = "x-routebench-router-error"
"""Our router marks the errors that are its own, which otherwise look like an engine's."""
NETWORK_GRACE_S = 30.0
"""The socket's own limit lies this far behind the request's, so that the latter decides and is named."""


class Share:
    """The part of a workload that one of several load processes sends: every `of`-th session, so none is sent twice."""

    def __init__(self, plan: LoadPlan, rank: int, of: int) -> None:
        self._workload = make_workload(plan.workload)
        self.kind = self._workload.kind
        self.barrier = self._workload.barrier
        if self.barrier and of > 1:
            raise UsageError(
                f"the workload {self.kind!r} has barrier = true and {of} load processes share it: only "
                "one process can see when a step has ended; use one process, or barrier = false"
            )
        self._rank, self._of = rank, of
        self._warmup_sessions = plan.warmup_sessions
        self.session_count = len(range(rank, self._workload.session_count, of))
        self._warm: set[str] = set()

    def sessions(self, streams: Streams) -> Iterator[Session]:
        for number, session in enumerate(self._workload.sessions(streams)):
            if number % self._of == self._rank:
                if number < self._warmup_sessions:
                    self._warm.add(session.session_id)
                yield session

    def phase(self, session: Session) -> str:
        return "warmup" if session.session_id in self._warm else "steady"


class LoadRun:
    """One test in this process, from start to stop: its sessions, slots, rows and counts.

    `on_all_done` is called once, when the last session has ended.
    """

    def __init__(self, plan: LoadPlan, *, rank: int = 0, of: int = 1, on_all_done: Callable[[], None]) -> None:
        self.plan = plan
        self.rank, self.of = rank, of
        self._share = Share(plan, rank, of)
        self._slots = Slots(self._share, Streams(plan.seed))
        self.files = RowFiles(plan.rows_dir)
        self._on_all_done = on_all_done
        self.stopping = Event()
        self._start_ns = time.monotonic_ns()
        self._opened = 0
        self._taken = 0
        self._active = 0
        self._wakes: dict[int, Event] = {}

    @property
    def sessions_total(self) -> int:
        return self._share.session_count

    @property
    def issued(self) -> int:
        """Requests that were sent and have a row."""
        return sum(self.files.counts.values())

    def us(self, instant_ns: int) -> int:
        """An instant as rows give it."""
        return (instant_ns - self.plan.epoch_ns) // 1000

    def open_slot(self) -> tuple[int, int]:
        """(number of a new slot, instant at which it opens)."""
        slot = self._opened
        self._opened += 1
        place = self.rank + self.of * slot
        opens_ns = self._start_ns + self.plan.ramp_us * place // self.plan.concurrency * 1000
        return slot, max(opens_ns, time.monotonic_ns())

    def pause_until(self, due_ns: int) -> bool:
        """Waits for an instant; False when the run is to end instead."""
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            if self.stopping.wait(left_ns / 1e9):
                return False
        return not self.stopping.is_set()

    def take(self, slot: int, due_ns: int) -> tuple[Session, int] | None:
        """The slot's next session and the instant at which it was due; None when there is none for it any more.
        Waits at a barrier."""
        while not self.stopping.is_set():
            wake = self._wakes[slot] = Event()
            session = self._slots.take(slot)
            if session is not None:
                self._taken += 1
                self._active += 1
                return session, due_ns
            if self._taken == self.sessions_total:
                return None
            wake.wait()
            due_ns = time.monotonic_ns()
        return None

    def session_ended(self, session: Session) -> None:
        self._active -= 1
        for slot in self._slots.ended(session):
            self._wakes[slot].set()
        if self._taken == self.sessions_total and not self._active and not self.stopping.is_set():
            self._on_all_done()

    def row(self, session: Session, turn: Turn) -> Row:
        """A row for a turn that was not sent yet."""
        return Row(
            request_id=f"{session.session_id}-{turn.index}",
            session=session.session_id,
            turn=turn.index,
            group=session.group,
            rollout_step=session.rollout_step,
            phase=self._share.phase(session),
            api=self.plan.api,
            status=CANCELLED,
            error_class="cut",
        )

    def stop(self) -> None:
        """No further turn starts; who waits wakes up."""
        self.stopping.set()
        for wake in self._wakes.values():
            wake.set()

    def finish(self, **facts: Any) -> None:
        """Writes the account of the run and closes the files. Every user must have ended."""
        counts = self.files.counts
        self.files.event(
            "end",
            t_us=self.us(time.monotonic_ns()),
            issued=self.issued,
            **counts,
            not_sent=self.files.unsent,
            sessions=self.sessions_total,
            sessions_started=self._taken,
            slots=self._opened,
            **facts,
        )
        self.files.close()


class SessionUser(FastHttpUser):
    """One session slot. Needs `environment.routebench_run`, which `harness.locustfile` sets when a test starts."""

    max_retries = 0
    concurrency = 1

    def __init__(self, environment: Any) -> None:
        run: LoadRun | None = getattr(environment, "routebench_run", None)
        limit_s = run.plan.request_timeout_s if run else CONNECT_TIMEOUT_S
        self.network_timeout = limit_s + NETWORK_GRACE_S
        self.connection_timeout = min(limit_s + NETWORK_GRACE_S, CONNECT_TIMEOUT_S)
        super().__init__(environment)
        # Every status comes back as an answer, so that its body can be read and classified.
        agent: Any = self.client.client
        agent.valid_response_codes = frozenset(range(100, 600))

    @task
    def hold_slot(self) -> None:
        run: LoadRun | None = getattr(self.environment, "routebench_run", None)
        if run is None:
            raise StopUser
        slot, due_ns = run.open_slot()
        if run.pause_until(due_ns):
            while (taken := run.take(slot, due_ns)) is not None:
                session, due_ns = taken
                try:
                    due_ns = self._converse(run, session, due_ns)
                finally:
                    run.session_ended(session)
        raise StopUser

    def _converse(self, run: LoadRun, session: Session, due_ns: int) -> int:
        """Runs a session's turns; returns the instant of its end."""
        conversation = Conversation(run.plan, session)
        reached = 0
        why = "the run ended first"
        try:
            for turn in session.turns:
                due_ns += turn.think_us * 1000
                if not run.pause_until(due_ns):
                    break
                row = run.row(session, turn)
                reached = turn.index + 1
                try:
                    due_ns = self._request(run, conversation, turn, row, due_ns)
                finally:
                    run.files.row(row)
                if row.status != OK:
                    why = f"turn {turn.index} of the session ended as {row.status}"
                    break
        finally:
            for turn in session.turns[reached:]:
                row = run.row(session, turn)
                row.error = f"not sent: {why}"
                run.files.row(row)
        return due_ns

    def _request(self, run: LoadRun, conversation: Conversation, turn: Turn, row: Row, due_ns: int) -> int:
        """One request to its end, written into `row`; returns the instant of the end."""
        plan = run.plan
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
        row.scheduled_us = run.us(due_ns)
        row.error = "the run ended while the request was in flight"
        sent_ns = time.monotonic_ns()
        row.sent_us = run.us(sent_ns)
        client: Any = self.client
        try:
            with (
                gevent.Timeout(plan.request_timeout_s) as limit,
                client.post(PATHS[plan.api], data=body, headers=headers, stream=True, catch_response=True) as answer,
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
            end_ns = time.monotonic_ns()
            row.end_us = run.us(end_ns)
            row.take_meter(meter, plan.epoch_ns)
        if row.status == OK:
            self._show(meter, sent_ns)
        return end_ns

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
