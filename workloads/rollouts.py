"""The workload `rl-rollout`: multi-turn rollouts in steps, whose slowest member sets the time.

The defaults are the shape of the straggler experiment: eight rollouts a step, ten turns each, 2,048 tokens of first
input, 1,024 generated a turn, and two stragglers a step whose last turn generates 8,192. Steps stream into each
other (asynchronous RL) unless `barrier` holds each back until the step before has ended. With
`samples_per_prompt = n`, n rollouts of a step are sampled from the same first input, as group-based RL does.
Heavy tails come through distributions, such as `output_tokens = { dist = "lognormal", mean = 1024, sigma = 1 }`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from workloads.distributions import Length, Pause
from workloads.limits import ANY, SESSIONS_MAX, SOME, STEP_ROLLOUTS_MAX, TURNS, Whole, at_least, sessions
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable


class RlRollout(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "rl-rollout"`."""

    kind: ClassVar[str] = "rl-rollout"
    pauses: ClassVar[tuple[str, ...]] = ("tool_time_ms",)

    steps: int = 6
    """Batches of rollouts."""
    rollouts_per_step: int = 8
    samples_per_prompt: int = 1
    """Rollouts that share one first input; divides rollouts_per_step, so that groups are whole."""
    turns: Length = 10
    first_input_tokens: Length = 2048
    tool_tokens: Length = 0
    """What the environment adds between an answer and the next turn."""
    tool_time_ms: Pause = 0.0
    """How long the environment takes for it."""
    output_tokens: Length = 1024
    stragglers: Length = 2
    """Rollouts of each step, drawn at random, whose last turn is long; a spread one is drawn once a step."""
    straggler_last_output_tokens: Length = 8192
    barrier: bool = False
    """True: a step starts when all rollouts of the step before have ended."""
    weight_sync_every_steps: int = 0
    """New weights after every so many steps, and none after the last; 0: never. See `syncs_after_step`, which
    drivers ask without drawing anything."""

    @classmethod
    def prepare(cls, table: dict[str, Any]) -> dict[str, Any]:
        """`groups = g` stands for g prompts a step, each sampled `samples_per_prompt` times."""
        if "groups" not in table:
            return table
        groups, samples = table.pop("groups"), table.get("samples_per_prompt", 1)
        if "rollouts_per_step" in table:
            raise ValueError("groups and rollouts_per_step both say how many rollouts a step has: drop one of them")
        for name, value in (("groups", groups), ("samples_per_prompt", samples)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: give a whole number, at least 1")
        return table | {"rollouts_per_step": groups * samples}

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 1, SESSIONS_MAX)
        at_least("rollouts_per_step", self.rollouts_per_step, 1, STEP_ROLLOUTS_MAX)
        at_least("samples_per_prompt", self.samples_per_prompt, 1)
        sessions("steps x rollouts_per_step", self.steps * self.rollouts_per_step)
        at_least("weight_sync_every_steps", self.weight_sync_every_steps, 0)
        if self.rollouts_per_step % self.samples_per_prompt:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} does not divide rollouts_per_step = "
                f"{self.rollouts_per_step}: a group would be cut; make one a multiple of the other"
            )
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        few = f"a step has {self.rollouts_per_step} rollouts (rollouts_per_step), so give 0 to {self.rollouts_per_step}"
        return {
            "turns": TURNS,
            "first_input_tokens": SOME,
            "tool_tokens": ANY,
            "output_tokens": SOME,
            "stragglers": Whole(0, self.rollouts_per_step, few),
            "straggler_last_output_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.steps * self.rollouts_per_step

    def syncs_after_step(self, step: int) -> bool:
        every = self.weight_sync_every_steps
        return every > 0 and (step + 1) % every == 0 and step + 1 < self.steps

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        turns, first, tool, output, long_output = (
            self.sampler(name, streams)
            for name in (
                "turns",
                "first_input_tokens",
                "tool_tokens",
                "output_tokens",
                "straggler_last_output_tokens",
            )
        )
        stragglers = self.sampler("stragglers", streams, "straggler_count")
        tool_us = self.pause_sampler_us("tool_time_ms", streams)
        for step in range(self.steps):
            late = self._draw_stragglers(stragglers(), streams)
            shared: Span = (0, 0)
            for rollout in range(self.rollouts_per_step):
                if rollout % self.samples_per_prompt == 0:
                    shared = (spans.getrandbits(SPAN_ID_BITS), first())
                made: list[Turn] = []
                last = turns() - 1
                for index in range(last + 1):
                    new: tuple[Span, ...] = (shared,)
                    if index:
                        tokens = tool()
                        new = ((spans.getrandbits(SPAN_ID_BITS), tokens),) if tokens else ()
                    length = long_output() if rollout in late and index == last else output()
                    answer = (spans.getrandbits(SPAN_ID_BITS), length)
                    made.append(Turn(index, new, answer, tool_us() if index else 0))
                yield Session(
                    session_id=f"step{step:03d}-r{rollout:03d}-{ids.getrandbits(32):08x}",
                    turns=tuple(made),
                    group=f"step{step:03d}-g{rollout // self.samples_per_prompt:03d}",
                    rollout_step=step,
                    straggler=rollout in late,
                )

    def _draw_stragglers(self, count: int, streams: Streams) -> set[int]:
        """A subset of the step's rollouts, all subsets of that size alike; one draw per straggler."""
        rng = streams["workloads.stragglers"]
        left = list(range(self.rollouts_per_step))
        return {left.pop(int(rng.random() * len(left))) for _ in range(count)}
