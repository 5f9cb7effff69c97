"""What one cache without a limit would have served: the ceiling that no router can pass.

Prompts enter the cache when they are sent and answers when they end, in the order in which this arm did so; blocks
are counted as the engines count them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.arm import Arm
from harness.chat_form import templated
from workloads import InfiniteCache, Session, Streams, prompt_tokens

SENT, ENDED = 1, 0
"""An answer that ends at an instant is there for a prompt sent at the same instant."""


def ceiling_of(arm: Arm, rows: Iterable[dict[str, Any]]) -> tuple[int | None, int | None]:
    """Of the measured successes: prompt tokens that an infinite cache would have served, and how many different prompts
    there were; None without any. Warm-up fills the cache and is not counted. The hits are None too where the engines'
    prompts are not as long as ours with our template: they have another tokenizer or template, so other blocks."""
    done = [row for row in rows if row["status"] == "ok"]
    if not done:
        return None, None
    wanted = {row["session"] for row in done}
    sessions: dict[str, Session] = {}
    for session in arm.scenario.make_workload().sessions(Streams(arm.workload_seed)):
        if session.session_id in wanted:
            sessions[session.session_id] = session
    events = [(row["sent_us"], SENT, row["request_id"], row) for row in done]
    events += [(row["end_us"], ENDED, row["request_id"], row) for row in done]
    events.sort(key=lambda event: event[:3])
    cache = InfiniteCache(arm.scenario.engine.block_size)
    total: int | None = 0
    prompts = set()
    by_template = arm.scenario.load.api == "chat" and not all(_fits(row, sessions[row["session"]]) for row in done)
    for _, kind, _, row in events:
        session, turn = sessions[row["session"]], row["turn"]
        plain, salt = session.prompt(turn), session.cache_salt
        prompt = templated(session, turn) if by_template else plain
        if kind == SENT:
            if row["prompt_tokens"] not in (None, prompt_tokens(prompt)):
                total = None
            if row["phase"] == "steady":
                total = None if total is None else total + cache.lookup(prompt, salt)
                prompts.add((salt, len(plain), *plain[:2], *plain[-2:]))  # the ends tell prompts apart
            cache.store(prompt, salt)
        else:
            cache.store_answer(prompt, session.turns[turn].output, salt)
    return total, len(prompts)


def _fits(row: dict[str, Any], session: Session) -> bool:
    """Whether the engine's prompt is the session's text alone, as in virtual time."""
    return row["prompt_tokens"] in (None, prompt_tokens(session.prompt(row["turn"])))
