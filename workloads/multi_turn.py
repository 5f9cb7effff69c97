"""The workload `multi-turn`: conversations that grow, some of them behind the same system prompt.

Each session draws its number of turns, and each turn its new input, its answer's length and the pause before it.
With `shared_system_prompts = g` every session begins with one of g system prompts, drawn alike; that text is all
that different sessions have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec

from workloads.distributions import Length, Pause, largest
from workloads.limits import ANY, SESSIONS_MAX, SOME, TURNS, Whole, at_least, shown
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable


class MultiTurn(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "multi-turn"`."""

    kind: ClassVar[str] = "multi-turn"
    aliases: ClassVar[Mapping[str, str]] = {
        "conversation_num": "sessions",
        "num_users": "sessions",
        "num_rounds": "turns",
    }
    pauses: ClassVar[tuple[str, ...]] = ("think_time_ms",)

    conversations: int = msgspec.field(default=64, name="sessions")
    """Conversations in all."""
    turns: Length = 6
    """Requests of a conversation."""
    shared_system_prompts: int = 0
    """How many system prompts there are; 0: conversations have nothing in common."""
    system_prompt_tokens: Length = 512
    """Length of each, drawn once a system prompt; 0 when drawn: its conversations begin without one."""
    first_input_tokens: Length = 512
    """What the first request adds after the system prompt."""
    input_tokens: Length = 128
    """What every further request adds after the previous answer."""
    output_tokens: Length = 128
    """Length of an answer."""
    think_time_ms: Pause = 0.0
    """Pause between an answer's end and the next request."""

    def __post_init__(self) -> None:
        at_least("sessions", self.conversations, 1, SESSIONS_MAX)
        at_least("shared_system_prompts", self.shared_system_prompts, 0, SESSIONS_MAX)
        most, where = largest(self.system_prompt_tokens)
        if self.shared_system_prompts and most < 1:
            raise ValueError(
                f"system_prompt_tokens = {shown(most)}{where}: a shared system prompt has at least "
                "1 token; set shared_system_prompts = 0 for none"
            )
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        return {
            "turns": TURNS,
            "system_prompt_tokens": ANY,
            "first_input_tokens": SOME,
            "input_tokens": ANY,
            "output_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.conversations

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, groups = streams["workloads.spans"], streams["workloads.session_ids"], streams["workloads.groups"]
        turns, first, later, output = (
            self.sampler(name, streams) for name in ("turns", "first_input_tokens", "input_tokens", "output_tokens")
        )
        think_us = self.pause_sampler_us("think_time_ms", streams)
        prompts, length = streams["workloads.system_prompts"], self.sampler("system_prompt_tokens", streams)
        systems: list[Span] = [(prompts.getrandbits(SPAN_ID_BITS), length()) for _ in range(self.shared_system_prompts)]
        for number in range(self.conversations):
            group = int(groups.random() * len(systems)) if systems else None
            system = [] if group is None or not systems[group][1] else [systems[group]]
            made: list[Turn] = []
            for index in range(turns()):
                new = [] if index else [*system]
                tokens = first() if index == 0 else later()
                if tokens:
                    new.append((spans.getrandbits(SPAN_ID_BITS), tokens))
                answer = (spans.getrandbits(SPAN_ID_BITS), output())
                made.append(Turn(index, tuple(new), answer, think_us() if index else 0))
            yield Session(
                session_id=f"s{number:05d}-{ids.getrandbits(32):08x}",
                turns=tuple(made),
                group=f"system-{group}" if system else None,
            )
