"""The simulation: sessions, router and engines of one arm in virtual time.

The same pure objects as live, driven by a heap of instants instead of processes. Law: one scenario, seed and
version give the same rows, to the byte. An engine is left behind until somebody must know its state (an arrival
for it, a routing decision that listens to its events, a sample, or the instant at which it next shows something),
then it jumps there at once; so the cost grows with requests and blocks, not with tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.arm import Arm, ArmRows, row_order
from harness.ceiling import ceiling_of
from harness.in_flight import InFlight
from harness.planned import planned
from harness.prompts import PromptBook
from harness.router_samples import sample_of
from harness.schedule import Due, Schedule
from harness.sim_caches import SimOracle
from harness.sim_churn import SimChurn
from harness.sim_clock import SimClock
from harness.sim_health import SimHealth
from harness.sim_order import ARRIVE, CHURN, ENTER, POLL, SAMPLE, TOKEN
from harness.sim_request import SimRequest
from harness.sim_routers import SimRouters
from harness.sim_shown import SimShown
from harness.sim_signals import gauges
from harness.spread import ingress_name, ingress_of
from mock_engine import Engine, RequestError
from routers import RETRIES_MAX, Decision, NoReplica, Signal, TurnView, faulty_prompt
from workloads import Session, Streams

SAMPLE_US = 500_000
"""Spacing of fleet samples, as `fleet.parquet` defines it."""


class Simulation:
    """One arm: a router policy against a fleet of engines under one workload.

    `on_done(requests)` is called after every finished request with how many have ended.
    """

    def __init__(
        self, arm: Arm, *, on_done: Callable[[int], None] | None = None, make_engine: Callable[..., Engine] = Engine
    ) -> None:
        scenario = arm.scenario
        self._arm = arm
        self._fixed_us = scenario.preset.cost.request_fixed_us
        self._on_done = on_done
        self._setup = arm.setup
        self._router_faults = scenario.router_faults(arm.router)
        self.routers = SimRouters(arm)
        needs = self.routers.needs
        self._clock = SimClock()
        self._requests: dict[str, SimRequest] = {}
        self._shown = SimShown(arm, self._clock, self.routers, self._requests, make_engine, self._finish)
        self._fleet = self._shown.fleet
        self._oracle: SimOracle | None = None
        if Signal.ORACLE in needs:
            self._oracle = SimOracle(scenario.engine, scenario.preset.cost, self._fleet.caches)
            for policy in self.routers.policies:
                policy.consult(self._oracle)  # type: ignore[attr-defined]  # asked for by the signal
        self._report_form = getattr(getattr(self.routers.policies[0], "options", None), "report", "top-k")
        self._book = PromptBook(scenario.engine.block_size, overlook_salts=not self.routers.heeds_salts)
        workload = scenario.make_workload()
        plan = planned(workload, scenario.load, Streams(arm.workload_seed))
        self._schedule = Schedule(workload, scenario.load, plan)
        self._armed_us: int | None = None
        self._measured = InFlight()
        self._limit_us = round(scenario.load.request_timeout_s * 1e6)
        self._limits: deque[tuple[int, str]] = deque()
        self._polls_us = {signal: us for signal, us in self._setup.polls_us().items() if signal in needs}
        self._rows = ArmRows()
        self._syncs = {"done": 0, "refused": 0}
        """Cache resets asked of engines."""
        self._health = SimHealth(self.routers, self._shown, self._clock, self._busy)
        self._churn = SimChurn(scenario.churn, self._shown, self.routers, self, self._clock)

    def run(self) -> ArmRows:
        """Runs the arm to its end and returns its rows."""
        self._schedule.open_slots()
        self._arm_schedule()
        self._clock.at(0, SAMPLE, self._sample)
        for signal in self._polls_us:
            self._clock.at(0, POLL, partial(self._poll, signal))
        for number, event in enumerate(self._arm.scenario.churn):
            self._clock.at(event.at_us, CHURN, partial(self._come_or_go, number))
        while self._step():
            pass
        self._schedule.stop("nothing that it waits for was under way")
        self._list_cuts()
        self._rows.requests.sort(key=row_order)
        ceiling = ceiling_of(self._arm, self._rows.requests)
        self._rows.ceiling_cached_tokens, self._rows.distinct_prompts = ceiling
        self._rows.facts["weight_syncs"] = self._syncs
        self._rows.facts["held_us"] = self._measured.held_us
        self._rows.facts["churn"] = self._churn.record
        return self._rows

    def so_far(self) -> tuple[int, ArmRows]:
        """(the instant, the rows until then) of an arm that is still running or was broken off."""
        return self._clock.now_us, self._rows

    def _step(self) -> bool:
        """Goes to the next instant at which anything happens. False when nothing will."""
        soonest, next_us = self._fleet.soonest(), self._clock.next_us
        if soonest is not None and (next_us is None or soonest[0] <= next_us):
            self._fleet.advance(soonest[1], soonest[0])
        elif next_us is not None:
            self._clock.go()
        else:
            return False
        return True

    # ---- turns ------------------------------------------------------------------------------------------------

    def _arm_schedule(self) -> None:
        """Comes back when the schedule has something, unless it is already to come back earlier."""
        instant = self._schedule.next_us()
        if instant is not None:
            instant = max(instant, self._clock.now_us)
            if self._armed_us is None or instant < self._armed_us:
                self._armed_us = instant
                self._clock.at(instant, ARRIVE, partial(self._send, instant))

    def _send(self, armed_us: int) -> None:
        if armed_us != self._armed_us:
            return  # an earlier one came after this was set
        self._armed_us = None
        if not self._schedule.stopped:
            for due in self._schedule.take(self._clock.now_us):
                self._arrive(due)
            for _ in self._schedule.syncs():
                self._sync_weights()
            if self._schedule.stopped:
                self._cancel_all()
        self._list_cuts()
        self._arm_schedule()

    def _arrive(self, due: Due) -> None:
        session, turn = due.session, due.turn
        if self._shown.follows_engines or self._oracle is not None:
            self._shown.catch_up()
        prompt = self._book.prompt(session, turn)
        if self._oracle is not None:
            self._oracle.asking(prompt)
        request_id = f"{session.session_id}-{turn}"
        view = TurnView(
            request_id=request_id,
            session_id=session.session_id,
            prompt=faulty_prompt(prompt, self._router_faults),
            max_tokens=session.turns[turn].output[1],
        )
        row = {
            **self._identity(session, turn, due.phase, due.number),
            "replica": None,
            "reason": None,
            "ready_us": due.ready_us,
            "scheduled_us": due.due_us,
            "sent_us": self._clock.now_us,
            "admitted_us": None,
            "cached_tokens": None,
            "prompt_tokens": prompt.tokens,
            "token_source": "engine",
            "believed_hit_tokens": None,
        }
        if due.phase == "steady":
            self._measured.begin(self._clock.now_us)
        place = ingress_of(self._setup.spread, due.number, turn, self._setup.ingresses)
        self._requests[request_id] = SimRequest(session, turn, prompt, view, place, row)
        if not self._limits:
            self._clock.at(self._clock.now_us + self._limit_us, TOKEN, self._check_limits)
        self._limits.append((self._clock.now_us + self._limit_us, request_id))
        self._submit(request_id)

    # ---- placing ------------------------------------------------------------------------------------------------

    def _submit(self, request_id: str) -> None:
        request = self._requests[request_id]
        placed = partial(self._placed, request_id)
        try:
            self.routers.submit(request.ingress, request.view, self._clock.now_us, placed, exclude=request.tried)
        except NoReplica as error:
            self._turn_away(request_id, f"HTTP 503: router: {error}")

    def _placed(self, request_id: str, found: Decision | NoReplica) -> None:
        """A router has decided, at once or after it held the turn back."""
        if isinstance(found, NoReplica):
            self._turn_away(request_id, f"HTTP 503: router: {found}")
            return
        request = self._requests[request_id]
        request.row["replica"], request.row["reason"] = found.replica, found.reason
        request.row["believed_hit_tokens"] = found.believed_hit_tokens
        if self._clock.now_us > request.row["sent_us"]:
            request.row["routed_us"] = self._clock.now_us
        due_us = self._clock.now_us + (self._fixed_us if found.replica in self._fleet else 0)
        self._clock.at(due_us, ENTER, partial(self._enter, request_id, found.replica, len(request.tried)))

    def _send_elsewhere(self, request_id: str, replica: str, why: str) -> None:
        """A replica took no connection, or broke it before it answered: our proxy tries others, each once."""
        request = self._requests[request_id]
        self._health.broken(request.ingress, replica)
        self.routers.failed(request.ingress, request_id, self._clock.now_us)
        request.tried |= {replica}
        if len(request.tried) > RETRIES_MAX or not self.routers.others_than(
            request.ingress, request.tried, self._clock.now_us
        ):
            self._turn_away(request_id, f"HTTP 502: router: replica {replica} failed: {why}")
        else:
            self._submit(request_id)

    def _turn_away(self, request_id: str, text: str) -> None:
        """The router itself answers with an error; it holds nothing of the request any more."""
        self._over(self._requests.pop(request_id), "error", "router", text)

    def _enter(self, request_id: str, replica: str, attempt: int) -> None:
        request = self._requests.get(request_id)
        if request is None or len(request.tried) != attempt:
            return  # cancelled on the way, or sent elsewhere
        if replica not in self._fleet:
            self._send_elsewhere(request_id, replica, "no connection")
            return
        self._health.answered(request.ingress, replica)
        self._fleet.advance(replica, self._clock.now_us)
        request.entered = True
        try:
            self._fleet[replica].submit(request.prompt.engine_request(request_id), self._clock.now_us)
        except RequestError as error:
            self._refuse(request_id, error)
        self._fleet.note_next(replica)

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _refuse(self, request_id: str, error: RequestError) -> None:
        """An engine's refusal ends the session."""
        status = "4xx" if error.status < 500 else "5xx"
        request = self._requests.pop(request_id)
        self.routers.refused(request.ingress, request_id, self._clock.now_us, error.status)
        self._over(request, "error", f"engine_{status}", f"HTTP {error.status}: {error.message}")

    def _break_off(self, request_id: str, status: str, error_class: str, text: str) -> None:
        """Ends a request from outside; what came until now stays in its row."""
        request = self._requests[request_id]
        if request.entered:
            replica = request.row["replica"]
            self._fleet.advance(replica, self._clock.now_us)
            self._fleet[replica].abort(request_id, self._clock.now_us)
            self._fleet.note_next(replica)
        self._fail(request_id, status, error_class, text)

    def _fail(self, request_id: str, status: str, error_class: str, text: str) -> None:
        request = self._requests.pop(request_id)
        self.routers.failed(request.ingress, request_id, self._clock.now_us)
        self._over(request, status, error_class, text)

    def _over(self, request: SimRequest, status: str, error_class: str, text: str) -> None:
        """Ended otherwise than well, and the router knows."""
        self._rows.requests.append(request.answer(self._clock.now_us, status, error_class, text))
        self._ended(request, ok=False, why=f"turn {request.turn} of the session ended as {status}")

    def _check_limits(self) -> None:
        """Breaks off what has no end within its time; comes back when the next one could be."""
        while self._limits and (self._limits[0][0] <= self._clock.now_us or self._limits[0][1] not in self._requests):
            _, request_id = self._limits.popleft()
            if request_id in self._requests:
                text = f"no end within {self._limit_us / 1e6:g} s"
                self._break_off(request_id, "incomplete", "timeout", text)
        if self._limits:
            self._clock.at(self._limits[0][0], TOKEN, self._check_limits)

    def _cancel_all(self) -> None:
        drain_s = self._arm.scenario.load.drain_s
        for request_id in list(self._requests):
            if request_id in self._requests:
                text = f"still in flight when the drain of {drain_s:g} s was over"
                self._break_off(request_id, "cancelled", "cut", text)

    def _sync_weights(self) -> None:
        """New weights make what is cached worthless; an engine that works refuses to forget it."""
        for name, engine in self._fleet:
            self._fleet.advance(name, self._clock.now_us)
            self._syncs["done" if engine.reset_prefix_cache() else "refused"] += 1
        self._schedule.synced(self._clock.now_us)

    def _list_cuts(self) -> None:
        for cut in self._schedule.cuts():
            for turn in cut.session.turns[cut.turn :]:
                fate = {"status": "cancelled", "error_class": "cut", "error": f"not sent: {cut.why}"}
                self._rows.requests.append({**self._identity(cut.session, turn.index, cut.phase, cut.number), **fate})

    def _identity(self, session: Session, turn: int, phase: str, number: int) -> dict[str, Any]:
        """The columns that every row of a turn has, sent or not."""
        return {
            "router": self._arm.router.name,
            "repeat": self._arm.repeat,
            "ingress": ingress_name(ingress_of(self._setup.spread, number, turn, self._setup.ingresses)),
            "request_id": f"{session.session_id}-{turn}",
            "session": session.session_id,
            "turn": turn,
            "group": session.group,
            "rollout_step": session.rollout_step,
            "phase": phase,
        }

    def _finish(self, request_id: str) -> None:
        self._shown.before_release()
        request = self._requests.pop(request_id, None)
        if request is None:
            return  # broken off in the step that would have ended it
        cached = request.row["cached_tokens"]
        self.routers.finished(
            request.ingress, request_id, request.times.count, self._clock.now_us, cached_tokens=cached
        )
        self._rows.requests.append(request.answer(self._clock.now_us, "ok", None, None))
        if self._on_done:
            self._on_done(len(self._rows.requests))
        self._ended(request, ok=True)

    def _ended(self, request: SimRequest, *, ok: bool, why: str = "") -> None:
        if request.row["phase"] == "steady":
            self._measured.end(self._clock.now_us)
        if not ok or request.is_last:
            self._book.forget(request.session)
        self._schedule.ended(request.session, request.turn, self._clock.now_us, ok=ok, why=why)
        self._list_cuts()
        self._arm_schedule()
        if request.row["replica"] is not None:
            self._churn.look(request.row["replica"], self._clock.now_us)

    # ---- replicas that come and go ------------------------------------------------------------------------------

    def _come_or_go(self, number: int) -> None:
        if self._busy():
            self._churn.do(number, self._clock.now_us)

    def settle(self, replica: str) -> None:
        self._fleet.advance(replica, self._clock.now_us)
        self._clock.go_until(CHURN)

    def holds(self, replica: str) -> bool:
        return any(request.row["replica"] == replica for request in self._requests.values())

    def break_connections(self, replica: str) -> None:
        """As live: an engine accepts a stream when it queues the request, so an answer is cut even before its first
        token; what had not come so far is sent elsewhere."""
        for request_id, request in list(self._requests.items()):
            if request.row["replica"] != replica:
                continue
            if request.entered:
                count = request.tokens_until(self._clock.now_us)
                text = f"after {count} token chunks: the replica broke off"
                self._health.doubted(request.ingress, replica)
                self._fail(request_id, "incomplete", "truncated", text)
            else:
                self._send_elsewhere(request_id, replica, "connection failed")

    # ---- polls ------------------------------------------------------------------------------------------------

    def _poll(self, signal: Signal) -> None:
        """What a router process asks of its replicas, at the same spacing."""
        self._shown.catch_up()
        for name, engine in self._fleet:
            if signal is Signal.ENGINE_METRICS:
                self.routers.metrics(name, gauges(engine.snapshot(), self._clock.now_us), self._clock.now_us)
            else:
                self.routers.reported_prefixes(
                    self._fleet.caches[name].report(name, self._report_form, self._clock.now_us)
                )
        if self._busy():
            self._clock.at(self._clock.now_us + self._polls_us[signal], POLL, partial(self._poll, signal))

    # ---- samples ----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        identity = {"router": self._arm.router.name, "repeat": self._arm.repeat}
        self._rows.fleet += [{**identity, **sample} for sample in self._fleet.samples(self._clock.now_us)]
        self._rows.router += [
            {**identity, **sample_of(router, ingress_name(place), self._clock.now_us)}
            for place, router in enumerate(self.routers)
        ]
        if self._busy():
            self._clock.at(self._clock.now_us + SAMPLE_US, SAMPLE, self._sample)

    def _busy(self) -> bool:
        """Whether anything is still to come but samples and polls."""
        schedule = self._schedule
        coming = schedule.in_flight > 0 or schedule.next_us() is not None
        return coming or self._fleet.busy
