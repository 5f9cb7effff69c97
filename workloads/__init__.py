"""Workloads: sessions of symbolic text, drawn from one seed, the same in every arm and both modes.

Pure: no clock, no socket, no replica; only the kind `trace` opens files. Nothing is laid out as tokens before a wire
asks for it.
"""

from workloads.agentic import AgenticCoding
from workloads.analysis import Analysis, Dilution, SharedLengths, analyze
from workloads.bursts import GroupBurst, Waves
from workloads.config import WORKLOADS, make_workload, resolved, workload_keys
from workloads.errors import SpanError, TraceError, WorkloadConfigError, WorkloadsError
from workloads.limits import SESSIONS_MAX
from workloads.multi_turn import MultiTurn
from workloads.order import Sent, requests_in_order
from workloads.prefixes import Exchange, InfiniteCache, ceiling_cached_tokens, turn_by_turn
from workloads.rag import Rag
from workloads.rollouts import RlRollout
from workloads.sessions import Session, Turn, Workload
from workloads.shared_prefix import SharedPrefix, UniformUnique
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
from workloads.stack_distance import StackDistances
from workloads.streams import Streams
from workloads.table import WorkloadTable
from workloads.traces.convert import convert_workload
from workloads.traces.recognise import TRACE_FORMATS
from workloads.traces.workload import Trace
from workloads.value import Verdict, value_estimate

__all__ = [
    "FIRST_TOKEN_ID",
    "SESSIONS_MAX",
    "TOKEN_RANGE",
    "TRACE_FORMATS",
    "WORKLOADS",
    "AgenticCoding",
    "Analysis",
    "Dilution",
    "Exchange",
    "GroupBurst",
    "InfiniteCache",
    "MultiTurn",
    "Rag",
    "RlRollout",
    "Sent",
    "Session",
    "SharedLengths",
    "SharedPrefix",
    "Span",
    "SpanError",
    "StackDistances",
    "Streams",
    "Trace",
    "TraceError",
    "Turn",
    "UniformUnique",
    "Verdict",
    "Waves",
    "Workload",
    "WorkloadConfigError",
    "WorkloadTable",
    "WorkloadsError",
    "analyze",
    "ceiling_cached_tokens",
    "common_prefix_tokens",
    "convert_workload",
    "make_workload",
    "prompt_token_ids",
    "prompt_tokens",
    "requests_in_order",
    "resolved",
    "span_text",
    "token_ids",
    "turn_by_turn",
    "value_estimate",
    "workload_keys",
]
