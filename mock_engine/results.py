"""What an engine reports: one step, a run of identical decode steps, a snapshot of its state.

Values only. Instants are whole microseconds of the clock that the driver hands in; a step's results become visible
outside at its `ends_us`.
"""

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mock_engine.cost_model import PS_PER_US, ceil_us, stretch_ps
from mock_engine.events import KvEvent

if TYPE_CHECKING:
    import numpy as np


class Admission(NamedTuple):
    """A request left the queue; again after each preemption."""

    request_id: str
    cached_tokens: int
    at_us: int
    resumed: bool


class Finish(NamedTuple):
    """`reason` is vLLM's: length or stop."""

    request_id: str
    reason: str


class Step(msgspec.Struct, frozen=True, gc=False):
    """One engine step."""

    index: int
    starts_us: int
    ends_us: int
    scheduled: tuple[tuple[str, int], ...]  # (request id, tokens) in scheduling order
    admitted: tuple[Admission, ...]
    preempted: tuple[str, ...]
    outputs: tuple[str, ...]  # requests that got one token each
    finished: tuple[Finish, ...]
    kv_events: tuple[KvEvent, ...]
    running: tuple[str, ...]  # after the step
    waiting: int
    free_blocks: int


class Run(msgspec.Struct, frozen=True, gc=False):
    """`steps` decode steps of the same requests, without an admission, prefill, finish or preemption."""

    index: int  # of the first step
    steps: int
    starts_us: int
    ends_us: int
    outputs: tuple[str, ...]  # each gets one token in every step
    kv_events: tuple[tuple[int, int, tuple[KvEvent, ...]], ...]  # (step j, its ends_us, events), where there are any
    waiting: int
    free_blocks: int  # after the last step
    starts_ps: int
    first_ps: int
    growth_ps: int

    def token_us(self, j: int) -> int:
        """When step j (0 .. steps - 1) ends."""
        return ceil_us(self.starts_ps + stretch_ps(self.first_ps, self.growth_ps, j + 1))

    def token_instants_us(self) -> "np.ndarray":
        """`token_us` of every step."""
        import numpy as np  # only simulations ask, and a replica's process starts faster without

        steps = np.arange(1, self.steps + 1, dtype=np.int64)
        ps = self.starts_ps + steps * self.first_ps + steps * (steps - 1) // 2 * self.growth_ps
        return -(-ps // PS_PER_US)


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """State between two steps; the counters below `active_decode_blocks` only ever grow."""

    running: int
    waiting: int
    used_blocks: int
    free_blocks: int  # cached blocks that nobody holds included
    cached_blocks: int
    active_decode_blocks: int  # blocks held by at least one request that is past its prefill
    hit_tokens: int  # first admissions only, as vLLM counts
    query_tokens: int
    recomputed_hit_tokens: int  # what resumed requests found again
    evicted_blocks: int
    preemptions: int
    prompt_tokens: int  # of requests that got their first token
    generation_tokens: int
    received: int  # = rejected + finished + aborted + running + waiting
    rejected: int
    finished: int
    aborted: int
    steps: int
    busy_us: int
