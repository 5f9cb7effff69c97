"""One replica's engine: requests go in, steps come out, time and chance are handed in.

A step is decided and applied at once; its results become visible at its end. `step` is for a driver that lives
through every step, `run_until` for a simulation, which jumps over identical decode steps; both give the same instants,
events and counters. Steps follow each other without a gap in whole picoseconds, rounding up only where they are shown.
"""

from collections.abc import Callable
from random import Random

import msgspec

from mock_engine.config import EngineConfig
from mock_engine.cost_model import PS_PER_US, Batch, StepCost, ceil_us, prefill_pairs, steps_before
from mock_engine.decode import DecodeStretch
from mock_engine.errors import EngineError, RequestError
from mock_engine.events import BlockHash
from mock_engine.request import Request
from mock_engine.results import Admission, Finish, Run, Snapshot, Step
from mock_engine.scheduler import Outcome, Plan, RequestState, Scheduler
from mock_engine.watchdog import Watchdog


class Engine:
    """`rng` is drawn from only if the cost has jitter. `jumping=False` makes every step a full one, for comparison.
    Steps that get no request any further end in a StuckError."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        cost: StepCost,
        rng: Random,
        jumping: bool = True,
        make_scheduler: Callable[[EngineConfig], Scheduler] = Scheduler,
    ) -> None:
        self.config = config
        self.cost = cost
        self._rng = rng
        self._jumping = jumping
        self._scheduler = make_scheduler(config)
        self._watchdog = Watchdog()
        self._alive: dict[str, RequestState] = {}
        self._stretch: DecodeStretch | None = None
        self._new_head = False  # the head of the queue has not been tried yet
        self._ready_ps = 0  # the next step starts no earlier
        self._received = self._rejected = self._finished = self._aborted = 0
        self._hit_tokens = self._query_tokens = self._recomputed_hit_tokens = 0
        self._preemptions = self._prompt_tokens = self._generation_tokens = 0
        self._steps = self._busy_ps = 0

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_us: int) -> None:
        """Queue a request; it can be admitted by the first step that starts at or after now. Refuses one that can never
        fit with a RequestError."""
        sequence = request.sequence
        if sequence.block_size != self.config.block_size:
            raise EngineError(
                f"request {request.request_id!r} counts in blocks of {sequence.block_size} tokens, this engine in "
                f"blocks of {self.config.block_size}: give its sequence the engine's block_size"
            )
        if request.request_id in self._alive:
            raise EngineError(f"request {request.request_id!r} is in the engine already: give every request its own id")
        self._received += 1
        try:
            known_max = self._known_max(request)
        except RequestError:
            self._rejected += 1
            raise
        scheduler = self._scheduler
        if not self._alive:
            self._ready_ps = max(self._ready_ps, now_us * PS_PER_US)
            self._watchdog.progressed()
        if scheduler.by_priority or not scheduler.waiting:
            self._settle()
            self._new_head = True
        state = self._alive[request.request_id] = RequestState(request, known_max, self._received)
        scheduler.waiting.add(state)

    def _known_max(self, request: Request) -> int:
        """Tokens, prompt and answer, with which the request ends."""
        prompt, length = request.sequence.prompt_tokens, self.config.max_model_len
        if prompt < 1:
            raise RequestError(400, "The prompt is empty: send at least one token.", param="prompt")
        if request.max_tokens < 1:
            raise RequestError(400, f"max_tokens must be at least 1, got {request.max_tokens}.", param="max_tokens")
        if prompt >= length:
            raise RequestError(
                400,
                f"This model's maximum context length is {length} tokens. However, your prompt contains {prompt} input "
                "tokens, which leaves no room for an answer: shorten the prompt.",
                param="input_tokens",
            )
        available = self.config.usable_blocks
        capacity = available * self.config.block_size
        known_max = min(prompt + request.max_tokens, length)
        if known_max - 1 <= capacity:  # the last token's KV is never computed
            return known_max
        if known_max == length and prompt <= capacity:
            # Asked for as much as the model can say: here that is as much as the cache can hold.
            return capacity + 1
        needed = -(-(prompt if prompt > capacity else known_max - 1) // self.config.block_size)
        what = f"{prompt} prompt tokens" + ("" if prompt > capacity else f" and {request.max_tokens} tokens of answer")
        raise RequestError(
            400,
            f"The request needs {needed} KV cache blocks ({what}, {self.config.block_size} tokens a block), but this "
            f"replica has only {available}: shorten it or start the replica with more blocks.",
            param="prompt",
        )

    def abort(self, request_id: str, now_us: int) -> bool:
        """Drop a request and free its blocks at once; False if it is not (or no longer) here."""
        state = self._alive.pop(request_id, None)
        if state is None:
            return False
        self._settle()
        self._scheduler.remove(state)
        self._aborted += 1
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while a request holds a block. AllBlocksCleared rides in the next step."""
        return self._scheduler.pool.reset()

    def preempt_running(self) -> tuple[str, ...]:
        """Throw out everything that runs, last admitted first, as vLLM does for a cache reset that does not wait:
        blocks are free at once, requests go back to the head of the queue in their order and compute their tokens
        again. Returns their ids; no step will tell of these preemptions."""
        self._settle()
        preempted = self._scheduler.preempt_running()
        self._preemptions += len(preempted)
        self._new_head = self._new_head or bool(preempted)
        return tuple(state.request_id for state in preempted)

    def holds(self, key: BlockHash) -> bool:
        """Whether a block of this content is resident now."""
        return key in self._scheduler.pool.cache

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def ready_us(self) -> int:
        """Earliest instant at which `step` may be called again: the end of the last step."""
        return ceil_us(self._ready_ps)

    def step(self, now_us: int) -> Step | None:
        """One step that starts now; None if there is nothing to do. Called at the last step's `ends_us` while requests
        are left, it starts at the exact picosecond where that step ended."""
        if now_us < self.ready_us:
            raise EngineError(
                f"time can't go backwards: the last step ends at {self.ready_us} us, none can start at {now_us} us"
            )
        if not self._alive:
            return None
        if now_us > self.ready_us:
            self._ready_ps = now_us * PS_PER_US
        stretch = self._current_stretch()
        return self._full_step() if stretch is None else self._stretch_step(stretch)

    def run_until(self, horizon_us: int) -> list[Step | Run]:
        """Every step that starts strictly before the horizon, in order."""
        horizon_ps = horizon_us * PS_PER_US
        done: list[Step | Run] = []
        while self._alive and self._ready_ps < horizon_ps:
            stretch = self._current_stretch()
            if stretch is None:
                done.append(self._full_step())
            elif self.cost.jitter:
                done.append(self._stretch_step(stretch))
            else:
                done.append(self._jump(stretch, horizon_ps))
        return done

    def next_us(self) -> int | None:
        """No token but those of a plain decode becomes visible before this instant if nobody submits or aborts: no
        first token, finish, preemption or admission. None if there is nothing to do. Running until here always gets
        at least one step further."""
        if not self._alive:
            return None
        stretch = self._current_stretch()
        if stretch is None or self.cost.jitter:
            return ceil_us(self._ready_ps + self.cost.floor_ps)
        if stretch.ends_decoding:
            return ceil_us(self._ready_ps + stretch.ends_ps(stretch.left + 1))
        return ceil_us(self._ready_ps + stretch.ends_ps(stretch.left) + self.cost.floor_ps)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _current_stretch(self) -> DecodeStretch | None:
        """The stretch that holds the next step, if it is a plain decode."""
        stretch = self._stretch
        if stretch is not None:
            if stretch.left:
                return stretch
            self._settle()
        if self._new_head or not self._jumping or not DecodeStretch.possible(self._scheduler):
            return None
        stretch = DecodeStretch(self._scheduler, self.cost)
        if not stretch.left:
            return None
        self._stretch = stretch
        self._watchdog.progressed()  # every step of a stretch gives tokens
        return stretch

    def _settle(self) -> None:
        if self._stretch is not None:
            self._stretch.close()
            self._stretch = None

    def _advance_clock(self, duration_ps: int, steps: int = 1) -> tuple[int, int]:
        starts_ps = self._ready_ps
        self._ready_ps = starts_ps + duration_ps
        self._busy_ps += duration_ps
        self._steps += steps
        return starts_ps, self._ready_ps

    def _full_step(self) -> Step:
        scheduler = self._scheduler
        index = self._steps
        self._new_head = False
        plan = scheduler.schedule()
        duration_ps = self.cost.jittered_ps(self.cost.step_ps(_batch(plan)), self._rng)
        starts_ps, ends_ps = self._advance_clock(duration_ps)
        outcome = scheduler.commit(plan)
        self._count(plan, outcome)
        if outcome.outputs:
            self._watchdog.progressed()
        else:
            self._watchdog.watch(plan, duration_ps, scheduler)
        return Step(
            index=index,
            starts_us=ceil_us(starts_ps),
            ends_us=ceil_us(ends_ps),
            scheduled=tuple((entry.state.request_id, entry.tokens) for entry in plan.scheduled),
            admitted=tuple(
                Admission(state.request_id, cached, ceil_us(starts_ps), state.preemptions > 0)
                for state, cached in plan.admitted
            ),
            preempted=tuple(state.request_id for state in plan.preempted),
            outputs=tuple(state.request_id for state in outcome.outputs),
            finished=tuple(Finish(state.request_id, reason) for state, reason in outcome.finished),
            kv_events=scheduler.pool.take_events(),
            running=tuple(state.request_id for state in scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.free,
        )

    def _stretch_step(self, stretch: DecodeStretch) -> Step:
        index = self._steps
        duration_ps = self.cost.jittered_ps(stretch.step_ps, self._rng)
        starts_ps, ends_ps = self._advance_clock(duration_ps)
        events = stretch.advance_one()
        names = stretch.request_ids
        self._generation_tokens += len(names)
        return Step(
            index=index,
            starts_us=ceil_us(starts_ps),
            ends_us=ceil_us(ends_ps),
            scheduled=stretch.scheduled,
            admitted=(),
            preempted=(),
            outputs=names,
            finished=(),
            kv_events=events,
            running=names,
            waiting=len(self._scheduler.waiting),
            free_blocks=self._scheduler.pool.free,
        )

    def _jump(self, stretch: DecodeStretch, horizon_ps: int) -> Run:
        index, first_ps, growth_ps = self._steps, stretch.step_ps, stretch.growth_ps
        steps = steps_before(horizon_ps - self._ready_ps, first_ps, growth_ps, stretch.left)
        starts_ps, ends_ps = self._advance_clock(stretch.ends_ps(steps), steps)
        events = stretch.advance(steps)
        self._generation_tokens += steps * len(stretch.request_ids)
        run = Run(
            index=index,
            steps=steps,
            starts_us=ceil_us(starts_ps),
            ends_us=ceil_us(ends_ps),
            outputs=stretch.request_ids,
            kv_events=(),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._scheduler.pool.free,
            starts_ps=starts_ps,
            first_ps=first_ps,
            growth_ps=growth_ps,
        )
        if not events:
            return run
        return msgspec.structs.replace(run, kv_events=tuple((j, run.token_us(j), found) for j, found in events))

    # -- counters --------------------------------------------------------------------------------------------------

    def _count(self, plan: Plan, outcome: Outcome) -> None:
        for state, cached in plan.admitted:
            if state.preemptions:
                self._recomputed_hit_tokens += cached
            elif self.config.enable_prefix_caching and not state.request.skip_cache_read:
                self._query_tokens += state.prompt
                self._hit_tokens += cached
        self._preemptions += len(plan.preempted)
        for state in outcome.prefilled:
            if state.known == state.prompt + 1:
                self._prompt_tokens += state.prompt
        self._generation_tokens += len(outcome.outputs)
        self._finished += len(outcome.finished)
        for state, _ in outcome.finished:
            del self._alive[state.request_id]

    def snapshot(self) -> Snapshot:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return Snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=pool.used,
            free_blocks=pool.free,
            cached_blocks=pool.cache.blocks,
            active_decode_blocks=pool.active_decode_blocks,
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
            recomputed_hit_tokens=self._recomputed_hit_tokens,
            evicted_blocks=pool.evicted,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            received=self._received,
            rejected=self._rejected,
            finished=self._finished,
            aborted=self._aborted,
            steps=self._steps,
            busy_us=self._busy_ps // PS_PER_US,
        )


def _batch(plan: Plan) -> Batch:
    tokens = pairs = context = 0
    for _, new, already, decode in plan.scheduled:
        tokens += new
        if decode:
            context += already + new
        else:
            pairs += prefill_pairs(new, already)
    return Batch(tokens, len(plan.scheduled), pairs, context)
