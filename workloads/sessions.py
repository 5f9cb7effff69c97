"""Sessions: the ordered turns of one conversation, symbolic and complete before the first request is sent.

Law: a turn's prompt is the previous prompt, the previous answer's span and the turn's new input, so turn n + 1
always begins with everything that turn n said and got. The lengths of answers are drawn here; a router under test
never sees this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from workloads.spans import Span, prompt_tokens
from workloads.streams import Streams


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer."""

    index: int
    input: tuple[Span, ...]
    """What this turn adds to the conversation; may be empty after the first turn."""
    output: Span
    """The answer: its id is the request's `seed`, its length the request's `max_tokens`."""
    think_us: int = 0
    """Pause between the end of the previous answer and this request."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation or rollout."""

    session_id: str
    turns: tuple[Turn, ...]
    group: str | None = None
    """Sessions of one group begin with the same text."""
    rollout_step: int | None = None
    """The RL step this rollout belongs to; None outside RL."""
    straggler: bool = False

    def prompt(self, turn_index: int) -> tuple[Span, ...]:
        """The whole prompt of a turn."""
        spans: list[Span] = []
        for turn in self.turns[:turn_index]:
            spans.extend(turn.input)
            spans.append(turn.output)
        spans.extend(self.turns[turn_index].input)
        return tuple(spans)

    def prompts(self) -> Iterator[tuple[Turn, tuple[Span, ...]]]:
        """Every turn with its prompt; cheaper than asking for each."""
        spans: list[Span] = []
        for turn in self.turns:
            spans.extend(turn.input)
            yield turn, tuple(spans)
            spans.append(turn.output)

    @property
    def total_tokens(self) -> int:
        """Length of the context after the last answer."""
        return sum(prompt_tokens(turn.input) + turn.output[1] for turn in self.turns)


class Workload(Protocol):
    """What a kind of traffic must offer; its other attributes are the keys of its table."""

    @property
    def kind(self) -> str: ...

    @property
    def barrier(self) -> bool:
        """True: sessions of a rollout step start only when all of the step before have ended."""
        ...

    @property
    def session_count(self) -> int:
        """How many sessions `sessions` yields."""
        ...

    def sessions(self, streams: Streams) -> Iterator[Session]:
        """The sessions in the order in which slots take them. Draws from `streams` as it goes: give fresh streams
        to get the same sessions again."""
        ...
