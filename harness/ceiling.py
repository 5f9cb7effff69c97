"""What one cache without a limit would have served: the ceiling that no router can pass.

Prompts enter the cache when they are sent and answers when they end, in the order in which this arm did so; blocks
are counted as the engines count them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.arm import Arm
from workloads import InfiniteCache, Session, Streams

SENT, ENDED = 1, 0
"""An answer that ends at an instant is there for a prompt sent at the same instant."""


def ceiling_cached_tokens(arm: Arm, rows: Iterable[dict[str, Any]]) -> int | None:
    """Prompt tokens an infinite cache would have served to the successful requests; None without any."""
    done = [row for row in rows if row["status"] == "ok"]
    if not done:
        return None
    wanted = {row["session"] for row in done}
    sessions: dict[str, Session] = {}
    for session in arm.scenario.make_workload().sessions(Streams(arm.workload_seed)):
        if session.session_id in wanted:
            sessions[session.session_id] = session
    events = [(row["sent_us"], SENT, row["request_id"], row) for row in done]
    events += [(row["end_us"], ENDED, row["request_id"], row) for row in done]
    events.sort(key=lambda event: event[:3])
    cache = InfiniteCache(arm.scenario.engine.block_size)
    total = 0
    for _, kind, _, row in events:
        session, turn = sessions[row["session"]], row["turn"]
        prompt = session.prompt(turn)
        if kind == SENT:
            total += cache.lookup(prompt)
            cache.store(prompt)
        else:
            cache.store_answer(prompt, session.turns[turn].output)
    return total
