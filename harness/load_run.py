"""One test in one load process: its share of the schedule, its requests in flight, its rows and counts.

A single greenlet follows the schedule and starts a greenlet for every request on the instant that the plan says, so a
slow answer never holds back another request. Users only hold slots open and lend their HTTP client. Every request gets
one row, whatever became of it, and every turn of a started session that was never sent gets one without `sent_us`.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import gevent
import msgspec
from gevent.event import Event

from harness.in_flight import InFlight
from harness.load_plan import Conversation, LoadPlan
from harness.load_rows import Row, RowFiles
from harness.planned import check_together, planned, share_of
from harness.schedule import Due, Schedule
from harness.sse import CANCELLED, OK
from workloads import Session, Streams, Turn, make_workload

CLOCK_SLACK_US = 500_000
"""Time between the start of a test and instant 0 of an open loop: Locust spawns its users meanwhile."""
RESET_TIMEOUT_S = 10.0


class Sender(Protocol):
    """A user: sends one request and fills in its row."""

    def send(self, run: LoadRun, conversation: Conversation, turn: Turn, row: Row) -> None: ...


class LoadRun:
    """From start to stop. `on_all_done` is called once, when nothing is left to send or to wait for.

    `start_ns` is the instant (of this machine's monotonic clock) from which an open loop counts; all processes of a run
    are given the same.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        rank: int = 0,
        of: int = 1,
        start_ns: int | None = None,
        on_all_done: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.rank, self.of = rank, of
        workload = make_workload(plan.workload)
        check_together(workload, plan, of)
        self.start_us = self.us(start_ns or time.monotonic_ns()) + (CLOCK_SLACK_US if plan.open_loop else 0)
        entries = share_of(planned(workload, plan, Streams(plan.seed)), rank, of)
        self.schedule = Schedule(workload, plan, entries, self.start_us)
        self.files = RowFiles(plan.rows_dir)
        self.stopping = False
        self.idle = Event()
        """Nothing is in flight and nothing will be."""
        self.on_row: list[Callable[[Row], None]] = []
        self._on_all_done = on_all_done
        self._users: deque[Sender] = deque()
        self._opened = 0
        self._changed = Event()
        self._flying: dict[str, tuple[gevent.Greenlet, Row]] = {}
        self._measured = InFlight()
        self._talks: dict[str, Conversation] = {}
        self._why = "the run ended while the request was in flight"
        if plan.open_loop and plan.concurrency is not None:
            self.schedule.open_slots(len(range(rank, plan.concurrency, of)))
        self._pump = gevent.spawn(self._follow)

    @property
    def issued(self) -> int:
        """Requests that were sent and have a row."""
        return sum(self.files.counts.values())

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def us(self, instant_ns: int) -> int:
        """An instant as rows give it."""
        return (instant_ns - self.plan.epoch_ns) // 1000

    def now_us(self) -> int:
        return self.us(time.monotonic_ns())

    # -- users ----------------------------------------------------------------------------------------------------

    def join(self, user: Sender) -> None:
        """A user has come: its client can be used, and a closed loop has a slot more."""
        self._users.append(user)
        if not self.plan.open_loop:
            assert self.plan.concurrency is not None
            place = self.rank + self.of * self._opened
            opens_us = self.start_us + round(self.plan.ramp_s * 1e6) * place // self.plan.concurrency
            self.schedule.open_slot(max(opens_us, self.now_us()))
        self._opened += 1
        self._changed.set()

    def leave(self, user: Sender) -> None:
        """A user goes; its slot closes when it is free. The last client stays in use for what still goes on."""
        if len(self._users) > 1:
            self._users.remove(user)
        if not self.plan.open_loop and not self.stopping:
            self.schedule.close_slot()

    # -- the plan's clock -----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self.idle.is_set():
            self._changed.clear()
            if self._users:
                for due in self.schedule.take(self.now_us()):
                    self._launch(due)
            self._after_change()
            if self.idle.is_set():
                return
            next_us = self.schedule.next_us() if self._users else None
            if next_us is None:
                self._changed.wait()
            elif (left_us := next_us - self.now_us()) > 0:
                self._changed.wait(left_us / 1e6)
            else:
                gevent.sleep(0)

    def _after_change(self) -> None:
        for step in self.schedule.syncs():
            gevent.spawn(self._sync_weights, step)
        if self.schedule.stopped and not self.stopping:  # the drain's limit has passed
            self.stopping = True
            self.cancel(f"still in flight when the drain of {self.plan.drain_s:g} s was over")
        self._list_cuts()
        if self.schedule.done and not self.idle.is_set():
            self.idle.set()
            self._changed.set()
            self._on_all_done()

    def _launch(self, due: Due) -> None:
        turn = due.session.turns[due.turn]
        row = self._row(due.session, turn, due.phase, due.number)
        row.ready_us, row.scheduled_us = due.ready_us, due.due_us
        user = self._users[0]
        self._users.rotate(-1)
        greenlet = gevent.Greenlet(self._carry, user, due.session, turn, row)
        self._flying[row.request_id] = (greenlet, row)
        if due.phase == "steady":
            self._measured.begin(self.now_us())
        greenlet.start()

    def _carry(self, user: Sender, session: Session, turn: Turn, row: Row) -> None:
        """One request from its start to its row."""
        talk = self._talks.get(session.session_id)
        if talk is None:
            talk = self._talks[session.session_id] = Conversation(self.plan, session)
        row.error = self._why
        try:
            user.send(self, talk, turn, row)
        except gevent.GreenletExit:
            row.error = self._why
        finally:
            self._land(session, turn, row)

    def _land(self, session: Session, turn: Turn, row: Row) -> None:
        del self._flying[row.request_id]
        if row.phase == "steady":
            self._measured.end(self.now_us())
        self.files.row(row)
        if self.files.failure and not self.stopping:
            self._give_up()
        for listener in self.on_row:
            listener(row)
        if row.status != OK or turn.index + 1 == len(session.turns):
            self._talks.pop(session.session_id, None)
        end_us = row.end_us if row.end_us is not None else self.now_us()
        why = f"turn {turn.index} of the session ended as {row.status}"
        self.schedule.ended(session, turn.index, end_us, ok=row.status == OK, why=why)
        self._changed.set()

    def _row(self, session: Session, turn: Turn, phase: str, number: int) -> Row:
        """A row for a turn that was not sent yet."""
        return Row(
            request_id=f"{session.session_id}-{turn.index}",
            ingress=self.plan.ingress(number, turn.index),
            session=session.session_id,
            turn=turn.index,
            group=session.group,
            rollout_step=session.rollout_step,
            phase=phase,
            api=self.plan.api,
            status=CANCELLED,
            error_class="cut",
        )

    def _list_cuts(self) -> None:
        for cut in self.schedule.cuts():
            for turn in cut.session.turns[cut.turn :]:
                row = self._row(cut.session, turn, cut.phase, cut.number)
                row.error = f"not sent: {cut.why}"
                self.files.row(row)

    # -- weights --------------------------------------------------------------------------------------------------

    def _sync_weights(self, step: int) -> None:
        answers = gevent.joinall([gevent.spawn(reset_cache, url) for url in self.plan.replicas.values()])
        counts = {result: sum(a.value == result for a in answers) for result in ("done", "refused", "failed")}
        self.files.event("weight_sync", t_us=self.now_us(), step=step, **counts)
        self.schedule.synced(self.now_us())
        self._changed.set()

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No further turn starts."""
        self.stopping = True
        if not self.schedule.stopped:
            self.schedule.stop("the run ended first")
        self._after_change()
        self._changed.set()

    def _give_up(self) -> None:
        """Rows are the measurement: without them there is nothing to go on for."""
        self.stopping = True
        print(
            f"error: rows cannot be written ({self.files.failure}): make room or name another folder; it ends here",
            file=sys.stderr,
            flush=True,
        )
        self.schedule.stop("its row could not be written")
        gevent.spawn(self.cancel, "cancelled: rows could not be written any more")

    def cancel(self, why: str) -> None:
        """Breaks off what is in flight; every request of it gets its row."""
        self._why = why
        gevent.killall([greenlet for greenlet, _ in self._flying.values()], block=True)
        for _, row in list(self._flying.values()):  # one that had not begun when it was killed
            row.error = "not sent: the run ended first"
            session, turn = self._due_of(row)
            self._land(session, turn, row)

    def _due_of(self, row: Row) -> tuple[Session, Turn]:
        greenlet = self._flying[row.request_id][0]
        _, session, turn, _ = greenlet.args
        return session, turn

    def finish(self, **facts: Any) -> None:
        """Cancels the rest, writes the account of the run and closes the files."""
        self.stop()
        self.cancel("the run ended while the request was in flight")
        self._list_cuts()
        self._pump.kill()
        self.files.event(
            "end",
            t_us=self.now_us(),
            rank=self.rank,
            issued=self.issued,
            **self.files.counts,
            not_sent=self.files.unsent,
            sessions_started=self.schedule.sessions_started,
            slots=self._opened,
            held_us=self._measured.held_us,
            **facts,
        )
        self.files.close()


def reset_cache(url: str) -> str:
    """Asks an engine to forget its prefix cache: `done`, `refused` while it works, or `failed`."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=RESET_TIMEOUT_S) as answer:
            body = answer.read()
        said = msgspec.json.decode(body) if body else {}
    except (OSError, msgspec.DecodeError):
        return "failed"
    return "refused" if isinstance(said, dict) and said.get("success") is False else "done"


def totals(ends: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The accounts of several processes as one."""
    keys = ("issued", "ok", "error", "incomplete", "cancelled", "not_sent", "sessions_started")
    return {key: sum(end.get(key, 0) for end in ends) for key in keys}
