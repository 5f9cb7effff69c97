"""How a conversation becomes chat messages, and what our replicas' default template makes of these.

One rule for the load generator, which sends the messages, and for whoever counts their tokens afterwards: a session's
first input is the system's if another one follows it at once, all other input is the user's, and neighbours of the user
are one message. The template puts a token that names the role in front of each message and one token behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from workloads import Session, Span, Turn

Part = TypeVar("Part")
ROLE_MARKS: dict[str, Span] = {"system": (-1, 1), "user": (-2, 1), "assistant": (-3, 1)}
END_MARK: Span = (-4, 1)
"""Spans of the template's tokens; no span of a workload has a negative id."""


def said(turn: Turn) -> list[tuple[str, Span]]:
    """(role, span) of everything that a turn adds."""
    opening = turn.index == 0 and len(turn.input) > 1
    return [("system" if opening and not position else "user", span) for position, span in enumerate(turn.input)]


def messages(history: Iterable[tuple[str, Part]], front: Part | None = None) -> list[tuple[str, list[Part]]]:
    """(role, parts of the content) of each message; `front` stands before everything else."""
    made: list[tuple[str, list[Part]]] = []
    for role, part in history:
        if made and made[-1][0] == role == "user":
            made[-1][1].append(part)
        else:
            made.append((role, [part]))
    if front is not None:
        made[0][1].insert(0, front)
    return made


def templated(session: Session, turn_index: int) -> tuple[Span, ...]:
    """The prompt of a turn as our replicas render it, the template's tokens among its spans."""
    turns = session.turns[: turn_index + 1]
    history: list[tuple[str, Span]] = []
    for turn in turns:
        if turn.restart:
            history.clear()
        history += said(turn)
        if turn is not turns[-1]:
            history.append(("assistant", turn.output))
    spans: list[Span] = []
    for role, parts in messages(history, turns[-1].front):
        spans += (ROLE_MARKS[role], *parts, END_MARK)
    return (*spans, ROLE_MARKS["assistant"])
