"""`vllm-kv-aware`: vllm-router 0.1.17's policy on KV events: prefill left to do, times how many share the replica.

cost = (new tokens + prefill tokens owed) * (active + 1), lowest wins. The product is its character: an idle replica's
backlog hardly counts, a crowd's counts many times. At a tie the first of an order that is fixed per process wins; it
is drawn once from the given chance, because there it is the order of a hash map.
"""

from __future__ import annotations

import math
import random
from typing import Any

from routers.config import Options, at_least
from routers.errors import OptionError
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import DEVICE, DISK, HOST, PrefixIndex
from routers.policies.base import BasePolicy
from routers.policies.dynamo_cost import softmax_weights
from routers.policies.homes import SessionHomes
from routers.prompts import salt_of
from routers.view import (
    Decision,
    Dispatched,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    KvEvents,
    Observation,
    ReplicaAdded,
    ReplicaRemoved,
    Signal,
    Stored,
    TurnView,
)

VLLM_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "x-session-id")
_TIERS = {"CPU": HOST, "STORAGE": DISK}


def vllm_tier(medium: str | None) -> str:
    """Absent or GPU is the device, CPU the host, STORAGE the disk (unlike Dynamo, to which STORAGE is the device)."""
    return _TIERS.get(medium or "GPU", DEVICE)


def credit_tokens(device: int, lower: int, weight: float, prompt_tokens: int, block_size: int) -> float:
    """Tokens forgiven: leading device blocks, and blocks of the best lower tier beyond them by its weight. The last
    token of a prompt is always computed, so neither can reach it."""
    device = min(device, (prompt_tokens - 1) // block_size)
    return min(block_size * (device + lower * weight), prompt_tokens - 1)


def _beyond_lora(event: Stored) -> bool:
    """Whether a block is told apart by more than its adapter."""
    for extra in event.extra_keys or ():
        keys = extra if isinstance(extra, tuple) else (extra,) if extra is not None else ()
        if any(key != event.lora_name for key in keys):
            return True
    return False


class VllmKvAwareOptions(Options, frozen=True):
    """Defaults of vllm-router 0.1.17's `kv_aware`.

    - `temperature`: 0 takes the lowest cost; above it, chance falls with exp(-(cost - min) / temperature).
    - `host_weight`: credit of a block in the host's memory, beyond those on the device.
    - `disk_weight`: credit of a block on disk, beyond those on the device.
    - `affinity_ttl_s`: a session stays on its replica, whatever the load there, until it was idle for so long; its
      requests are not tokenised there, so they owe no prefill. Unset, sessions are not looked at; 1 to 31,536,000.
    - `affinity_capacity`: sessions remembered, the longest idle forgotten first.
    - `count_copies`: whether a block that an engine holds twice takes two removals to go [ours].
    """

    temperature: float = 0.0
    host_weight: float = 0.8
    disk_weight: float = 0.3
    affinity_ttl_s: float | None = None
    affinity_capacity: int = 10_000
    count_copies: bool = True

    def __post_init__(self) -> None:
        at_least(0, temperature=self.temperature, host_weight=self.host_weight, disk_weight=self.disk_weight)
        at_least(1, affinity_capacity=self.affinity_capacity)
        if self.affinity_ttl_s is not None and not 1 <= self.affinity_ttl_s <= 31_536_000:
            raise OptionError(f"affinity_ttl_s={self.affinity_ttl_s} cannot work: give 1 to 31536000, or leave it out")


class VllmKvAware(BasePolicy):
    about = "vllm-router's kv_aware: (uncached + owed prefill) * (active + 1), lowest wins, a tie to a fixed first"
    believes = (
        "The engines' KV events say what each replica holds; a request owes its uncached tokens until its first byte "
        "and counts as active until its last."
    )
    source = "vllm-project/router 0.1.17, src/policies/kv_aware.rs"
    fails = (
        "The product makes a backlog on an idle replica cheap and a crowd dear: a prompt that is cached by half goes "
        "past its cache as soon as two requests are there. Answers that do not stream hold their prefill to the end."
    )
    Options = VllmKvAwareOptions
    needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._index = PrefixIndex(count_copies=self.options.count_copies, tiers=vllm_tier)
        self._owed: dict[str, int] = {}
        self._prefills: dict[str, tuple[str, int]] = {}  # request -> replica, tokens booked
        self._order: dict[str, float] = {}
        self._new: dict[str, int] = {}
        ttl_s = self.options.affinity_ttl_s
        self._homes: SessionHomes | None = None
        if ttl_s is not None:
            self.needs = self.needs | {Signal.SESSION_ID}
            capacity = self.options.affinity_capacity
            self._homes = SessionHomes(ttl_s, VLLM_SESSION_HEADERS, capacity=capacity, rebinds=False)

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        home = self._homes.of(turn, fleet.now_us) if self._homes is not None else None
        if home is not None and home in fleet:
            self._new = {}
            return Decision(home, "the session is bound to it, its prompt unread", "bound")
        tokens = turn.prompt.tokens if turn.prompt is not None else 0
        salted = salt_of(turn.prompt) is not None  # no credit there, wherever the blocks are
        keys = (
            PrefixKeys(turn.prompt.block_hashes(self.block_size)) if turn.prompt is not None and not salted else NO_KEYS
        )
        device = self._index.match(keys)
        lower = self._index.lower_tiers(keys, device, chained=False)
        self._new, costs = {}, {}
        for replica in fleet:
            credit = self._credit(device.get(replica.name, 0), lower.get(replica.name, (0, 0)), tokens)
            self._new[replica.name] = math.ceil(tokens - credit) if tokens else 0
            owed = self._new[replica.name] + self._owed.get(replica.name, 0) + replica.elsewhere.prefill_tokens
            costs[replica.name] = float(owed * (replica.in_flight + 1))
        name, rule = self._pick(costs, fleet)
        held = min(device.get(name, 0), max(0, tokens - 1) // self.block_size)
        reason = (
            f"cost {costs[name]:.0f}: {self._new[name]} new and {self._owed.get(name, 0)} owed tokens "
            f"times {fleet[name].in_flight + 1}"
        )
        return Decision(name, reason, rule, costs, held * self.block_size if turn.prompt is not None else None)

    def observe(self, event: Observation) -> None:
        if isinstance(event, KvEvents):
            if any(isinstance(one, Stored) and _beyond_lora(one) for one in event.events):
                self._index.gap(event.replica)  # a batch with a salt or an image is rejected, its source wiped
            else:
                self._index.observe(event)
            return
        self._index.observe(event)
        if isinstance(event, Dispatched):
            if self._homes is not None:
                self._homes.dispatched(event)
            if event.counted:
                new = self._new.get(event.replica, 0)
                self._prefills[event.request_id] = (event.replica, new)
                self._owed[event.replica] = self._owed.get(event.replica, 0) + new
        elif isinstance(event, FirstToken | Finished | Failed):
            replica, tokens = self._prefills.pop(event.request_id, (event.replica, 0))
            if replica in self._owed:
                self._owed[replica] -= tokens
            if self._homes is not None and not isinstance(event, FirstToken):
                self._homes.ended(event.request_id, failed=False)  # retries do not rebind
        elif isinstance(event, ReplicaAdded):
            self._order.setdefault(event.replica, self.rng.random())
        elif isinstance(event, ReplicaRemoved):
            if self._homes is not None:
                self._homes.forget(event.replica)
            self._owed.pop(event.replica, None)
            self._prefills = {name: held for name, held in self._prefills.items() if held[0] != event.replica}

    def owed(self, replica: str) -> tuple[int, int]:
        return self._owed.get(replica, 0), 0

    def index_size(self) -> int:
        return self._index.held_blocks()

    def stats(self) -> dict[str, Any]:
        return {
            **self._index.state(),
            "owed_tokens": dict(self._owed),
        }

    def _credit(self, device: int, lower: tuple[int, int], tokens: int) -> float:
        """The better of host and disk counts, never both: the longer segment, at equal length the dearer."""
        if not tokens:
            return 0.0
        host, disk = lower
        segment, weight = max((host, self.options.host_weight), (disk, self.options.disk_weight))
        return credit_tokens(device, segment, weight, tokens, self.block_size)

    def _pick(self, costs: dict[str, float], fleet: FleetView) -> tuple[str, str]:
        temperature = self.options.temperature
        free = [name for name, value in costs.items() if value == 0]
        if len(free) == len(costs) or (free and not temperature):
            return min(free, key=lambda name: (fleet[name].in_flight, self._order.get(name, 0.0))), "free"
        if temperature:
            span = max(costs.values()) - min(costs.values())
            weights = softmax_weights(list(costs.values()), temperature / span if span else 1.0)
            return self.rng.choices(list(costs), weights)[0], "softmax"
        low = min(costs.values())
        tied = [name for name, value in costs.items() if value == low]
        return min(tied, key=lambda name: self._order.get(name, 0.0)), "cost" if len(tied) == 1 else "tie"
