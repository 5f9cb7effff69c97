"""Sessions: the ordered turns of one conversation, symbolic and complete before the first request is sent.

Law: a turn's prompt is the previous prompt, the previous answer's span and the turn's new input, so turn n + 1
always begins with everything that turn n said and got. Two fields make exceptions, which only traces and timestamps
use: `Turn.restart` drops what was said before, `Turn.front` puts a span in front of one request. The lengths of
answers are drawn here; a router under test never sees this module.

When a turn may be sent, for every driver alike: the turn before it was answered `think_us` ago; everything that its
`after` names has ended (a session ends with its last answer, or by being cut; a turn ends with its answer); and
`start_us` has come. A session with neither `start_us` nor `after` is taken by a slot of a closed loop and holds it
until it ends. All others start by themselves and take no slot: a driver pulls them off the iterator together with
the session before them and keeps them aside. `workloads.order` is this rule as a program.
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
    """Pause between the end of the previous answer and this request; for a first turn, between the end of the last
    thing that the session waits for and this request."""
    restart: bool = False
    """True: `input` is the whole prompt, and the history begins anew with it, as when an agent compacts its context or
    drops its thoughts. The conversation is still the same one to a router."""
    front: Span | None = None
    """Text in front of everything that this request alone carries, such as a timestamp: no part of the history."""
    start_us: int | None = None
    """Not sent before this instant; for a first turn see `Session.start_us`."""
    after: tuple[str, ...] = ()
    """Not sent before all of these have ended: session ids and turn names, as `Session.after`."""
    name: str | None = None
    """How the `after` of others calls this turn; None: nobody waits for it."""


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
    start_us: int | None = None
    """When the first turn is sent, counted from the start of the load; None: when a slot takes the session, or when
    what it waits for has ended. Sessions are yielded in the order of these instants."""
    after: tuple[str, ...] = ()
    """What must have ended before the first turn is sent: ids of sessions, names of turns. Whoever yields the session
    yields these too; they may come later only if another session's turn waits for this one."""
    cache_salt: str | None = None
    """Sent with every request, as vLLM's `cache_salt`: sessions with another salt (None is one more) share no block,
    however equal their text."""

    def prompt(self, turn_index: int) -> tuple[Span, ...]:
        """The whole prompt of a turn."""
        turn = self.turns[turn_index]
        first = turn_index
        while first and not self.turns[first].restart:
            first -= 1
        spans: list[Span] = []
        for before in self.turns[first:turn_index]:
            spans.extend(before.input)
            spans.append(before.output)
        spans.extend(turn.input)
        return tuple(spans) if turn.front is None else (turn.front, *spans)

    def prompts(self) -> Iterator[tuple[Turn, tuple[Span, ...]]]:
        """Every turn with its prompt; cheaper than asking for each."""
        spans: list[Span] = []
        for turn in self.turns:
            if turn.restart:
                spans.clear()
            spans.extend(turn.input)
            yield turn, tuple(spans) if turn.front is None else (turn.front, *spans)
            spans.append(turn.output)

    @property
    def total_tokens(self) -> int:
        """Length of the context after the last answer."""
        return prompt_tokens(self.prompt(len(self.turns) - 1)) + self.turns[-1].output[1]

    @property
    def waits_for_a_slot(self) -> bool:
        """True: a closed loop decides when it starts."""
        return self.start_us is None and not self.after


class Workload(Protocol):
    """What a kind of traffic must offer; its other attributes are the keys of its table."""

    @property
    def kind(self) -> str: ...

    @property
    def barrier(self) -> bool:
        """True: sessions of a rollout step start only when all of the step before have ended."""
        ...

    def session_count(self, streams: Streams) -> int:
        """How many sessions `sessions` yields. Draws only what says so; give fresh streams."""
        ...

    def sessions(self, streams: Streams) -> Iterator[Session]:
        """The sessions in the order in which slots take them. Draws from `streams` as it goes: give fresh streams
        to get the same sessions again."""
        ...
