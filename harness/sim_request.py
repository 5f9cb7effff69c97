"""One request of the simulation between its arrival and its end, and the columns of its row."""

from __future__ import annotations

from typing import Any

from harness.prompts import SpanPrompt
from harness.token_times import TokenTimes
from routers import TurnView
from workloads import Session


class SimRequest:
    """`row` holds what is known from the start; `answer` adds what came."""

    __slots__ = ("entered", "first_seen", "ingress", "prompt", "row", "session", "times", "tried", "turn", "view")

    def __init__(
        self, session: Session, turn: int, prompt: SpanPrompt, view: TurnView, ingress: int, row: dict[str, Any]
    ) -> None:
        self.session = session
        self.turn = turn
        self.prompt = prompt
        self.view = view
        self.ingress = ingress
        self.row = row
        self.tried: frozenset[str] = frozenset()
        """Replicas that took no connection, or broke it before they answered."""
        self.times = TokenTimes()
        self.entered = self.first_seen = False
        """Whether it reached an engine's queue, and whether its first token is filed."""

    @property
    def is_last(self) -> bool:
        return self.turn + 1 == len(self.session.turns)

    def tokens_until(self, now_us: int) -> int:
        """Output tokens that have left the engine by now."""
        return int((self.times.instants_us() <= now_us).sum())

    def answer(self, now_us: int, status: str, error_class: str | None, error: str | None) -> dict[str, Any]:
        """The whole row of a request that ends now; tokens that would have come later are not in it."""
        instants = self.times.instants_us()
        if status != "ok":
            instants = instants[instants <= now_us]
        count = len(instants)
        row = self.row if count else {**self.row, "cached_tokens": None}  # told with the answer's usage
        return {
            **row,
            "first_token_us": int(instants[0]) if count else None,
            "second_token_us": int(instants[1]) if count > 1 else None,
            "first_content_us": int(instants[0]) if count else None,
            "last_token_us": int(instants[-1]) if count else None,
            "end_us": now_us,
            "output_tokens": count,
            "first_chunk_tokens": 1 if count else None,
            "chunk_gaps_us": instants[1:] - instants[:-1],
            "status": status,
            "error_class": error_class,
            "error": error,
        }
