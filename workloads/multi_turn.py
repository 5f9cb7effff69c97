"""The workload `multi-turn`: conversations that grow, some of them behind the same system prompt.

Each session draws its number of turns, and each turn its new input, its answer's length and the pause before it.
With `shared_system_prompts = g` every session begins with one of g system prompts, drawn alike; that text is all
that different sessions have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec

from workloads.distributions import Length, Pause, check_length, check_pause, length_sampler, pause_sampler_us
from workloads.limits import SESSIONS_MAX, TOKENS_MAX, TURNS_MAX, at_least
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable


class MultiTurn(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "multi-turn"`; every number may also be a distribution."""

    kind: ClassVar[str] = "multi-turn"
    aliases: ClassVar[Mapping[str, str]] = {
        "conversation_num": "sessions",
        "num_users": "sessions",
        "num_rounds": "turns",
    }

    session_count: int = msgspec.field(default=64, name="sessions")
    """Conversations in all."""
    turns: Length = 6
    """Requests of a conversation."""
    shared_system_prompts: int = 0
    """How many system prompts there are; 0: conversations have nothing in common."""
    system_prompt_tokens: int = 512
    """Length of each; used when there are any."""
    first_input_tokens: Length = 512
    """What the first request adds after the system prompt."""
    input_tokens: Length = 128
    """What every further request adds after the previous answer."""
    output_tokens: Length = 128
    """Length of an answer."""
    think_time_ms: Pause = 0.0
    """Pause between an answer's end and the next request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sessions", self.session_count, 1, SESSIONS_MAX)
        at_least("shared_system_prompts", self.shared_system_prompts, 0, SESSIONS_MAX)
        if self.shared_system_prompts and self.system_prompt_tokens < 1:
            raise ValueError(
                f"system_prompt_tokens = {self.system_prompt_tokens}: a shared system prompt has at least "
                "1 token; set shared_system_prompts = 0 for none"
            )
        at_least("system_prompt_tokens", self.system_prompt_tokens, 0, TOKENS_MAX)
        check_length("turns", self.turns, 1, TURNS_MAX)
        check_length("first_input_tokens", self.first_input_tokens, 1)
        check_length("input_tokens", self.input_tokens, 0)
        check_length("output_tokens", self.output_tokens, 1)
        check_pause("think_time_ms", self.think_time_ms)

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, groups = streams["workloads.spans"], streams["workloads.session_ids"], streams["workloads.groups"]
        turns = length_sampler(self.turns, streams["workloads.turns"], 1, TURNS_MAX)
        first = length_sampler(self.first_input_tokens, streams["workloads.first_input_tokens"], 1)
        later = length_sampler(self.input_tokens, streams["workloads.input_tokens"], 0)
        output = length_sampler(self.output_tokens, streams["workloads.output_tokens"], 1)
        think_us = pause_sampler_us(self.think_time_ms, streams["workloads.think_time"])
        systems = [
            (streams["workloads.system_prompts"].getrandbits(SPAN_ID_BITS), self.system_prompt_tokens)
            for _ in range(self.shared_system_prompts)
        ]
        for number in range(self.session_count):
            group = int(groups.random() * len(systems)) if systems else None
            made: list[Turn] = []
            for index in range(turns()):
                new: list[Span] = []
                if index == 0 and group is not None:
                    new.append(systems[group])
                tokens = first() if index == 0 else later()
                if tokens:
                    new.append((spans.getrandbits(SPAN_ID_BITS), tokens))
                answer = (spans.getrandbits(SPAN_ID_BITS), output())
                made.append(Turn(index, tuple(new), answer, think_us() if index else 0))
            yield Session(
                session_id=f"s{number:05d}-{ids.getrandbits(32):08x}",
                turns=tuple(made),
                group=None if group is None else f"system-{group}",
            )
