"""A stretch of steps in which every running request decodes one token, nobody is admitted, finishes or is preempted.

All such steps are alike but for block boundaries, which recur with the block size: request i needs a block, or fills
one, in the steps of one residue class. So the stretch knows beforehand how many steps it holds, and carries out any
number of them at the cost of their block operations alone, in exactly the order that stepping gives. While it lasts,
the requests' token counts lag behind by `done`; `close` settles them.
"""

from collections import defaultdict

from mock_engine.cost_model import Batch, StepCost, stretch_ps
from mock_engine.events import KvEvent
from mock_engine.scheduler import RequestState, Scheduler

_NO_LIMIT = 1 << 62


class DecodeStretch:
    """`limit` steps may be carried out, `done` have been."""

    def __init__(self, scheduler: Scheduler, cost: StepCost) -> None:
        running = scheduler.running
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._states = list(running)
        self._size = size = scheduler.config.block_size
        self.done = 0
        self.request_ids = tuple(state.request_id for state in running)
        self.scheduled = tuple((name, 1) for name in self.request_ids)
        self.batch = Batch(len(running), len(running), 0, sum([state.known for state in running]))
        self._first_ps = cost.step_ps(self.batch)
        self.growth_ps = cost.kv_read_ps * len(running)
        # By residue of the step number: (state, whether it needs a block, whether it fills one), in running order.
        self._work: dict[int, list[tuple[RequestState, bool, bool]]] = defaultdict(list)
        work, caching = self._work, scheduler.pool.caching
        allocations = [0] * size
        for state in running:
            fills = -state.known % size
            needs = (fills + 1) % size
            allocations[needs] += 1
            if needs == fills:
                work[needs].append((state, True, True))
                continue
            work[needs].append((state, True, False))
            if caching:
                work[fills].append((state, False, True))
        self._residues = sorted(work)
        memory = _steps_that_fit(allocations, scheduler.pool.free)
        plain = min([state.known_max - state.known for state in running]) - 1
        for state in running:
            if state.request.stop_token_ids:
                outputs = state.known - state.prompt
                plain = min(plain, state.next_stop(outputs)[0] - outputs)
        if scheduler.waiting and len(running) < scheduler.config.max_num_seqs:
            plain = min(plain, self._steps_before_head_gains())
        self.limit = min(plain, memory)
        self.ends_decoding = plain < memory  # the step after the limit still decodes everybody

    @staticmethod
    def possible(scheduler: Scheduler) -> bool:
        """Whether the next step is a plain decode of every running request, as far as can be told without work."""
        running = scheduler.running
        if not running or len(running) > scheduler.config.max_num_batched_tokens:
            return False
        if not all(state.prefilled for state in running):
            return False
        return not scheduler.waiting or not scheduler.head_fits_now()

    def _steps_before_head_gains(self) -> int:
        """Steps before a block is cached that may lengthen the chain which the head of the queue hits; only that can
        make it fit, because free blocks only become fewer."""
        head = self._scheduler.waiting.head()
        if head.request.report_full:
            return 0  # every failed lookup may announce something
        if head.request.skip_cache_read or not self._pool.caching:
            return _NO_LIMIT
        size = self._size
        cap = (head.known - 1) // size
        steps = _NO_LIMIT
        for state in self._states:
            full = state.cached_blocks
            if full >= cap:
                continue
            if full and state.sequence.block_keys(full)[full - 1] != head.sequence.block_keys(full)[full - 1]:
                continue
            steps = min(steps, (full + 1) * size - state.known)
        return steps

    @property
    def left(self) -> int:
        return self.limit - self.done

    @property
    def step_ps(self) -> int:
        """Duration of the next step; each later one takes `growth_ps` more."""
        return self._first_ps + self.growth_ps * self.done

    def ends_ps(self, steps: int) -> int:
        """From now to the end of the next `steps` steps."""
        return stretch_ps(self.step_ps, self.growth_ps, steps)

    def advance_one(self) -> tuple[KvEvent, ...]:
        work = self._work.get(self.done % self._size)
        self.done += 1
        if work:
            self._carry_out(work, self.done)
        return self._pool.take_events() if self._pool.events else ()

    def advance(self, steps: int) -> list[tuple[int, tuple[KvEvent, ...]]]:
        """The next `steps` steps; returns the events of those that have any, by number of the step from 0 on."""
        start = self.done
        events = []
        stop = start + steps
        size = self._size
        cycle = self.done - self.done % size
        while cycle < stop:
            for residue in self._residues:
                number = cycle + residue
                if number < self.done:
                    continue
                if number >= stop:
                    break
                self._carry_out(self._work[residue], number + 1)
                if self._pool.events:
                    events.append((number - start, self._pool.take_events()))
            cycle += size
        self.done = stop
        return events

    def _carry_out(self, work: list[tuple[RequestState, bool, bool]], done: int) -> None:
        """The block operations of one step; with it, `done` steps are done."""
        pool = self._pool
        for state, needs, fills in work:
            if needs:
                pool.allocate(1, state.blocks, decoding=True)
            if fills:
                self._scheduler.cache_full_blocks(state, state.known - 1 + done)

    def close(self) -> None:
        """Bring the requests' counts up to date; the stretch is over."""
        done, self.done, self.limit = self.done, 0, 0
        for state in self._states:
            state.known += done
            state.computed += done
        self._states = []


def _steps_that_fit(allocations: list[int], free: int) -> int:
    """Steps before one needs more blocks than are left; the allocations repeat."""
    rounds, left = divmod(free, sum(allocations))
    steps = rounds * len(allocations)
    for needed in allocations:
        if needed > left:
            break
        left -= needed
        steps += 1
    return steps
