"""The simulation: sessions, router and engines of one arm in virtual time.

The same pure objects as live, driven by a heap of instants instead of processes. Law: one scenario, seed and
version give the same rows, to the byte. An engine is left behind until somebody must know its state (an arrival
for it, a routing decision that listens to its events, a sample, or the instant at which it next shows something),
then it jumps there at once; so the cost grows with requests and blocks, not with tokens.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.arm import ROUTER_SEED_STREAM, Arm, ArmRows, row_order
from harness.ceiling import ceiling_cached_tokens
from harness.faults import EventTrouble
from harness.planned import planned
from harness.prompts import PromptBook
from harness.schedule import Due, Schedule
from harness.sim_caches import CacheView, SimOracle
from harness.sim_order import ARRIVE, ENTER, KV, POLL, SAMPLE, TOKEN
from harness.sim_request import SimRequest
from harness.sim_signals import gauges, polls_us, router_event
from harness.token_times import Jump
from mock_engine import Engine, RequestError, Run, Step
from mock_engine import KvEvent as EngineEvent
from routers import Router, Signal, TurnView, faulty_prompt
from workloads import Session, Streams

SAMPLE_US = 500_000
"""Spacing of fleet samples, as `fleet.parquet` defines it."""
_COUNTERS = ("hit_tokens", "query_tokens", "evicted_blocks", "preemptions")
_GAUGES = ("running", "waiting", "used_blocks", "active_decode_blocks")


class Simulation:
    """One arm: a router policy against a fleet of engines under one workload.

    `on_done(requests)` is called after every finished request with how many have ended.
    """

    def __init__(
        self, arm: Arm, *, on_done: Callable[[int], None] | None = None, make_engine: Callable[..., Engine] = Engine
    ) -> None:
        scenario = arm.scenario
        self._arm = arm
        cost = scenario.preset.cost
        self._fixed_us = cost.request_fixed_us
        self._on_done = on_done
        policy = arm.router.build(random.Random(arm.seed_for(ROUTER_SEED_STREAM)), scenario.engine.block_size)
        self._router = Router(policy, scenario.fleet.names, faults=scenario.faults.router)
        self._trouble = {
            name: EventTrouble(scenario.faults.engine, Streams(arm.workload_seed)[f"faults.{name}"])
            for name in scenario.fleet.names
            if not scenario.faults.replicas or name in scenario.faults.replicas
        }
        needs = policy.needs
        self._hears_events = Signal.KV_EVENTS in needs
        self._caches: dict[str, CacheView] = {}
        self._oracle: SimOracle | None = None
        if Signal.ORACLE in needs or Signal.REPORTED_PREFIXES in needs:
            self._caches = {name: CacheView(scenario.engine.block_size) for name in scenario.fleet.names}
        if Signal.ORACLE in needs:
            self._oracle = SimOracle(scenario.engine, cost, self._caches)
            self._router.policy.consult(self._oracle)  # type: ignore[attr-defined]  # asked for by the signal
        self._report_form = getattr(getattr(policy, "options", None), "report", "top-k")
        self._wants_progress = self._router.wants_progress
        self._engines = {
            name: make_engine(scenario.engine, cost=cost, rng=random.Random(arm.seed_for(f"engine.{name}")))
            for name in scenario.fleet.names
        }
        self._next_us: dict[str, int | None] = dict.fromkeys(self._engines)
        self._soonest: list[tuple[int, int, str]] = []
        """(instant at which an engine shows something, place of the engine, its name); stale ones stay until met."""
        self._places = {name: place for place, name in enumerate(self._engines)}
        self._book = PromptBook(scenario.engine.block_size)
        workload = scenario.make_workload()
        plan = planned(workload, scenario.load, Streams(arm.workload_seed))
        self._schedule = Schedule(workload, scenario.load, plan)
        self._armed_us: int | None = None
        self._limit_us = round(scenario.load.request_timeout_s * 1e6)
        self._limits: deque[tuple[int, str]] = deque()
        self._polls_us = polls_us(needs)
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0
        self._requests: dict[str, SimRequest] = {}
        self._rows = ArmRows()
        self._syncs = {"done": 0, "refused": 0}
        """Cache resets asked of engines."""
        self._last_sample: dict[str, tuple[int, int]] = dict.fromkeys(self._engines, (0, 0))

    def run(self) -> ArmRows:
        """Runs the arm to its end and returns its rows."""
        self._schedule.open_slots()
        self._arm_schedule()
        self._at(0, SAMPLE, self._sample)
        for signal in self._polls_us:
            self._at(0, POLL, partial(self._poll, signal))
        while self._step():
            pass
        self._schedule.stop("nothing that it waits for was under way")
        self._list_cuts()
        self._rows.requests.sort(key=row_order)
        self._rows.ceiling_cached_tokens = ceiling_cached_tokens(self._arm, self._rows.requests)
        self._rows.facts["weight_syncs"] = self._syncs
        return self._rows

    # ---- the kernel -------------------------------------------------------------------------------------------

    def _at(self, instant_us: int, kind: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (instant_us, kind, self._order, action))

    def _step(self) -> bool:
        """Goes to the next instant at which anything happens. False when nothing will."""
        while self._soonest and self._next_us[self._soonest[0][2]] != self._soonest[0][0]:
            heapq.heappop(self._soonest)
        if self._soonest and (not self._heap or self._soonest[0][0] <= self._heap[0][0]):
            self._advance(self._soonest[0][2], self._soonest[0][0])
            return True
        if not self._heap:
            return False
        self._pop()
        return True

    def _pop(self) -> None:
        instant, _, _, action = heapq.heappop(self._heap)
        self._now = max(self._now, instant)
        action()

    def _advance(self, name: str, horizon_us: int) -> None:
        """Runs one engine up to an instant; what it did is filed under the instants at which it shows."""
        engine = self._engines[name]
        for done in engine.run_until(horizon_us):
            if isinstance(done, Run):
                self._file_run(name, done)
            else:
                self._file_step(name, done)
        self._note_next(name)

    def _note_next(self, name: str) -> None:
        instant = self._engines[name].next_us()
        if instant != self._next_us[name]:
            self._next_us[name] = instant
            if instant is not None:
                heapq.heappush(self._soonest, (instant, self._places[name], name))

    def _advance_all(self) -> None:
        """Brings every engine to now, then delivers what has shown by now and would come before an arrival."""
        for name in self._engines:
            self._advance(name, self._now)
        while self._heap and self._heap[0][:2] < (self._now, ENTER):
            self._pop()

    # ---- what engines show ------------------------------------------------------------------------------------

    def _file_run(self, name: str, run: Run) -> None:
        jump = Jump(run)
        for request_id in run.outputs:
            self._requests[request_id].times.add_jump(jump)
        for _, ends_us, events in run.kv_events:
            self._file_events(name, ends_us, events)
        if self._wants_progress:
            self._file_progress(run.outputs, run.ends_us)

    def _file_step(self, name: str, step: Step) -> None:
        self._file_events(name, step.ends_us, step.kv_events)
        for admission in step.admitted:
            row = self._requests[admission.request_id].row
            if row["admitted_us"] is None:
                row["admitted_us"] = admission.at_us
                row["cached_tokens"] = admission.cached_tokens
        for request_id in step.outputs:
            request = self._requests[request_id]
            request.times.add(step.ends_us)
            if not request.first_seen:
                request.first_seen = True
                self._at(step.ends_us, TOKEN, partial(self._first_token, request_id))
        if self._wants_progress:
            self._file_progress(step.outputs, step.ends_us)
        for finish in step.finished:
            self._at(step.ends_us, TOKEN, partial(self._finish, finish.request_id))

    def _file_events(self, name: str, instant_us: int, events: tuple[EngineEvent, ...]) -> None:
        if not events:
            return
        if self._hears_events:
            trouble = self._trouble.get(name)
            arrives, hole = trouble.take() if trouble else (True, False)
            heard_us = instant_us + (trouble.delay_us if trouble else 0)
            if hole:
                self._at(heard_us, KV, lambda: self._router.event_gap(name, self._now))
            if arrives:
                heard = tuple(router_event(event) for event in events)
                self._at(heard_us, KV, lambda: self._router.kv_events(name, heard, self._now))
        if self._caches:
            self._at(instant_us, KV, lambda: self._caches[name].observe(events))

    def _file_progress(self, outputs: tuple[str, ...], instant_us: int) -> None:
        for request_id in outputs:
            count = self._requests[request_id].times.count
            self._at(instant_us, TOKEN, partial(self._progress, request_id, count))

    def _first_token(self, request_id: str) -> None:
        if request_id in self._requests:
            self._router.first_token(request_id, self._now)

    def _progress(self, request_id: str, count: int) -> None:
        if request_id in self._requests:
            self._router.progress(request_id, count, self._now)

    # ---- turns ------------------------------------------------------------------------------------------------

    def _arm_schedule(self) -> None:
        """Comes back when the schedule has something, unless it is already to come back earlier."""
        instant = self._schedule.next_us()
        if instant is not None:
            instant = max(instant, self._now)
            if self._armed_us is None or instant < self._armed_us:
                self._armed_us = instant
                self._at(instant, ARRIVE, partial(self._send, instant))

    def _send(self, armed_us: int) -> None:
        if armed_us != self._armed_us:
            return  # an earlier one came after this was set
        self._armed_us = None
        if not self._schedule.stopped:
            for due in self._schedule.take(self._now):
                self._arrive(due)
            for _ in self._schedule.syncs():
                self._sync_weights()
            if self._schedule.stopped:
                self._cancel_all()
        self._list_cuts()
        self._arm_schedule()

    def _arrive(self, due: Due) -> None:
        session, turn = due.session, due.turn
        if self._hears_events or self._wants_progress or self._oracle is not None:
            self._advance_all()
        prompt = self._book.prompt(session, turn)
        if self._oracle is not None:
            self._oracle.asking(prompt)
        request_id = f"{session.session_id}-{turn}"
        view = TurnView(
            request_id=request_id,
            session_id=session.session_id,
            prompt=faulty_prompt(prompt, self._arm.scenario.faults.router),
            max_tokens=session.turns[turn].output[1],
        )
        decision = self._router.route(view, self._now)
        row = {
            **self._identity(session, turn, due.phase),
            "replica": decision.replica,
            "reason": decision.reason,
            "scheduled_us": due.due_us,
            "sent_us": self._now,
            "admitted_us": None,
            "cached_tokens": None,
            "prompt_tokens": prompt.tokens,
            "token_source": "engine",
            "believed_hit_tokens": decision.believed_hit_tokens,
        }
        self._requests[request_id] = SimRequest(session, turn, prompt, row)
        if not self._limits:
            self._at(self._now + self._limit_us, TOKEN, self._check_limits)
        self._limits.append((self._now + self._limit_us, request_id))
        self._at(self._now + self._fixed_us, ENTER, lambda: self._enter(request_id, decision.replica))

    def _enter(self, request_id: str, replica: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return  # cancelled on the way
        self._advance(replica, self._now)
        request.entered = True
        try:
            self._engines[replica].submit(request.prompt.engine_request(request_id), self._now)
        except RequestError as error:
            self._refuse(request_id, error)
        self._note_next(replica)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        """An engine's refusal ends the session."""
        request = self._requests.pop(request_id)
        self._router.failed(request_id, self._now)
        status = "4xx" if error.status < 500 else "5xx"
        text = f"HTTP {error.status}: {error.message}"
        self._rows.requests.append(request.answer(self._now, "error", f"engine_{status}", text))
        self._ended(request, ok=False, why=f"turn {request.turn} of the session ended as error")

    def _break_off(self, request_id: str, status: str, error_class: str, text: str) -> None:
        """Ends a request from outside; what came until now stays in its row."""
        request = self._requests[request_id]
        replica = request.row["replica"]
        if request.entered:
            self._advance(replica, self._now)
            self._engines[replica].abort(request_id, self._now)
            self._note_next(replica)
        del self._requests[request_id]
        self._router.failed(request_id, self._now)
        self._rows.requests.append(request.answer(self._now, status, error_class, text))
        self._ended(request, ok=False, why=f"turn {request.turn} of the session ended as {status}")

    def _check_limits(self) -> None:
        """Breaks off what has no end within its time; comes back when the next one could be."""
        while self._limits and (self._limits[0][0] <= self._now or self._limits[0][1] not in self._requests):
            _, request_id = self._limits.popleft()
            if request_id in self._requests:
                text = f"no end within {self._limit_us / 1e6:g} s"
                self._break_off(request_id, "incomplete", "timeout", text)
        if self._limits:
            self._at(self._limits[0][0], TOKEN, self._check_limits)

    def _cancel_all(self) -> None:
        drain_s = self._arm.scenario.load.drain_s
        for request_id in list(self._requests):
            if request_id in self._requests:
                text = f"still in flight when the drain of {drain_s:g} s was over"
                self._break_off(request_id, "cancelled", "cut", text)

    def _sync_weights(self) -> None:
        """New weights make what is cached worthless; an engine that works refuses to forget it."""
        for name, engine in self._engines.items():
            self._advance(name, self._now)
            self._syncs["done" if engine.reset_prefix_cache() else "refused"] += 1
        self._schedule.synced(self._now)

    def _list_cuts(self) -> None:
        for cut in self._schedule.cuts():
            for turn in cut.session.turns[cut.turn :]:
                fate = {"status": "cancelled", "error_class": "cut", "error": f"not sent: {cut.why}"}
                self._rows.requests.append({**self._identity(cut.session, turn.index, cut.phase), **fate})

    def _identity(self, session: Session, turn: int, phase: str) -> dict[str, Any]:
        """The columns that every row of a turn has, sent or not."""
        return {
            "router": self._arm.router.name,
            "repeat": self._arm.repeat,
            "ingress": "i0",
            "request_id": f"{session.session_id}-{turn}",
            "session": session.session_id,
            "turn": turn,
            "group": session.group,
            "rollout_step": session.rollout_step,
            "phase": phase,
        }

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return  # broken off in the step that would have ended it
        cached = request.row["cached_tokens"]
        self._router.finished(request_id, request.times.count, self._now, cached_tokens=cached)
        self._rows.requests.append(request.answer(self._now, "ok", None, None))
        if self._on_done:
            self._on_done(len(self._rows.requests))
        self._ended(request, ok=True)

    def _ended(self, request: SimRequest, *, ok: bool, why: str = "") -> None:
        if not ok or request.is_last:
            self._book.forget(request.session)
        self._schedule.ended(request.session, request.turn, self._now, ok=ok, why=why)
        self._list_cuts()
        self._arm_schedule()

    # ---- polls ------------------------------------------------------------------------------------------------

    def _poll(self, signal: Signal) -> None:
        """What a router process asks of its replicas, at the same spacing."""
        self._advance_all()
        for name, engine in self._engines.items():
            if signal is Signal.ENGINE_METRICS:
                self._router.metrics(name, gauges(engine.snapshot(), self._now), self._now)
            else:
                self._router.reported_prefixes(self._caches[name].report(name, self._report_form, self._now))
        if self._busy():
            self._at(self._now + self._polls_us[signal], POLL, partial(self._poll, signal))

    # ---- samples ----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        for name in self._engines:
            self._advance(name, self._now)
            snapshot = self._engines[name].snapshot()
            busy_us, steps = self._last_sample[name]
            self._last_sample[name] = (snapshot.busy_us, snapshot.steps)
            step_us = (snapshot.busy_us - busy_us) / (snapshot.steps - steps) if snapshot.steps > steps else None
            self._rows.fleet.append(
                {
                    "router": self._arm.router.name,
                    "repeat": self._arm.repeat,
                    "t_us": self._now,
                    "replica": name,
                    **{key: getattr(snapshot, key) for key in (*_GAUGES, *_COUNTERS)},
                    "step_us_mean": step_us,
                    "late_us_p99": None,
                }
            )
        if self._busy():
            self._at(self._now + SAMPLE_US, SAMPLE, self._sample)

    def _busy(self) -> bool:
        """Whether anything is still to come but samples and polls."""
        schedule = self._schedule
        coming = schedule.in_flight > 0 or schedule.next_us() is not None
        return coming or any(instant is not None for instant in self._next_us.values())
