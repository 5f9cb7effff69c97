"""The largest numbers that a workload may ask for, and the checks that name them.

Law: what passes is drawn in bounded time and memory, one session after the other. The numbers are far beyond what
anybody compared, so that a slip of the pen is found before it takes the machine; lengths that are spread end at them
as at a `max`.
"""

from __future__ import annotations

from typing import NamedTuple

SESSIONS_MAX = 1_000_000
"""A run keeps every session's rows until it ends."""
TURNS_MAX = 10_000
"""Of one session. A turn's prompt is all that was said, so the work of a session grows with the square of its turns."""
TOKENS_MAX = 10_000_000
"""Of one length: the longest context of any published model."""
PAUSE_MS_MAX = 1e9
"""Eleven days, for one pause."""
CHUNKS_MAX = 1_000
"""Of one prompt."""
CORPUS_CHUNKS_MAX = 100_000
RETRIEVED_CHUNKS_MAX = 6_000_000
"""Of all prompts: a million of six. They are drawn one by one, in about a microsecond each and three under a steep law,
and whoever checks a scenario waits for it."""
STEP_ROLLOUTS_MAX = 100_000
"""Its stragglers are drawn together."""
SUBAGENTS_MAX = 100
"""Of one main agent, which is drawn together with them."""


class Whole(NamedTuple):
    """Which whole numbers a key may be, when it may be a distribution."""

    low: int
    high: int = TOKENS_MAX
    why: str = ""
    """Why there are no more, and the mend; without it the message only names the most."""


SOME, ANY, TURNS = Whole(1), Whole(0), Whole(1, TURNS_MAX)


def shown(value: float) -> str:
    """A number for a message, never longer than its line."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else f"{'-' if value < 0 else ''}10^{len(str(abs(value))) - 1} or more"
    return f"{value:g}"


def at_least(name: str, value: int, low: int, high: int | None = None) -> None:
    """Refuses a whole number below `low` or above `high`."""
    if value < low:
        raise ValueError(f"{name} = {shown(value)}: at least {low} is needed")
    if high is not None and value > high:
        raise ValueError(f"{name} = {shown(value)}: at most {high:,} can be drawn, so lower it")


def share(name: str, value: float) -> None:
    """Refuses what is no share of a whole."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value:g}: give a share from 0 to 1")


def milliseconds(name: str, value: float) -> None:
    """Refuses what is no time, or one without an end in sight."""
    if not 0 <= value <= PAUSE_MS_MAX:
        raise ValueError(f"{name} = {value:g}: give a time in milliseconds, from 0 to {PAUSE_MS_MAX:g}")


def sessions(what: str, count: float, where: str = "") -> None:
    """Refuses more sessions than a run can hold; `what` names the keys that say how many there are, `where` the part of
    a distribution that does."""
    if count > SESSIONS_MAX:
        raise ValueError(
            f"{what} = {shown(count)}{where}: at most {SESSIONS_MAX:,} sessions can be drawn, as a run keeps the rows "
            "of all until it ends; ask for fewer"
        )
