"""Counts what a scenario will ask for, before it runs: sessions, requests, tokens and the longest context."""

from __future__ import annotations

from dataclasses import dataclass

from harness.planned import planned
from harness.scenario import Scenario
from workloads import Streams, prompt_tokens


@dataclass(frozen=True, slots=True)
class Census:
    """Sums over one repeat of one arm."""

    sessions: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_context: int
    """Tokens of the longest session at its end."""


def census(scenario: Scenario, seed: int) -> Census:
    """Walks the workload once; spans are never expanded."""
    sessions = requests = prompts = outputs = longest = 0
    for _, session, _ in planned(scenario.make_workload(), scenario.load, Streams(seed)):
        sessions += 1
        context = 0
        for turn in session.turns:
            context = (0 if turn.restart else context) + prompt_tokens(turn.input)
            prompts += context + (turn.front[1] if turn.front else 0)
            context += turn.output[1]
            outputs += turn.output[1]
        requests += len(session.turns)
        longest = max(longest, session.total_tokens)
    return Census(sessions, requests, prompts, outputs, longest)
