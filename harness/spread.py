"""Which of several ingresses a turn meets. Pure; the simulation and the load generator ask the same function."""

from __future__ import annotations

from typing import Literal

Spread = Literal["turn", "session"]


def ingress_name(place: int) -> str:
    """As the column `ingress` has it."""
    return f"i{place}"


def ingress_of(spread: Spread, session: int, turn: int, ingresses: int) -> int:
    """The place of the ingress that a turn meets; `session` is the session's number in the workload, so that sessions
    that start together are spread evenly, whoever sends them, and no session is in phase with an ingress."""
    return (session + turn if spread == "turn" else session) % ingresses
