"""What one cache without a limit would have served: the ceiling that no router can pass, whatever fails.

Hits are counted over the requests that the hit rate is of, in the order in which the engines admitted them. The cache
has seen all that an engine can have seen by then: everything that was admitted before, and what came to no good end
from the moment it was sent, since how far an engine got with it is not known. Blocks are counted as the engines do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.arm import Arm
from harness.chat_form import templated
from workloads import InfiniteCache, Session, Streams, prompt_tokens

Row = dict[str, Any]


def ceiling_of(arm: Arm, rows: Iterable[Row]) -> tuple[int | None, int | None]:
    """Prompt tokens that an infinite cache would have served of the measured successes that tell their cached tokens
    (of all, where none does), and how many different prompts the measured successes had; None without any success.
    The hits are None too where the engines' prompts are not as long as ours with our template: they have another
    tokenizer or template, so other blocks."""
    sent = [row for row in rows if row.get("sent_us") is not None]
    done = [row for row in sent if row["status"] == "ok"]
    if not done:
        return None, None
    sessions = _sessions(arm, {row["session"] for row in sent})
    by_template = arm.scenario.load.api == "chat" and not all(_fits(row, sessions[row["session"]]) for row in done)
    measured = {row["request_id"] for row in done if row["phase"] == "steady"}
    telling = {row["request_id"] for row in done if row["request_id"] in measured and row["cached_tokens"] is not None}
    counted = telling or measured
    cache = InfiniteCache(arm.scenario.engine.block_size)
    total: int | None = 0
    different = set()
    for row in sorted(sent, key=lambda row: _place(row, row["request_id"] in counted)):
        session, turn = sessions[row["session"]], row["turn"]
        plain, salt = session.prompt(turn), session.cache_salt
        prompt = templated(session, turn) if by_template else plain
        if row["status"] == "ok" and row["prompt_tokens"] not in (None, prompt_tokens(prompt)):
            total = None
        if row["request_id"] in measured:
            different.add((salt, len(plain), *plain[:2], *plain[-2:]))  # the ends tell prompts apart
        if row["request_id"] in counted and total is not None:
            total += cache.lookup(prompt, salt)
        cache.store_answer(prompt, session.turns[turn].output, salt)
    return total, len(different)


def _place(row: Row, is_counted: bool) -> tuple[int, bool, int, str]:
    """Where a request stands in the order of arrivals. Within one instant whoever is not counted comes first, then a
    prompt before those that go on from it, so that in no order of the engines' own more is hit."""
    at_us = row["sent_us"]
    if row["status"] == "ok" and row["admitted_us"] is not None:
        at_us = row["admitted_us"]
    return at_us, is_counted, row["prompt_tokens"] or 0, row["request_id"]


def _sessions(arm: Arm, wanted: set[str]) -> dict[str, Session]:
    drawn = arm.scenario.make_workload().sessions(Streams(arm.workload_seed))
    return {session.session_id: session for session in drawn if session.session_id in wanted}


def _fits(row: Row, session: Session) -> bool:
    """Whether the engine's prompt is the session's text alone, as in virtual time."""
    return row["prompt_tokens"] in (None, prompt_tokens(session.prompt(row["turn"])))
