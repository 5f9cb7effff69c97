"""The simulation: sessions, router and engines of one arm in virtual time.

The same pure objects as live, driven by a heap of instants instead of processes. Law: one scenario, seed and
version give the same rows, to the byte. An engine is left behind until somebody must know its state (an arrival
for it, a routing decision that listens to its events, a sample, or the instant at which it next shows something),
then it jumps there at once; so the cost grows with requests and blocks, not with tokens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.arm import ROUTER_SEED_STREAM, Arm, ArmRows, row_order
from harness.ceiling import ceiling_cached_tokens
from harness.prompts import PromptBook, SpanPrompt
from harness.slots import Slots
from harness.token_times import Jump, TokenTimes
from mock_engine import BlockRemoved, BlockStored, Engine, RequestError, Run, Step
from mock_engine import KvEvent as EngineEvent
from routers import Cleared, KvEvent, Removed, Router, Signal, Stored, TurnView
from workloads import Session, Streams

# What happens at one instant happens in this order.
KV = 0
"""Cache events first: an engine publishes a step's events before its tokens leave."""
TOKEN = 1
"""Then tokens and ends: whoever asks at this instant already sees them."""
ENTER = 2
"""Then requests that reach an engine's queue: a step that starts at this instant has them."""
ARRIVE = 3
"""Then new turns, which are routed on everything above."""
SAMPLE = 4
"""Samples last: they show the instant as it was left."""

SAMPLE_US = 500_000
"""Spacing of fleet samples, as `fleet.parquet` defines it."""
_COUNTERS = ("hit_tokens", "query_tokens", "evicted_blocks", "preemptions")
_GAUGES = ("running", "waiting", "used_blocks", "active_decode_blocks")


class _Request:
    """One request between its arrival and its end."""

    __slots__ = ("first_seen", "prompt", "row", "session", "slot", "times", "turn")

    def __init__(self, slot: int, session: Session, turn: int, prompt: SpanPrompt, row: dict[str, Any]) -> None:
        self.slot = slot
        self.session = session
        self.turn = turn
        self.prompt = prompt
        self.row = row
        self.times = TokenTimes()
        self.first_seen = False


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
        self._router = Router(policy, scenario.fleet.names)
        self._hears_events = Signal.KV_EVENTS in policy.needs
        self._wants_progress = self._router.wants_progress
        self._engines = {
            name: make_engine(scenario.engine, cost=cost, rng=random.Random(arm.seed_for(f"engine.{name}")))
            for name in scenario.fleet.names
        }
        self._next_us: dict[str, int | None] = dict.fromkeys(self._engines)
        self._book = PromptBook(scenario.engine.block_size)
        self._slots = Slots(scenario.make_workload(), Streams(arm.workload_seed))
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0
        self._requests: dict[str, _Request] = {}
        self._rows = ArmRows()
        self._last_sample: dict[str, tuple[int, int]] = dict.fromkeys(self._engines, (0, 0))

    def run(self) -> ArmRows:
        """Runs the arm to its end and returns its rows."""
        load = self._arm.scenario.load
        ramp_us = round(load.ramp_s * 1e6)
        for slot in range(load.concurrency):
            self._at(ramp_us * slot // load.concurrency, ARRIVE, partial(self._take_session, slot))
        self._at(0, SAMPLE, self._sample)
        while self._step():
            pass
        self._rows.requests.sort(key=row_order)
        self._rows.ceiling_cached_tokens = ceiling_cached_tokens(self._arm, self._rows.requests)
        return self._rows

    # ---- the kernel -------------------------------------------------------------------------------------------

    def _at(self, instant_us: int, kind: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (instant_us, kind, self._order, action))

    def _step(self) -> bool:
        """Goes to the next instant at which anything happens. False when nothing will."""
        soonest, name = None, ""
        for engine, instant in self._next_us.items():
            if instant is not None and (soonest is None or instant < soonest):
                soonest, name = instant, engine
        if soonest is not None and (not self._heap or soonest <= self._heap[0][0]):
            self._advance(name, soonest)
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
        self._next_us[name] = engine.next_us()

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
        if events and self._hears_events:
            heard = tuple(router_event(event) for event in events)
            self._at(instant_us, KV, lambda: self._router.kv_events(name, heard, self._now))

    def _file_progress(self, outputs: tuple[str, ...], instant_us: int) -> None:
        for request_id in outputs:
            count = self._requests[request_id].times.count
            self._at(instant_us, TOKEN, partial(self._progress, request_id, count))

    def _first_token(self, request_id: str) -> None:
        self._router.first_token(request_id, self._now)

    def _progress(self, request_id: str, count: int) -> None:
        if request_id in self._requests:
            self._router.progress(request_id, count, self._now)

    # ---- sessions ---------------------------------------------------------------------------------------------

    def _take_session(self, slot: int) -> None:
        session = self._slots.take(slot)
        if session is not None:
            self._plan_turn(slot, session, 0)

    def _plan_turn(self, slot: int, session: Session, turn: int) -> None:
        self._at(self._now + session.turns[turn].think_us, ARRIVE, lambda: self._arrive(slot, session, turn))

    def _arrive(self, slot: int, session: Session, turn: int) -> None:
        if self._hears_events or self._wants_progress:
            self._advance_all()
        prompt = self._book.prompt(session, turn)
        request_id = f"{session.session_id}-{turn}"
        view = TurnView(
            request_id=request_id,
            session_id=session.session_id,
            prompt=prompt,
            max_tokens=session.turns[turn].output[1],
        )
        decision = self._router.route(view, self._now)
        row = {
            **self._identity(session, turn),
            "replica": decision.replica,
            "reason": decision.reason,
            "scheduled_us": self._now,
            "sent_us": self._now,
            "admitted_us": None,
            "cached_tokens": None,
            "prompt_tokens": prompt.tokens,
            "token_source": "engine",
            "believed_hit_tokens": decision.believed_hit_tokens,
        }
        self._requests[request_id] = _Request(slot, session, turn, prompt, row)
        self._at(self._now + self._fixed_us, ENTER, lambda: self._enter(request_id, decision.replica))

    def _enter(self, request_id: str, replica: str) -> None:
        self._advance(replica, self._now)
        request = self._requests[request_id]
        try:
            self._engines[replica].submit(request.prompt.engine_request(request_id), self._now)
        except RequestError as error:
            self._refuse(request_id, error)
        self._next_us[replica] = self._engines[replica].next_us()

    def _refuse(self, request_id: str, error: RequestError) -> None:
        """An engine's refusal ends the session; its further turns are listed as cut."""
        request = self._requests.pop(request_id)
        self._router.failed(request_id, self._now)
        status = "4xx" if error.status < 500 else "5xx"
        self._rows.requests.append(
            {
                **request.row,
                "end_us": self._now,
                "output_tokens": 0,
                "status": "error",
                "error_class": f"engine_{status}",
                "error": f"HTTP {error.status}: {error.message}",
            }
        )
        for turn in request.session.turns[request.turn + 1 :]:
            self._rows.requests.append(
                {
                    **self._identity(request.session, turn.index),
                    "status": "cancelled",
                    "error_class": "cut",
                    "error": f"not sent: turn {request.turn} of the session ended as error",
                }
            )
        self._end_session(request)

    def _identity(self, session: Session, turn: int) -> dict[str, Any]:
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
            "phase": "steady",
        }

    def _finish(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        instants = request.times.instants_us()
        self._router.finished(request_id, len(instants), self._now)
        self._rows.requests.append(
            {
                **request.row,
                "first_token_us": int(instants[0]),
                "second_token_us": int(instants[1]) if len(instants) > 1 else None,
                "last_token_us": int(instants[-1]),
                "end_us": self._now,
                "output_tokens": len(instants),
                "chunk_gaps_us": instants[1:] - instants[:-1],
                "status": "ok",
                "error_class": None,
                "error": None,
            }
        )
        if self._on_done:
            self._on_done(len(self._rows.requests))
        if request.turn + 1 < len(request.session.turns):
            self._plan_turn(request.slot, request.session, request.turn + 1)
        else:
            self._end_session(request)

    def _end_session(self, request: _Request) -> None:
        self._book.forget(request.session)
        for slot in (request.slot, *self._slots.ended(request.session)):
            self._at(self._now, ARRIVE, partial(self._take_session, slot))

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
        if self._heap or any(instant is not None for instant in self._next_us.values()):
            self._at(self._now + SAMPLE_US, SAMPLE, self._sample)


def router_event(event: EngineEvent) -> KvEvent:
    """An engine's cache event as a router hears it; contents stand where tokens would be hashed."""
    if isinstance(event, BlockStored):
        return Stored(
            hashes=_names(event.block_hashes),
            parent=_name(event.parent_block_hash),
            content=event.contents or (),
            block_size=event.block_size,
            medium=event.medium,
            lora_name=event.lora_name,
        )
    if isinstance(event, BlockRemoved):
        return Removed(hashes=_names(event.block_hashes), medium=event.medium)
    return Cleared()


def _names(hashes: tuple[int | bytes, ...]) -> tuple[int, ...]:
    return hashes  # type: ignore[return-value]  # symbolic sequences name their blocks by whole numbers


def _name(key: int | bytes | None) -> int | None:
    return key  # type: ignore[return-value]  # as above
