"""Notices that an engine steps and gets nowhere, so that it ends with an error instead of a hang.

Progress is a token that was never computed before: one of an answer, or one of a prompt beyond all that its request
ever had. Time is what the steps took, handed in, so a replica that is idle, paused or asleep is not stuck. The count
bounds a cost model whose steps take no time.
"""

from mock_engine.cost_model import PS_PER_US
from mock_engine.errors import StuckError
from mock_engine.scheduler import Plan, RequestState, Scheduler

PATIENCE_US = 30_000_000
STEPS_MAX = 10_000
NAMED_MAX = 5  # requests in the error


class Watchdog:
    def __init__(self) -> None:
        self._waited_ps = 0
        self._steps = 0

    def progressed(self) -> None:
        self._waited_ps = self._steps = 0

    def watch(self, plan: Plan, duration_ps: int, scheduler: Scheduler) -> None:
        """A step without an output has ended. Raises StuckError when it was one too many."""
        if _got_further(plan):
            self.progressed()
            return
        self._waited_ps += duration_ps
        self._steps += 1
        waited_us = self._waited_ps // PS_PER_US
        if waited_us >= PATIENCE_US or self._steps >= STEPS_MAX:
            raise StuckError(_message(waited_us, self._steps, scheduler))


def _got_further(plan: Plan) -> bool:
    further = False
    for state, tokens, computed, _ in plan.scheduled:
        if computed + tokens > state.furthest:
            state.furthest = computed + tokens
            further = True
    return further


def _message(waited_us: int, steps: int, scheduler: Scheduler) -> str:
    pool, size = scheduler.pool, scheduler.config.block_size
    live = [("running", state) for state in scheduler.running]
    live += [("waiting", state) for state in scheduler.waiting]
    named = "; ".join(_told(state, where, size) for where, state in live[:NAMED_MAX])
    more = f" and {len(live) - NAMED_MAX} more" if len(live) > NAMED_MAX else ""
    return (
        f"no request got any further in {waited_us / 1e6:.1f} s of engine time ({steps} steps): {named}{more}; "
        f"{pool.free} of {scheduler.config.usable_blocks} KV cache blocks are available. Restart the replica, with "
        "more blocks if one of these requests needs nearly all of them"
    )


def _told(state: RequestState, where: str, block_size: int) -> str:
    needed = -(-state.known // block_size)
    return (
        f"{state.request_id} ({where}) needs {needed} KV cache blocks, holds {len(state.blocks)}, and has computed "
        f"{state.computed} of {state.known} tokens"
    )
