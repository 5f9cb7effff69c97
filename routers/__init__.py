"""Routers: policies that place LLM requests on replicas, and what they know of the fleet.

This package's top level is its pure core: nothing imported here opens a socket, starts a loop or reads a clock. The
router as a process is `python -m routers`.
"""

from routers.config import Options, make_options, parse_option
from routers.errors import EventError, FleetError, LedgerError, NoReplica, OptionError, RoutersError, WireError
from routers.hashing import PrefixKeys, local_block_hashes, lora_seed, sequence_hashes
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy
from routers.registry import POLICIES, find_policy, make_policy, policy_help, policy_names, register_policy
from routers.ring import HashRing
from routers.router import Router
from routers.sequences import ActiveSequences
from routers.view import (
    Cleared,
    Decision,
    Dispatched,
    EngineMetrics,
    EventGap,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    HashedPrompt,
    KvEvent,
    KvEvents,
    Metrics,
    Observation,
    Policy,
    Progress,
    Prompt,
    Removed,
    ReplicaAdded,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaView,
    Signal,
    Stored,
    TextPrompt,
    TokenPrompt,
    TurnView,
)

__all__ = [
    "POLICIES",
    "ActiveSequences",
    "BasePolicy",
    "Cleared",
    "Decision",
    "Dispatched",
    "EngineMetrics",
    "EventError",
    "EventGap",
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
    "Options",
    "Policy",
    "PrefixIndex",
    "PrefixKeys",
    "Progress",
    "Prompt",
    "Removed",
    "ReplicaAdded",
    "ReplicaDraining",
    "ReplicaRemoved",
    "ReplicaView",
    "Router",
    "RoutersError",
    "Signal",
    "Stored",
    "TextPrompt",
    "TokenPrompt",
    "TurnView",
    "WireError",
    "find_policy",
    "local_block_hashes",
    "lora_seed",
    "make_options",
    "make_policy",
    "parse_option",
    "policy_help",
    "policy_names",
    "register_policy",
    "sequence_hashes",
]
