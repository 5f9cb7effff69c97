"""The workload `agentic-coding`: long contexts that grow by tool results, and sub-agents that start from a prefix.

A session resends everything every turn. A sub-agent is a session of its own: it starts when the turn that called it
was answered, and the caller's next turn waits for its end (`Turn.after`). It begins either with the prefix that all
sub-agents share, as recorded coding agents do, or with its caller's whole context (`subagent_prefix = "context"`).

The default shape is that of the published example of callanjfox/agentic-coding-analysis: one prompt that became 92
requests, a main agent and four sub-agents. Figures marked [S] stand in its examples/visualizations/combined_stats.txt,
those marked [T] in its docs/TRACE_FORMAT.md; a lognormal spread is 2 ln(mean / median), square root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec

from workloads.distributions import Geometric, Length, LogNormal, Pause, check_length, largest
from workloads.limits import (
    ANY,
    SESSIONS_MAX,
    SOME,
    SUBAGENTS_MAX,
    TOKENS_MAX,
    TURNS,
    Whole,
    at_least,
    sessions,
    share,
)
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable


class AgenticCoding(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a `[workload]` table with `kind = "agentic-coding"`."""

    kind: ClassVar[str] = "agentic-coding"
    pauses: ClassVar[tuple[str, ...]] = ("tool_time_ms",)

    task_count: int = msgspec.field(default=8, name="sessions")
    """Main agents; sub-agents come on top."""
    turns: Length = 16
    """Requests of a main agent; 16 in the example's validation output (README)."""
    system_prompt_tokens: Length = 15_307
    """Tools and system prompt, the same for all main agents, so a spread one is drawn once: 11,880 + 3,427 [T]; 0:
    none."""
    first_input_tokens: Length = 3_798
    """The task itself: the first request of the format's example has 19,105 tokens [T], less tools and system."""
    tool_result_tokens: Length = LogNormal(mean=4_148, sigma=1.16, max=21_466)
    """What each further request adds. Contexts grow by 4,553 tokens a turn (median 2,325, maximum 21,466) [S], of
    which 405 are the answer."""
    output_tokens: Length = LogNormal(mean=405, sigma=1.0)
    """74,611 tokens over 184 requests [S]; their spread is not published, 1.0 is our choice."""
    tool_time_ms: Pause = LogNormal(mean=4_600, sigma=1.75, max=10_000)
    """Time between requests: mean 4.6 s, median 1.0 s [S], with AgentX's cap of 10 s on idle gaps."""
    subagents: Length = 4
    """Sub-agents a main agent calls in all, at turns that are drawn; 4 in the example (README)."""
    subagent_turns: Length = Geometric(mean=19)
    """(92 - 16) / 4 requests each (README)."""
    subagent_prefix: Literal["system", "context"] = "system"
    subagent_system_prompt_tokens: Length = 8_540
    """With "system": 7,810 + 730 tokens that all sub-agents share [T]; drawn once, 0: none."""
    subagent_input_tokens: Length = 1_429
    """The sub-agent's order: its first request has 9,969 tokens [T], less tools and system."""
    parallel_share: float = 0.5
    """Chance that a sub-agent is called by the same turn as the one before; then both run at once."""
    max_context_tokens: int = 120_000
    """A session ends before a request that would be longer with its answer; a limit of the model, so one number."""

    def __post_init__(self) -> None:
        at_least("sessions", self.task_count, 1, SESSIONS_MAX)
        check_length("subagents", self.subagents, Whole(0, SUBAGENTS_MAX))
        most, where = largest(self.subagents)
        sessions("sessions x (1 + subagents)", self.task_count * (1 + most), where)
        share("parallel_share", self.parallel_share)
        at_least("max_context_tokens", self.max_context_tokens, 2, TOKENS_MAX)
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        return {
            "turns": TURNS,
            "system_prompt_tokens": ANY,
            "first_input_tokens": SOME,
            "tool_result_tokens": SOME,
            "output_tokens": SOME,
            "subagents": Whole(0, min(SUBAGENTS_MAX, SESSIONS_MAX // self.task_count - 1)),
            "subagent_turns": TURNS,
            "subagent_system_prompt_tokens": ANY,
            "subagent_input_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.task_count + self.total("subagents", self.task_count, streams)

    def draw(self, streams: Streams) -> Iterator[Session]:
        prompts = streams["workloads.system_prompts"]
        systems: list[tuple[Span, ...]] = []
        for name in ("system_prompt_tokens", "subagent_system_prompt_tokens"):
            span_id, tokens = prompts.getrandbits(SPAN_ID_BITS), self.sampler(name, streams)()
            systems.append(((span_id, tokens),) if tokens else ())
        agents = _Agents(self, streams)
        for number in range(self.task_count):
            yield from agents.task(number, systems[0], systems[1])


@dataclass(slots=True)
class _Talk:
    """A session while its turns are being drawn."""

    session_id: str
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.tokens += sum(tokens for _, tokens in turn.input) + turn.output[1]

    def context(self, index: int) -> tuple[Span, ...]:
        """Everything said and answered up to the end of a turn."""
        return tuple(span for turn in self.turns[: index + 1] for span in (*turn.input, turn.output))


class _Agents:
    """The samplers, and the shape of a task."""

    def __init__(self, table: AgenticCoding, streams: Streams) -> None:
        self._table = table
        self._spans, self._ids = streams["workloads.spans"], streams["workloads.session_ids"]
        self._calls = streams["workloads.subagent_calls"]
        self._turns = table.sampler("turns", streams)
        self._first = table.sampler("first_input_tokens", streams)
        self._result = table.sampler("tool_result_tokens", streams)
        self._output = table.sampler("output_tokens", streams)
        self._tool_us = table.pause_sampler_us("tool_time_ms", streams)
        self._subagents = table.sampler("subagents", streams)
        self._sub_turns = table.sampler("subagent_turns", streams)
        self._sub_input = table.sampler("subagent_input_tokens", streams)

    def task(self, number: int, system: tuple[Span, ...], sub_system: tuple[Span, ...]) -> Iterator[Session]:
        """A main agent and then its sub-agents, in the order of their calls."""
        main = _Talk(f"agent{number:04d}-{self._ids.getrandbits(32):08x}")
        for index in range(self._turns()):
            tokens = self._first() if index == 0 else self._result()
            if not self._grow(main, index, system if index == 0 else (), tokens):
                break
        turns = main.turns
        subs: list[Session] = []
        for index, called in sorted(Counter(self._draw_calls(len(turns))).items()):
            caller = f"{main.session_id}#{index}"
            turns[index] = replace(turns[index], name=caller)
            fork = main.context(index) if self._table.subagent_prefix == "context" else sub_system
            new = [self._subagent(f"{main.session_id}-sub{len(subs) + k}", fork, caller) for k in range(called)]
            subs += new
            if index + 1 < len(turns):
                turns[index + 1] = replace(turns[index + 1], after=tuple(sub.session_id for sub in new))
        yield Session(session_id=main.session_id, turns=tuple(turns), group="main")
        yield from subs

    def _draw_calls(self, turns: int) -> list[int]:
        """The turn that calls each sub-agent."""
        calls: list[int] = []
        for _ in range(self._subagents()):
            again, place = self._calls.random() < self._table.parallel_share, int(self._calls.random() * turns)
            calls.append(calls[-1] if calls and again else place)
        return calls

    def _subagent(self, session_id: str, prefix: tuple[Span, ...], caller: str) -> Session:
        talk = _Talk(session_id)
        for index in range(self._sub_turns()):
            tokens = self._sub_input() if index == 0 else self._result()
            if not self._grow(talk, index, prefix if index == 0 else (), tokens):
                break
        return Session(session_id=session_id, turns=tuple(talk.turns), group="sub", after=(caller,))

    def _grow(self, talk: _Talk, index: int, prefix: tuple[Span, ...], tokens: int) -> bool:
        """Adds a turn; False when the context would be too long. A first turn is always added, cut to what fits."""
        answer, pause_us = self._output(), self._tool_us()
        room = self._table.max_context_tokens - talk.tokens - sum(span[1] for span in prefix) - answer
        if tokens > room and index:
            return False
        new = (*prefix, (self._spans.getrandbits(SPAN_ID_BITS), max(1, min(tokens, room))))
        output = (self._spans.getrandbits(SPAN_ID_BITS), answer)
        talk.add(Turn(index, new, output, pause_us if index else 0))
        return True
