"""Lives through an engine's steps in real time: decide, let the model's time pass, publish, deliver.

The engine runs on model time. A step starts where the last one ended, however late the wall clock was when its tokens
left; that lateness is measured and reported instead of added to the answers. Nothing here is a task: one timer fires
at the end of each step and does all of its work, so a token costs a few function calls.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from mock_engine.bodies import error_body
from mock_engine.clock import Clock
from mock_engine.engine import Engine
from mock_engine.errors import RequestError, StuckError
from mock_engine.events import AllBlocksCleared, KvEvent
from mock_engine.metrics import EngineMetrics, Finished
from mock_engine.prefix_report import ResidentPrefixes
from mock_engine.results import Snapshot, Step
from mock_engine.streams import Choice

LATENESS_KEPT = 4096  # steps

Publish = Callable[[Sequence[KvEvent]], None]
Room = Callable[[Callable[[], None]], bool]  # whether a batch may be published now; if not, calls back when it may
Ended = Callable[[Choice, str], None]  # (choice, how: stop | length | abort | error)


class Driver:
    """One data-parallel rank."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        metrics: EngineMetrics,
        publish: Publish,
        ended: Ended,
        clear_event: str = "next-step",
        room: Room | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._clock = clock
        self._publish = publish
        self._ended = ended
        self._clear_event = clear_event
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._choices: dict[str, Choice] = {}
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frozen = False
        self._held_up = False  # a step has ended whose events have no room yet
        self.death: str | None = None  # why a step failed; nothing runs any more
        self._idle_until_us = 0  # an idle engine's next step starts no earlier
        self.late_us: deque[int] = deque(maxlen=LATENESS_KEPT)
        self.bin_late_us: list[int] = []  # since the last fleet sample
        self.bin_step_us: list[int] = []
        self._usable_blocks = engine.config.usable_blocks
        self.prefixes = ResidentPrefixes(engine.config.block_size, engine.holds)

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting), for choosing a rank."""
        found = self.engine.snapshot()
        return found.running, found.waiting

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def submit(self, choice: Choice, at_us: int) -> None:
        """Puts a request into the engine's queue at the instant when its fixed cost has passed. Raises RequestError if
        the engine refuses it or is dead."""
        if self.death is not None:
            raise RequestError(500, self.death, "InternalServerError")
        at_us = max(at_us, self.engine.ready_us if self._step is None else self._step.starts_us)
        self.engine.submit(choice.request, at_us)
        self._choices[choice.request_id] = choice
        if self._step is None and not self._frozen:
            # What arrives together begins together: the first step waits for the end of this turn of the loop.
            self._idle_until_us = max(self._idle_until_us, at_us)
            self._loop.call_soon(self._begin_if_idle)

    def drop(self, choice: Choice) -> bool:
        """The client is gone: its blocks are free at once, and nothing is observed."""
        if self._choices.pop(choice.request_id, None) is None:
            return False
        self.engine.abort(choice.request_id, self._clock.now_us())
        self._refresh_if_idle()
        return True

    def abort(self, choices: Sequence[Choice], *, counted: bool) -> int:
        """Ends answers with finish reason abort; `counted` ones appear in request_success."""
        done = 0
        now_us = self._clock.now_us()
        for choice in choices:
            if self._choices.pop(choice.request_id, None) is None:
                continue
            self.engine.abort(choice.request_id, now_us)
            done += 1
            choice.abort()
            if counted:
                self.metrics.labelled["request_success"]["abort"] += 1
            self._ended(choice, "abort")
        self._refresh_if_idle()
        return done

    # -- switches --------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """No further step begins; one that is under way ends."""
        self._frozen = True

    def thaw(self) -> None:
        if self.death is not None:
            return  # only a restart helps
        self._frozen = False
        self._idle_until_us = max(self._idle_until_us, self._clock.now_us())
        self._loop.call_soon(self._begin_if_idle)

    def reset_prefix_cache(self, preempt: bool = False) -> bool:
        if preempt:
            for request_id in self.engine.preempt_running():
                self._note_preemption(request_id)
        done = self.engine.reset_prefix_cache()
        if done:
            self.prefixes.clear()
        if done and self._clear_event == "eager":
            self._publish((AllBlocksCleared(),))
        return done

    def close(self) -> None:
        self._frozen = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- steps -----------------------------------------------------------------------------------------------------

    def _begin_if_idle(self) -> None:
        if self._step is not None:
            return
        try:
            self._begin(max(self._idle_until_us, self.engine.ready_us))
        except Exception as error:
            self._die(error)

    def _begin(self, now_us: int) -> None:
        if self._frozen:
            return
        step = self.engine.step(now_us)
        self._step = step
        if step is not None:
            self._timer = self._loop.call_at(self._clock.loop_time(step.ends_us), self._end)

    def _end(self) -> None:
        try:
            self._end_step()
        except Exception as error:
            self._die(error)

    def _die(self, error: Exception) -> None:
        """A step failed: clients must not wait for ever on a replica that looks healthy."""
        if isinstance(error, StuckError):
            print(f"the engine is stuck: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        self._frozen = True
        self.death = f"EngineCore encountered an issue: {error!r}. See the replica's stderr for the root cause."
        for choice in self.choices:
            choice.reply.fail(error_body(self.death, "InternalServerError", None, 500))
            self._ended(choice, "error")
        self._choices.clear()

    def _end_step(self) -> None:
        """Everything a step yields, at its end: or as soon as there is room for its events, which is then its end."""
        step = self._step
        assert step is not None
        self._timer = None
        if step.kv_events and self._room is not None and not self._room(self._end):
            self._held_up = True
            return
        ends_us = step.ends_us
        if self._held_up:
            self._held_up = False
            ends_us = max(ends_us, self._clock.now_us())
        self._step = None
        if step.kv_events:
            self.prefixes.observe(step.kv_events)
            self._send_events(step.kv_events)
        if step.admitted or step.preempted:
            self._note_queue(step)
        self.metrics.step(len(step.running), step.waiting, 1 - step.free_blocks / self._usable_blocks)
        self._deliver(step, ends_us)
        late_us = max(0, self._clock.now_us() - ends_us)
        self.late_us.append(late_us)
        self.bin_late_us.append(late_us)
        self.bin_step_us.append(ends_us - step.starts_us)
        self._begin(ends_us)
        if self._step is None:
            self._refresh_if_idle()

    def _send_events(self, events: Sequence[KvEvent]) -> None:
        if self._clear_event != "next-step":
            events = [event for event in events if not isinstance(event, AllBlocksCleared)]
        if events:
            self._publish(events)

    def _note_queue(self, step: Step) -> None:
        choices, metrics = self._choices, self.metrics
        for request_id, cached_tokens, at_us, resumed in step.admitted:
            choice = choices.get(request_id)
            if choice is None or resumed:
                continue
            choice.admitted_us = at_us
            if choice.prompt.cached_tokens is None:
                choice.prompt.cached_tokens = cached_tokens
            if self.engine.config.enable_prefix_caching and not choice.request.skip_cache_read:
                metrics.admitted(choice.request.sequence.prompt_tokens, cached_tokens)
            choice.cached_tokens = cached_tokens
        for request_id in step.preempted:
            self._note_preemption(request_id)

    def _note_preemption(self, request_id: str) -> None:
        """The counter learns of it with the request's next token, as in vLLM: of one that is aborted before, never."""
        if request_id in self._choices:
            choice = self._choices[request_id]
            choice.preemptions += 1
            choice.preemptions_uncounted += 1

    def _deliver(self, step: Step, ends_us: int) -> None:
        if not step.outputs:
            return
        choices = self._choices
        final = dict(step.finished) if step.finished else {}
        gaps: dict[int, int] = {}
        iteration_tokens = len(step.outputs)
        for request_id in step.outputs:
            choice = choices.get(request_id)
            if choice is None:
                continue
            if choice.last_us is None:
                choice.first_us = ends_us
                prompt_tokens = choice.request.sequence.prompt_tokens
                self.metrics.first_token(ends_us - choice.arrived_us, prompt_tokens, choice.cached_tokens)
                iteration_tokens += prompt_tokens - choice.cached_tokens
            else:
                gap_us = ends_us - choice.last_us
                gaps[gap_us] = gaps.get(gap_us, 0) + 1
            choice.last_us = ends_us
            if choice.preemptions_uncounted:
                self.metrics.counters["num_preemptions"] += choice.preemptions_uncounted
                choice.preemptions_uncounted = 0
            reason = final.get(request_id)
            if choice.token(reason):
                self.engine.abort(request_id, self._clock.now_us())
            if choice.finish_reason is not None:
                del choices[request_id]
                self._finished(choice)
        for gap_us, times in gaps.items():
            self.metrics.token_gaps(gap_us, times)
        self.metrics.tokens(iteration_tokens, len(step.outputs))

    def _finished(self, choice: Choice) -> None:
        assert choice.finish_reason is not None
        assert choice.first_us is not None
        assert choice.last_us is not None
        prompt_tokens = choice.request.sequence.prompt_tokens
        self.metrics.finished(
            Finished(
                reason=choice.finish_reason,
                arrived_us=choice.arrived_us,
                admitted_us=choice.arrived_us if choice.admitted_us is None else choice.admitted_us,
                first_token_us=choice.first_us,
                last_token_us=choice.last_us,
                prompt_tokens=prompt_tokens,
                computed_tokens=prompt_tokens - choice.cached_tokens,
                output_tokens=choice.count,
                max_tokens=choice.request.max_tokens,
                preemptions=choice.preemptions,
            )
        )
        if choice.prompt.open == 0:
            self.metrics.group_finished(choice.prompt.n, choice.prompt.longest)
        self._ended(choice, choice.finish_reason)

    def _refresh_if_idle(self) -> None:
        """vLLM runs an empty step after the last request has gone, so its gauges fall back to 0."""
        if self._step is None and not self._frozen:
            found = self.engine.snapshot()
            self.metrics.step(found.running, found.waiting, found.used_blocks / self._usable_blocks)

    def snapshot(self) -> Snapshot:
        return self.engine.snapshot()

    def take_bin(self) -> tuple[list[int], list[int]]:
        """(step durations, lateness) of the steps since the last call."""
        taken = self.bin_step_us, self.bin_late_us
        self.bin_step_us, self.bin_late_us = [], []
        return taken


def discard(events: Sequence[KvEvent]) -> None:
    """Where nobody publishes."""


def percentile(values: Sequence[int], percent: int) -> int | None:
    """Nearest rank; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]
