"""What engines of a simulation show, and when it reaches whom: tokens, ends, cache events.

An engine that is brought forward tells everything at once; it is filed here under the instants at which it shows. Law:
nobody hears of a thing before its instant, and what an engine had not yet sent when it went is never heard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from harness.arm import Arm
from harness.faults import EventTrouble
from harness.sim_clock import SimClock
from harness.sim_fleet import SimFleet
from harness.sim_order import ENTER, KV, TOKEN
from harness.sim_request import SimRequest
from harness.sim_routers import SimRouters
from harness.sim_signals import router_event
from harness.token_times import Jump
from mock_engine import Engine, Run, Step
from mock_engine import KvEvent as EngineEvent
from routers import Signal
from workloads import Streams


class SimShown:
    """Owns the engines. `finish(request_id)` is called at the instant of a request's last token."""

    def __init__(
        self,
        arm: Arm,
        clock: SimClock,
        routers: SimRouters,
        requests: Mapping[str, SimRequest],
        make_engine: Callable[..., Engine],
        finish: Callable[[str], None],
    ) -> None:
        faults = arm.scenario.faults
        self._clock = clock
        self._routers = routers
        self._requests = requests
        self._finish = finish
        self._hears_events = Signal.KV_EVENTS in routers.needs
        self._wants_progress = routers.wants_progress
        self._overlook_salts = not routers.heeds_salts
        self._heeds = not arm.scenario.router_faults(arm.router).ignore_event_sequence
        self._trouble = {
            name: EventTrouble(faults.engine, Streams(arm.workload_seed)[f"faults.{name}"])
            for name in arm.scenario.replica_names
            if not faults.replicas or name in faults.replicas
        }
        keep_caches = bool({Signal.ORACLE, Signal.REPORTED_PREFIXES} & routers.needs)
        self.fleet = SimFleet(arm, make_engine, self._file, keep_caches=keep_caches)

    @property
    def follows_engines(self) -> bool:
        """Whether a decision depends on what engines have shown by then."""
        return self._hears_events or self._wants_progress

    def catch_up(self) -> None:
        """Brings every engine to now, and everybody to know of it what they could before an arrival."""
        for name, _ in self.fleet:
            self.fleet.advance(name, self._clock.now_us)
        self._clock.go_until(ENTER)

    def disconnected(self, name: str) -> None:
        """An engine's process ended, and its event stream with it: belief is void for a router that heeds that."""
        if self._hears_events and self._heeds:
            self._routers.event_gap(name, self._clock.now_us)

    # ---- filing -------------------------------------------------------------------------------------------------

    def _file(self, name: str, done: Run | Step) -> None:
        if isinstance(done, Run):
            self._file_run(name, done)
        else:
            self._file_step(name, done)

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
                self._clock.at(step.ends_us, TOKEN, partial(self._first_token, request_id))
        if self._wants_progress:
            self._file_progress(step.outputs, step.ends_us)
        for finish in step.finished:
            self._clock.at(step.ends_us, TOKEN, partial(self._finish, finish.request_id))

    def _file_progress(self, outputs: tuple[str, ...], instant_us: int) -> None:
        for request_id in outputs:
            count = self._requests[request_id].times.count
            self._clock.at(instant_us, TOKEN, partial(self._progress, request_id, count))

    def _file_events(self, name: str, instant_us: int, events: tuple[EngineEvent, ...]) -> None:
        if not events:
            return
        life = self.fleet.life(name)
        if self._hears_events:
            trouble = self._trouble.get(name)
            arrives, hole = trouble.take() if trouble else (True, False)
            heard_us = instant_us + (trouble.delay_us if trouble else 0)
            if hole:
                self._clock.at(heard_us, KV, partial(self._gap, name, life))
            if arrives:
                self._clock.at(heard_us, KV, partial(self._hear, name, life, events))
        if self.fleet.caches:
            self._clock.at(instant_us, KV, partial(self._note_cache, name, life, events))

    # ---- reaching -----------------------------------------------------------------------------------------------

    def _first_token(self, request_id: str) -> None:
        self.before_release()
        request = self._requests.get(request_id)
        if request is not None:
            self._routers.first_token(request.ingress, request_id, self._clock.now_us)

    def before_release(self) -> None:
        """A turn that is held back may be placed now, by what engines have said until now."""
        if self._routers.waiting:
            self.catch_up()

    def _progress(self, request_id: str, count: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._routers.progress(request.ingress, request_id, count, self._clock.now_us)

    def _gap(self, name: str, life: int) -> None:
        if self._heeds and life == self.fleet.life(name):
            self._routers.event_gap(name, self._clock.now_us)

    def _hear(self, name: str, life: int, events: tuple[EngineEvent, ...]) -> None:
        """A batch of an engine that is gone stayed with it."""
        if life != self.fleet.life(name):
            return
        heard = tuple(router_event(event, overlook_salts=self._overlook_salts) for event in events)
        self._routers.kv_events(name, heard, self._clock.now_us)

    def _note_cache(self, name: str, life: int, events: tuple[EngineEvent, ...]) -> None:
        if life == self.fleet.life(name):
            self.fleet.caches[name].observe(events)
