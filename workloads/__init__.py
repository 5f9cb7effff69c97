"""Workloads: sessions of symbolic text, drawn from one seed, the same in every arm and both modes.

Pure: no clock, no socket, no replica. Nothing is laid out as tokens before a wire asks for it.
"""

from workloads.config import WORKLOADS, make_workload, resolved, workload_keys
from workloads.errors import SpanError, WorkloadConfigError, WorkloadsError
from workloads.multi_turn import MultiTurn
from workloads.prefixes import InfiniteCache, ceiling_cached_tokens, turn_by_turn
from workloads.rollouts import RlRollout
from workloads.sessions import Session, Turn, Workload
from workloads.spans import (
    FIRST_TOKEN_ID,
    TOKEN_RANGE,
    Span,
    common_prefix_tokens,
    prompt_token_ids,
    prompt_tokens,
    span_text,
    token_ids,
)
from workloads.streams import Streams

__all__ = [
    "FIRST_TOKEN_ID",
    "TOKEN_RANGE",
    "WORKLOADS",
    "InfiniteCache",
    "MultiTurn",
    "RlRollout",
    "Session",
    "Span",
    "SpanError",
    "Streams",
    "Turn",
    "Workload",
    "WorkloadConfigError",
    "WorkloadsError",
    "ceiling_cached_tokens",
    "common_prefix_tokens",
    "make_workload",
    "prompt_token_ids",
    "prompt_tokens",
    "resolved",
    "span_text",
    "token_ids",
    "turn_by_turn",
    "workload_keys",
]
