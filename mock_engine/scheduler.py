"""vLLM V1's scheduler, step for step: which request computes how many tokens, who waits and who is thrown out.

Running requests come first, in the order of their admission; a request without blocks preempts from the end of the
list, possibly itself. Then waiting requests are admitted until one does not fit, which stops the scan; a step that
preempted admits nobody. Progress is certain: a request that fits the whole pool alone always ends.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mock_engine.block_pool import Block, BlockPool
from mock_engine.config import EngineConfig
from mock_engine.request import Request, TokenSource


class RequestState:
    """A request inside the engine. `known` tokens are prompt and answer so far, `computed` of them have their KV."""

    __slots__ = (
        "blocks", "cached_blocks", "computed", "furthest", "known", "known_max", "order", "preemptions", "prefilled",
        "prompt", "request", "request_id", "sequence", "stop_scan",
    )  # fmt: skip

    def __init__(self, request: Request, known_max: int, order: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sequence: TokenSource = request.sequence
        self.prompt = request.sequence.prompt_tokens
        self.known = self.prompt
        self.known_max = known_max  # ends with this many tokens
        self.order = order  # of submission
        self.computed = 0
        self.furthest = 0  # the watchdog's mark: tokens computed, however often they had to be computed again
        self.blocks: list[Block] = []
        self.cached_blocks = 0  # leading blocks whose content is in the prefix cache
        self.prefilled = False
        self.preemptions = 0
        self.stop_scan = (max(0, request.min_tokens - 1), False)

    def next_stop(self, position: int) -> tuple[int, bool]:
        """(p, True): output token p, at or after `position`, stops; (p, False): none up to p - 1, which is not before
        `position`. Asked with growing positions only."""
        found_at, found = self.stop_scan
        while not found and found_at <= position:
            found_at, found = self.sequence.first_stop(found_at, self.request.stop_token_ids)
        self.stop_scan = (found_at, found)
        return self.stop_scan


class Scheduled(NamedTuple):
    state: RequestState
    tokens: int
    computed: int  # before this step
    decode: bool


class Admitted(NamedTuple):
    state: RequestState
    cached_tokens: int


@dataclass(slots=True)
class Plan:
    """One step's decisions; blocks are already allocated."""

    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)


class Outcome(NamedTuple):
    """What one step yields: who got a token, whose prompt ended, who finished and why."""

    outputs: list[RequestState]
    prefilled: list[RequestState]
    finished: list[tuple[RequestState, str]]


class FcfsQueue:
    """Waiting requests in order of arrival; a preempted one goes back to the head."""

    def __init__(self) -> None:
        self._queue: deque[RequestState] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._queue)

    def add(self, state: RequestState) -> None:
        self._queue.append(state)

    def put_back(self, state: RequestState) -> None:
        self._queue.appendleft(state)

    def head(self) -> RequestState:
        return self._queue[0]

    def pop(self) -> RequestState:
        return self._queue.popleft()

    def remove(self, state: RequestState) -> None:
        self._queue.remove(state)


class PriorityQueue:
    """Waiting requests by priority, then by order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestState]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, _, state in sorted(self._heap, key=lambda entry: entry[:2]))

    def add(self, state: RequestState) -> None:
        heapq.heappush(self._heap, (state.request.priority, state.order, state))

    put_back = add

    def head(self) -> RequestState:
        return self._heap[0][2]

    def pop(self) -> RequestState:
        return heapq.heappop(self._heap)[2]

    def remove(self, state: RequestState) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not state]
        heapq.heapify(self._heap)


class Scheduler:
    """Owns the lists and the pool. `schedule` then `commit` is one step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, caching=config.enable_prefix_caching)
        self.running: list[RequestState] = []
        self.by_priority = config.scheduling_policy == "priority"
        self.waiting: FcfsQueue | PriorityQueue = PriorityQueue() if self.by_priority else FcfsQueue()

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        config = self.config
        plan = Plan()
        budget = config.max_num_batched_tokens
        crowded = len(self.running) + len(self.waiting) > 1
        tokens_max = (config.long_prefill_token_threshold if crowded else 0) or config.max_model_len
        index = 0
        while index < len(self.running) and budget > 0:
            state = self.running[index]
            tokens = min(state.known - state.computed, tokens_max, budget)
            while not self._grow(state, tokens):
                victim = self._victim()
                budget += self._take_back(plan, victim)
                if self.by_priority:
                    index = self.running.index(state) if victim is not state else index
                if victim is state:
                    break
            else:
                plan.scheduled.append(Scheduled(state, tokens, state.computed, state.prefilled))
                budget -= tokens
                index += 1
                continue
            break
        if not plan.preempted:
            self._admit(plan, budget, tokens_max)
        return plan

    def commit(self, plan: Plan) -> Outcome:
        """The step has run: requests whose known tokens are all computed get one more; some finish and free at once."""
        outcome = Outcome([], [], [])
        for state, tokens, _, _ in plan.scheduled:
            state.computed += tokens
            if state.computed < state.known:
                continue
            if not state.prefilled:
                state.prefilled = True
                self.pool.start_decoding(state.blocks)
                outcome.prefilled.append(state)
            state.known += 1
            outcome.outputs.append(state)
            reason = finish_reason(state)
            if reason:
                outcome.finished.append((state, reason))
                self._release(state)
        if outcome.finished:
            gone = {id(state) for state, _ in outcome.finished}
            self.running = [state for state in self.running if id(state) not in gone]
        return outcome

    def remove(self, state: RequestState) -> None:
        """An abort: out of whichever list holds it, blocks freed."""
        if state in self.running:
            self.running.remove(state)
            self._release(state)
        else:
            self.waiting.remove(state)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _grow(self, state: RequestState, tokens: int) -> bool:
        total = state.computed + tokens
        missing = -(-total // self.config.block_size) - len(state.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            self.pool.allocate(missing, state.blocks, decoding=state.prefilled)
        self.cache_full_blocks(state, total)
        return True

    def cache_full_blocks(self, state: RequestState, tokens: int) -> None:
        full = tokens // self.config.block_size
        if full > state.cached_blocks and self.pool.caching:
            self.pool.store(state.sequence, state.blocks, state.cached_blocks, full, state.request.session_id)
            state.cached_blocks = full

    def _release(self, state: RequestState) -> None:
        self.pool.release(state.blocks, decoding=state.prefilled)
        state.blocks = []

    # -- preemption ------------------------------------------------------------------------------------------------

    def _victim(self) -> RequestState:
        if not self.by_priority:
            return self.running[-1]
        return max(self.running, key=lambda state: (state.request.priority, state.order))

    def _take_back(self, plan: Plan, victim: RequestState) -> int:
        """Preempt; returns the budget that the victim had already taken in this step."""
        if victim is self.running[-1]:
            self.running.pop()
        else:
            self.running.remove(victim)
        given_back = 0
        if self.by_priority:
            given_back = sum(entry.tokens for entry in plan.scheduled if entry.state is victim)
            plan.scheduled = [entry for entry in plan.scheduled if entry.state is not victim]
        self._release(victim)
        victim.computed = 0
        victim.cached_blocks = 0
        victim.prefilled = False
        victim.preemptions += 1
        self.waiting.put_back(victim)
        plan.preempted.append(victim)
        return given_back

    def preempt_running(self) -> list[RequestState]:
        """Between two steps: everybody, last admitted first, so that the queue's head is who ran longest."""
        plan = Plan()
        while self.running:
            self._take_back(plan, self.running[-1])
        return plan.preempted

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int, tokens_max: int) -> None:
        size = self.config.block_size
        while self.waiting and budget > 0:
            state = self.waiting.head()
            found = self._fits(state, budget, tokens_max, report=True)
            if found is None:
                return
            hits, tokens = found
            self.waiting.pop()
            self.running.append(state)
            self.pool.touch(hits)
            cached = len(hits) * size
            state.computed = cached
            state.cached_blocks = len(hits)
            state.blocks = hits
            plan.admitted.append(Admitted(state, cached))
            self._grow(state, tokens)
            plan.scheduled.append(Scheduled(state, tokens, cached, decode=False))
            budget -= tokens

    def _fits(
        self, state: RequestState, budget: int, tokens_max: int, *, report: bool
    ) -> tuple[list[Block], int] | None:
        """The hit blocks and the tokens of a first chunk, or None if this request must go on waiting.

        The whole known sequence has to fit, hit blocks that lie in the free queue counting as needed.
        """
        config, pool = self.config, self.pool
        if len(self.running) >= config.max_num_seqs:
            return None
        size = config.block_size
        hits = [] if state.request.skip_cache_read else pool.hits(state.sequence, (state.known - 1) // size)
        if report and hits and state.request.report_full:
            pool.events.append(state.sequence.stored(0, len(hits), state.request.session_id))
        tokens = min(state.known - len(hits) * size, tokens_max)
        if tokens > budget:
            # Without chunking a prompt larger than what is left of the budget waits; alone it is chunked all the
            # same, because it would wait for ever (vLLM refuses to start with such a budget).
            alone = not self.running and budget == config.max_num_batched_tokens
            if not config.enable_chunked_prefill and not alone:
                return None
            tokens = budget
        needed = -(-state.known // size) + (config.watermark_blocks if self.running else 0)
        if needed > pool.free:
            needed -= sum(1 for block in hits if block.holders)
            if needed > pool.free:
                return None
        return hits, tokens

    def head_fits_now(self) -> bool:
        """Whether a step that starts now, all running requests decoding, could admit the head of the queue.

        Exact but for blocks that this step's decodes allocate or cache first.
        """
        budget = self.config.max_num_batched_tokens - len(self.running)
        if budget <= 0:
            return False
        tokens_max = self.config.long_prefill_token_threshold or self.config.max_model_len
        return self._fits(self.waiting.head(), budget, tokens_max, report=False) is not None


def finish_reason(state: RequestState) -> str | None:
    """Judged right after a token was added; a stop id wins over the length."""
    if state.request.stop_token_ids:
        last = state.known - state.prompt - 1
        if state.next_stop(last) == (last, True):
            return "stop"
    return "length" if state.known >= state.known_max else None
