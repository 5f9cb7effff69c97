"""The driver: which turn is sent when, from what has ended so far. One object for the simulation and for Locust.

Pure: time is handed in, nothing waits. Whoever drives it sends what `take` gives, tells `ended` what became of it, and
comes back at `next_us`. A turn is due when the one before it was answered a think time ago, everything that it waits
for has ended, and its instant has come; then it may still need a slot. A session whose turn failed is cut there, and so
is what waits for a turn that will never be; `cuts` lists what was never sent, so that nothing is merely missing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from harness.drive import Drive
from harness.planned import Planned
from workloads import Session, WorkloadTable


class Due(NamedTuple):
    """A turn to send now."""

    session: Session
    turn: int
    due_us: int
    """When it was due by the plan; later than that is lag."""
    phase: str
    number: int
    """The session's place in the workload."""
    ready_us: int
    """When it could have gone, had there been no cap on requests."""


class Cut(NamedTuple):
    """Turns of a session that will not be sent, from this one on."""

    session: Session
    turn: int
    phase: str
    why: str
    number: int


class _Talk:
    """A session that has started."""

    __slots__ = ("number", "reserved", "session")

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self.session = session
        self.reserved: int | None = None
        """`requests` driver: since when the slot was free that the first turn will use."""


class Schedule:
    """All turns of a plan. `start_us` is the instant from which arrivals, warm-up and slots count."""

    def __init__(self, workload: WorkloadTable, drive: Drive, plan: Iterator[Planned], start_us: int = 0) -> None:
        self._workload = workload
        self._drive = drive
        self._start_us = start_us
        self._coming = plan
        self._free: list[int] = []
        """Since when, or from when on, each free slot is free."""
        self._slots = self._closing = 0
        self._ready: list[tuple[int, int, _Talk, int]] = []
        self._order = 0
        self._parked: dict[str, list[tuple[_Talk, int]]] = {}
        """What waits, under the first name that it still waits for."""
        self._ended: set[str] = set()
        self._lost: set[str] = set()
        """Names of turns that were cut: nobody need wait for them."""
        self._talks: dict[str, _Talk] = {}
        self._step: int | None = None
        self._step_alive: dict[int | None, int] = {}
        self._gate_us = start_us
        self._sync_due: list[int] = []
        self._holding = False
        self._cuts: list[Cut] = []
        self.in_flight = 0
        self.sessions_started = 0
        self.stopped = False
        self._last_start_us = start_us
        self._head: Planned | None = None
        self._pull()

    # -- slots ----------------------------------------------------------------------------------------------------

    def open_slots(self, count: int | None = None) -> None:
        """The slots of a closed loop, or the cap of an open one, opening over the ramp; `count` is this process' share
        of them and the default is all."""
        total = self._drive.concurrency
        if total is None:
            return
        for slot in range(total if count is None else count):
            ramp_us = 0 if self._drive.open_loop else round(self._drive.ramp_s * 1e6)
            self.open_slot(self._start_us + ramp_us * slot // total)

    def open_slot(self, at_us: int) -> None:
        """One slot more, from an instant on."""
        self._slots += 1
        heapq.heappush(self._free, at_us)

    def close_slot(self) -> None:
        """One slot less, as soon as one is free."""
        self._slots -= 1
        if self._free:
            self._free.remove(max(self._free))
            heapq.heapify(self._free)
        else:
            self._closing += 1

    # -- what the caller asks -------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Nothing is left to send or to wait for."""
        return self.in_flight == 0 and (self.stopped or self._head is None) and not self._talks

    @property
    def drain_ends_us(self) -> int | None:
        """When what still goes on is to be cancelled; None as long as sessions start, or without a limit."""
        if self._drive.drain_s is None or self._head is not None or self.stopped:
            return None
        last = max(self._last_start_us, self._start_us + (self._drive.plan_us or 0))
        return last + round(self._drive.drain_s * 1e6)

    def next_us(self) -> int | None:
        """The next instant at which `take` has something, if nothing ends before; may lie in the past."""
        if self.stopped:
            return None
        instants = [self.drain_ends_us] if self._talks else []
        if self._sync_due:
            instants.append(self._gate_us)
        if self._ready:
            instants.append(self._release_us(self._ready[0]))
        instants.append(self._head_us())
        known = [instant for instant in instants if instant is not None]
        if not known and self._is_stuck():
            return self._gate_us
        return min(known, default=None)

    def take(self, now_us: int) -> list[Due]:
        """What is to be sent now, in order. `stopped` is true afterwards if the drain's limit has passed."""
        if self.stopped:
            return []
        ends_us = self.drain_ends_us
        if ends_us is not None and now_us >= ends_us and self._talks:
            self.stop(f"the drain of {self._drive.drain_s:g} s was over")
            return []
        found: list[Due] = []
        while True:
            while self._ready and (at := self._release_us(self._ready[0])) is not None and at <= now_us:
                found.append(self._release())
            if self._start_session(now_us):
                continue
            if found or not self._is_stuck():
                return found
            self._unstick(now_us)

    def ended(self, session: Session, turn: int, now_us: int, *, ok: bool, why: str = "") -> None:
        """Tells what became of a turn that `take` gave; `why` is for the turns that a failure cuts off."""
        self.in_flight -= 1
        talk = self._talks[session.session_id]
        if self._drive.driver != "sessions":
            self._give_back(now_us)
        if not ok:
            self._end([(talk, turn, why)], now_us, sent=True)
            return
        names = deque([name] if (name := session.turns[turn].name) is not None else [])
        if turn + 1 < len(session.turns) and not self.stopped:
            self._plan(talk, turn + 1, now_us)
        elif turn + 1 < len(session.turns):
            self._end([(talk, turn, "the run ended first")], now_us, sent=True)
        else:
            names.append(session.session_id)
            self._leave(talk, now_us)
        self._wake(names, now_us)

    def stop(self, why: str) -> None:
        """No further turn is sent. Sessions with a request in flight are cut by its end, the others now."""
        self.stopped = True
        waiting = [(talk, turn) for _, _, talk, turn in sorted(self._ready)]
        waiting += [entry for entries in self._parked.values() for entry in entries]
        self._ready, self._parked = [], {}
        for talk, turn in waiting:
            self._cut(talk, turn, why)
            del self._talks[talk.session.session_id]

    def cuts(self) -> list[Cut]:
        """What was cut off since the last call."""
        found, self._cuts = self._cuts, []
        return found

    # -- weight sync ----------------------------------------------------------------------------------------------

    def syncs(self) -> list[int]:
        """Steps whose end brings new weights: the caller resets all caches, then calls `synced`."""
        found, self._sync_due = self._sync_due, []
        return found

    def synced(self, now_us: int) -> None:
        self._holding = False
        self._gate_us = max(self._gate_us, now_us)

    # -- sessions start -------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        self._head = next(self._coming, None)

    def _head_us(self) -> int | None:
        """When the next session may start; None while something must end first."""
        head = self._head
        if head is None or self._gated(head.session):
            return None
        session = head.session
        if session.after:
            return self._gate_us
        if session.start_us is not None:
            return max(self._start_us + session.start_us, self._gate_us)
        if head.arrival_us is not None:
            return self._start_us + head.arrival_us
        if not self._free:
            return None
        at = max(self._free[0], self._gate_us)
        if self._drive.driver == "requests" and self._ready and self._ready[0][0] <= at:
            return None  # a turn that may go by then goes first
        return at

    def _gated(self, session: Session) -> bool:
        """A barrier, or new weights, hold back a later step."""
        if self._holding:
            return True
        if session.rollout_step == self._step or not self._step_alive:
            return False
        return self._workload.barrier or (self._drive.weight_sync == "wait" and self._syncs_after(self._step))

    def _syncs_after(self, step: int | None) -> bool:
        return step is not None and self._workload.syncs_after_step(step)

    def _start_session(self, now_us: int) -> bool:
        """Starts the next session if its time has come."""
        at = self._head_us()
        if at is None or at > now_us:
            return False
        head = self._head
        assert head is not None
        session = head.session
        if session.rollout_step != self._step:
            self._enter_step(session.rollout_step)
            if self._holding:
                return False
        talk = self._talks[session.session_id] = _Talk(head.number, session)
        self.sessions_started += 1
        self._step_alive[session.rollout_step] = self._step_alive.get(session.rollout_step, 0) + 1
        self._last_start_us = max(self._last_start_us, at)
        if head.arrival_us is None and session.waits_for_a_slot:
            since = heapq.heappop(self._free)
            if self._drive.driver == "requests":
                talk.reserved = since
        self._pull()
        self._plan(talk, 0, now_us if session.after else at)
        return True

    def _enter_step(self, step: int | None) -> None:
        """All sessions of the step before have been taken. In order to wait for its weights, nothing of it is left."""
        before, self._step = self._step, step
        if self._syncs_after(before) and not self._step_alive.get(before):
            assert before is not None
            self._sync_due.append(before)
            self._holding = self._drive.weight_sync == "wait"

    # -- turns ----------------------------------------------------------------------------------------------------

    def _plan(self, talk: _Talk, index: int, from_us: int) -> None:
        """Files a turn under its instant, or under what it waits for, or cuts it."""
        session, turn = talk.session, talk.session.turns[index]
        waits = (*session.after, *turn.after) if index == 0 else turn.after
        for name in waits:
            if name in self._lost:
                self._end([(talk, index, f"it waits for {name}, which was cut")], from_us, sent=False)
                return
        missing = next((name for name in waits if name not in self._ended), None)
        if missing is not None:
            self._parked.setdefault(missing, []).append((talk, index))
            return
        own_us = max(turn.start_us or 0, (session.start_us or 0) if index == 0 else 0)
        due_us = max(from_us + turn.think_us, self._start_us + own_us)
        self._order += 1
        heapq.heappush(self._ready, (due_us, self._order, talk, index))

    def _release_us(self, entry: tuple[int, int, _Talk, int]) -> int | None:
        """When a ready turn may go; None while it needs a slot that nobody has given back."""
        due_us, _, talk, _ = entry
        if talk.reserved is not None:
            return max(due_us, talk.reserved)
        if self._drive.driver == "sessions" or self._drive.concurrency is None:
            return due_us
        return max(due_us, self._free[0]) if self._free else None

    def _release(self) -> Due:
        ready_us, _, talk, index = heapq.heappop(self._ready)
        due_us, since = ready_us, talk.reserved
        if since is not None:
            ready_us = min(due_us, self._gate_us)  # a session that only waited for a slot could have come at once
        talk.reserved = None
        if since is None and self._drive.driver != "sessions" and self._drive.concurrency is not None:
            since = heapq.heappop(self._free)
        if since is not None and self._drive.driver == "requests":
            due_us = max(due_us, since)  # a closed loop is due when it may go; an open one is late until it goes
        self.in_flight += 1
        return Due(talk.session, index, due_us, self._phase(talk, due_us), talk.number, ready_us)

    def _phase(self, talk: _Talk, due_us: int) -> str:
        """A ramp is no steady load, so what is due in it is warm-up too."""
        early = due_us - self._start_us < round(max(self._drive.warmup_s, self._drive.ramp_s) * 1e6)
        return "warmup" if early or talk.number < self._drive.warmup_sessions else "steady"

    def _give_back(self, now_us: int) -> None:
        if self._closing:
            self._closing -= 1
        elif self._drive.concurrency is not None:
            heapq.heappush(self._free, now_us)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end(self, losing: list[tuple[_Talk, int, str]], now_us: int, *, sent: bool) -> None:
        """Cuts sessions short, and what waits for the turns that they lose. `sent`: the turn itself went out and has a
        row of its own."""
        queue = deque(losing)
        names: deque[str] = deque()
        while queue:
            talk, turn, why = queue.popleft()
            self._cut(talk, turn + 1 if sent else turn, why)
            sent = False
            lost = {t.name for t in talk.session.turns[turn:] if t.name is not None}
            self._lost |= lost
            for name in sorted(lost):
                queue.extend((t, i, f"it waits for {name}, which was cut") for t, i in self._parked.pop(name, ()))
            self._leave(talk, now_us)
            names.append(talk.session.session_id)
        self._wake(names, now_us)

    def _cut(self, talk: _Talk, turn: int, why: str) -> None:
        if talk.reserved is not None:
            self._give_back(talk.reserved)
            talk.reserved = None
        if turn < len(talk.session.turns):
            phase = "warmup" if talk.number < self._drive.warmup_sessions else "steady"
            self._cuts.append(Cut(talk.session, turn, phase, why, talk.number))

    def _leave(self, talk: _Talk, now_us: int) -> None:
        """A session is over, one way or the other."""
        session = talk.session
        del self._talks[session.session_id]
        if self._drive.driver == "sessions" and session.waits_for_a_slot:
            self._give_back(now_us)
        step = session.rollout_step
        self._step_alive[step] -= 1
        if not self._step_alive[step]:
            del self._step_alive[step]
            if step is not None:
                self._gate_us = max(self._gate_us, now_us)
            at_once = self._drive.weight_sync == "at-once" and step != self._step
            if at_once and self._syncs_after(step):
                assert step is not None
                self._sync_due.append(step)

    def _wake(self, names: deque[str], now_us: int) -> None:
        """Plans what has waited for these names."""
        for name in names:
            self._ended.add(name)
            for talk, index in self._parked.pop(name, ()):
                self._plan(talk, index, now_us)

    # -- what waits for nothing that will come ------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Something waits, and nothing that could end is under way."""
        if self.in_flight or self._holding or self._head_us() is not None:
            return False
        if self._ready:
            return self._release_us(self._ready[0]) is None and self._slots > 0
        return bool(self._parked) and (self._head is None or self._slots > 0 or self._drive.open_loop)

    def _unstick(self, now_us: int) -> None:
        """All that goes on waits: for a slot that a waiting session holds, or for what the workload never yields."""
        head = self._head
        if self._ready or (head is not None and head.session.waits_for_a_slot and not self._gated(head.session)):
            heapq.heappush(self._free, now_us)
            self._closing += 1
        else:
            self._wake(deque([next(iter(self._parked))]), now_us)
