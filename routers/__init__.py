"""Routers: policies that place LLM requests on replicas, and what they know of the fleet.

This package's top level is its pure core: nothing imported here opens a socket, starts a loop or reads a clock. The
router as a process is `python -m routers`.
"""

from routers.belief import Belief
from routers.config import Options, make_options, parse_option
from routers.down import HEALTH_INTERVAL_MS, RETRIES_MAX
from routers.errors import (
    DecisionError,
    EventError,
    FleetError,
    LedgerError,
    NoReplica,
    OptionError,
    RoutersError,
    WireError,
)
from routers.explain import Explanation, OptionHelp, policy_explain
from routers.faults import RouterFaults, faulty_prompt, parse_faults
from routers.hashing import (
    PrefixKeys,
    bloom_positions,
    local_block_hashes,
    lora_seed,
    prefix_token_hashes,
    sequence_hashes,
    with_extra_keys,
)
from routers.index import PrefixIndex
from routers.peers import PeerLoads
from routers.policies.base import BasePolicy
from routers.promises import told
from routers.prompts import HashedPrompt, Prompt, TextPrompt, TokenPrompt
from routers.ramp import Ramp
from routers.registry import (
    POLICIES,
    find_policy,
    make_policy,
    policy_help,
    policy_names,
    refuse_oracle,
    register_policy,
)
from routers.ring import HashRing
from routers.router import Router
from routers.sequences import ActiveSequences
from routers.view import (
    POLL_INTERVALS_MS,
    Bloom,
    Cleared,
    Decision,
    Dispatched,
    EngineMetrics,
    EventGap,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    KvEvent,
    KvEvents,
    Metrics,
    Observation,
    Oracle,
    PeerLoad,
    Policy,
    Progress,
    Removed,
    ReplicaAdded,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaView,
    ReportedPrefixes,
    SessionEnded,
    Signal,
    Stored,
    TurnView,
    Withdrawn,
)

__all__ = [
    "HEALTH_INTERVAL_MS",
    "POLICIES",
    "POLL_INTERVALS_MS",
    "RETRIES_MAX",
    "ActiveSequences",
    "BasePolicy",
    "Belief",
    "Bloom",
    "Cleared",
    "Decision",
    "DecisionError",
    "Dispatched",
    "EngineMetrics",
    "EventError",
    "EventGap",
    "Explanation",
    "Failed",
    "Finished",
    "FirstToken",
    "FleetError",
    "FleetView",
    "HashRing",
    "HashedPrompt",
    "KvEvent",
    "KvEvents",
    "LedgerError",
    "Metrics",
    "NoReplica",
    "Observation",
    "OptionError",
    "OptionHelp",
    "Options",
    "Oracle",
    "PeerLoad",
    "PeerLoads",
    "Policy",
    "PrefixIndex",
    "PrefixKeys",
    "Progress",
    "Prompt",
    "Ramp",
    "Removed",
    "ReplicaAdded",
    "ReplicaDraining",
    "ReplicaRemoved",
    "ReplicaView",
    "ReportedPrefixes",
    "Router",
    "RouterFaults",
    "RoutersError",
    "SessionEnded",
    "Signal",
    "Stored",
    "TextPrompt",
    "TokenPrompt",
    "TurnView",
    "WireError",
    "Withdrawn",
    "bloom_positions",
    "faulty_prompt",
    "find_policy",
    "local_block_hashes",
    "lora_seed",
    "make_options",
    "make_policy",
    "parse_faults",
    "parse_option",
    "policy_explain",
    "policy_help",
    "policy_names",
    "prefix_token_hashes",
    "refuse_oracle",
    "register_policy",
    "sequence_hashes",
    "told",
    "with_extra_keys",
]
