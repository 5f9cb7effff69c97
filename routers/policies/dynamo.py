"""`dynamo-kv`: NVIDIA Dynamo's KV router (ai-dynamo 1.4.2): cached prefix as credit on prefill, plus decode load.

The policy around the cost (`dynamo_cost`): it keeps the block index that engine events feed and the active sequences
that its own placements owe. A request passes four gates, in this order: it waits while all that it may have are busy,
it is pinned or not, replicas above a threshold are left out, the cost decides. What Dynamo has and this has not is
refused by name (`dynamo_options`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from routers.errors import NoReplica
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy
from routers.policies.dynamo_cost import Load, cost, softmax_weights
from routers.policies.dynamo_options import NO_WISHES, DynamoKvOptions, Wishes, overridden, wishes_of
from routers.policies.homes import SessionHomes
from routers.sequences import ActiveSequences, RouteGuesses
from routers.view import (
    Decision,
    Dispatched,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    Observation,
    Progress,
    ReplicaRemoved,
    ReplicaView,
    Signal,
    TurnView,
    Withdrawn,
)


class _Match(msgspec.Struct):
    """What of one prompt each replica is believed to hold: device blocks, and (host, disk) beyond them."""

    keys: PrefixKeys
    device: dict[str, int]
    lower: dict[str, tuple[int, int]]
    at_us: int = 0


class _Choice(msgspec.Struct):
    """What `choose` worked out, for the Dispatched that follows in the same step."""

    request_id: str = ""
    keys: PrefixKeys = NO_KEYS
    loads: dict[str, Load] = {}
    options: DynamoKvOptions = DynamoKvOptions()
    wishes: Wishes = NO_WISHES


_NOTHING = _Choice()


class DynamoKv(BasePolicy):
    about = "NVIDIA Dynamo's cost: prefill left after the cached prefix, plus decode blocks; lowest wins, ties random"
    believes = (
        "The engines' KV events say what each replica holds. A request owes its uncached tokens until its first token, "
        "and its prompt's blocks, shared ones once, until it ends."
    )
    source = "ai-dynamo/dynamo 1.4.2, lib/kv-router (scheduling/selector.rs, sequences/), observed in the package"
    fails = (
        "Without decay a cache-rich replica wins until its backlog outweighs the match, so bursts of one prefix herd; "
        "lost removals leave it believing in blocks that are gone. Long answers count by their prompts alone unless "
        "output blocks are tracked. Salts are not looked at, so tenants look alike. There the subscriber drops event "
        "numbers that fall back, and a restarted engine stays unheard until it has said as much as before; here its "
        "belief is void."
    )
    Options = DynamoKvOptions
    heeds_salts = False
    variants: ClassVar = {
        "decay": {"overlap_score_credit_decay": 1.0},
        "no-overlap": {"overlap_score_credit": 0.0},
    }

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        own: DynamoKvOptions = self.options
        # Dynamo's KvRouter builds no indexer at credit 0, of events or of guesses.
        self._indexed = own.use_kv_events and own.credit > 0
        ttl_s = own.predicted_ttl_s if own.use_kv_events else own.ttl_s
        self._guesses: RouteGuesses | None = None
        if ttl_s and own.credit > 0:
            cap = None if own.use_kv_events else own.max_tree_size
            self._guesses = RouteGuesses(ttl_s, blocks_max=cap, prune_to=own.prune_target_ratio)
        needs = {Signal.TOKENS}
        needs |= {Signal.KV_EVENTS} if self._indexed else set()
        needs |= {Signal.SESSION_ID} if own.session_affinity_ttl_s is not None else set()
        needs |= {Signal.ENGINE_METRICS} if own.active_decode_blocks_threshold is not None else set()
        self.needs = frozenset(needs)
        self.wants_progress = own.track_output_blocks
        self.may_hold = own.queue_threshold is not None
        self._index = PrefixIndex(count_copies=own.count_copies)
        self._sequences = ActiveSequences(block_size)
        self._homes: SessionHomes | None = None
        if own.session_affinity_ttl_s is not None:
            self._homes = SessionHomes(own.session_affinity_ttl_s, ("x-dynamo-session-id",))
        self._waiting: dict[str, _Match] = {}
        self._last = _NOTHING

    # -- the queue -----------------------------------------------------------------------------------------------

    def must_wait(self, turn: TurnView, fleet: FleetView) -> bool:
        """A rank is busy above the threshold, not at it; a request waits while all that it may have are busy."""
        limit = (self.options.queue_threshold or 0.0) * self.options.batched_tokens
        return all(self._prefill(replica) > limit for replica in self._allowed(turn, fleet, wishes_of(turn)))

    def place_in_queue(self, turn: TurnView, fleet: FleetView) -> tuple[float, ...]:
        """Lowest first: the strict priority, then what the queue's policy says. What is matched now counts until the
        request has waited for `queue_refresh_s`."""
        wishes = wishes_of(turn)
        match = self._waiting[turn.request_id] = self._match(turn, fleet)
        jump, arrival_s = max(0.0, wishes.priority_jump), fleet.now_us / 1e6
        if self.options.queue_policy == "fcfs":
            key = jump - arrival_s
        elif self.options.queue_policy == "lcfs":
            key = jump + arrival_s
        else:
            tokens = turn.prompt.tokens if turn.prompt is not None else 0
            most = max((self._cached(match, replica.name) for replica in fleet), default=0.0)
            key = (1 + jump) / max(1.0, tokens - self.block_size * most)
        return (-float(wishes.strict_priority), -key)

    # -- the decision --------------------------------------------------------------------------------------------

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        wishes = wishes_of(turn)
        options = overridden(self.options, wishes)
        match = self._waiting.get(turn.request_id)
        if match is None or fleet.now_us - match.at_us > round(1e6 * options.queue_refresh_s):
            match = self._match(turn, fleet)
        keys, prompt_tokens = match.keys, turn.prompt.tokens if turn.prompt is not None else 0
        home = self._home(turn, fleet)
        able = [home] if home is not None else self._able(self._allowed(turn, fleet, wishes), wishes)
        loads = self._loads(match, able, options)
        self._last = _Choice(turn.request_id, keys, loads, options, wishes)
        least = min(load.active_prefill_tokens for load in loads.values())
        costs = {
            name: cost(
                load, prompt_tokens=prompt_tokens, block_size=self.block_size, least_prefill=least, options=options
            )
            for name, load in loads.items()
        }
        name, tied = self._pick(costs, options.temperature)
        load = loads[name]
        held = load.device + load.host + load.disk
        word = "cost" if options.temperature else "lowest cost"
        reason = f"{word} {costs[name]:.1f}: {held} of {len(keys)} blocks cached, {load.active_blocks} active"
        rule = "cost"
        if turn.prompt is None:
            reason, rule = f"{word} {costs[name]:.1f} by load alone, prompt not tokenised", "no-tokens"
        if home is not None or wishes.pinned_worker is not None:
            reason, rule = f"{'the session is here already' if home is not None else 'pinned'}; {reason}", "pinned"
        elif options.temperature:
            reason, rule = f"drawn at temperature {options.temperature:g}; {reason}", "softmax"
        elif tied > 1:
            reason, rule = f"{reason}, one of {tied} tied", "tie"
        return Decision(name, reason, rule, costs, held * self.block_size if turn.prompt is not None else None)

    def observe(self, event: Observation) -> None:
        if self._indexed:
            self._index.observe(event)
        if isinstance(event, Dispatched):
            self._book(event)
        elif isinstance(event, FirstToken):
            self._sequences.prefill_done(event.request_id)
        elif isinstance(event, Progress):
            if self.options.track_output_blocks:
                self._sequences.output(event.request_id, event.output_tokens)
        elif isinstance(event, Finished | Failed):
            self._sequences.free(event.request_id)
            if self._homes is not None:
                self._homes.ended(event.request_id, failed=isinstance(event, Failed))
        elif isinstance(event, Withdrawn):
            self._waiting.pop(event.request_id, None)
        elif isinstance(event, ReplicaRemoved):
            if self._guesses is not None:
                self._guesses.forget(event.replica)
            self._sequences.forget(event.replica)
            if self._homes is not None:
                self._homes.forget(event.replica)

    def owed(self, replica: str) -> tuple[int, int]:
        return self._sequences.prefill_tokens(replica), self._sequences.active_blocks(replica)

    def index_size(self) -> int | None:
        """Blocks that engines announced and blocks that are believed since they were routed, both."""
        if not self._indexed and self._guesses is None:
            return None
        return self._index.held_blocks() + (self._guesses.blocks() if self._guesses is not None else 0)

    def stats(self) -> dict[str, Any]:
        return {
            **self._index.state(),
            "active_sequences": len(self._sequences),
            "expired_sequences": self._sequences.expired,
        }

    # -- the gates -----------------------------------------------------------------------------------------------

    def _prefill(self, replica: ReplicaView) -> int:
        return self._sequences.prefill_tokens(replica.name) + replica.elsewhere.prefill_tokens

    def _home(self, turn: TurnView, fleet: FleetView) -> ReplicaView | None:
        name = self._homes.of(turn, fleet.now_us) if self._homes is not None else None
        return fleet[name] if name is not None and name in fleet else None

    def _allowed(self, turn: TurnView, fleet: FleetView, wishes: Wishes) -> list[ReplicaView]:
        """Raises NoReplica when none that the request may have is in the fleet."""
        home = self._home(turn, fleet)
        if home is not None:
            return [home]
        names = (wishes.pinned_worker,) if wishes.pinned_worker is not None else wishes.allowed_worker_ids
        found = [replica for replica in fleet if names is None or replica.name in names]
        if not found:
            raise NoReplica(
                f"none of the workers that the request asks for ({', '.join(names or ())}) can take a turn: "
                f"{', '.join(replica.name for replica in fleet)} can"
            )
        return found

    def _able(self, replicas: list[ReplicaView], wishes: Wishes) -> list[ReplicaView]:
        """Those below the busy thresholds. Raises NoReplica when all are above."""
        able = [replica for replica in replicas if not self._overloaded(replica)]
        if not able:
            names = ", ".join(replica.name for replica in replicas)
            raise NoReplica(f"all of {names} are above a busy threshold: send it later, or raise the threshold")
        return able

    def _overloaded(self, replica: ReplicaView) -> bool:
        options = self.options
        if options.active_decode_blocks_threshold is not None and options.total_kv_blocks is not None:
            limit = options.active_decode_blocks_threshold * options.total_kv_blocks
            used = replica.metrics.kv_usage * options.total_kv_blocks if replica.metrics is not None else 0.0
            if max(used, self._sequences.active_blocks(replica.name) + replica.elsewhere.active_blocks) > limit:
                return True
        prefill = self._prefill(replica)
        literal, share = options.active_prefill_tokens_threshold, options.active_prefill_tokens_threshold_frac
        return (literal is not None and prefill > literal) or (
            share is not None and prefill > share * options.batched_tokens
        )

    # -- what is believed and owed -------------------------------------------------------------------------------

    def _match(self, turn: TurnView, fleet: FleetView) -> _Match:
        keys = NO_KEYS if turn.prompt is None else PrefixKeys(turn.prompt.block_hashes(self.block_size))
        if self._guesses is not None:
            self._guesses.expire(fleet.now_us)
        device = self._device(keys)
        return _Match(keys, device, self._index.lower_tiers(keys, device), fleet.now_us)

    def _device(self, keys: PrefixKeys) -> dict[str, int]:
        """Device blocks per replica: what engines announced, or what was routed, whichever is more."""
        device = self._index.match(keys)
        if self._guesses is not None:
            for name, blocks in self._guesses.match(keys).items():
                device[name] = max(blocks, device.get(name, 0))
        return device

    def _cached(self, match: _Match, name: str) -> float:
        """Blocks that count as cached where prefill is booked: device blocks whole whatever credit and decay say
        (observed at 0, 0.5, 1.5 and 2), lower tiers by their weights."""
        host, disk = match.lower.get(name, (0, 0))
        options = self.options
        return match.device.get(name, 0) + options.host_cache_hit_weight * host + options.disk_cache_hit_weight * disk

    def _loads(self, match: _Match, replicas: Iterable[ReplicaView], options: DynamoKvOptions) -> dict[str, Load]:
        sequences = self._sequences
        shared = sequences.shared_blocks(match.keys) if options.assume_kv_reuse and options.track_active_blocks else {}
        loads = {}
        for replica in replicas:
            name = replica.name
            host, disk = match.lower.get(name, (0, 0))
            loads[name] = Load(
                active_prefill_tokens=self._prefill(replica),
                active_blocks=sequences.active_blocks(name) + replica.elsewhere.active_blocks,
                active_requests=sequences.requests(name) + replica.elsewhere.requests,
                shared_blocks=shared.get(name, 0),
                device=match.device.get(name, 0),
                host=host,
                disk=disk,
            )
        return loads

    def _pick(self, costs: dict[str, float], temperature: float) -> tuple[str, int]:
        """Chosen name, and how many shared the lowest cost."""
        if temperature:
            names = list(costs)
            weights = softmax_weights(list(costs.values()), temperature)
            return self.rng.choices(names, weights)[0], 1
        low = min(costs.values())
        tied = [name for name, value in costs.items() if value == low]
        return (tied[0] if len(tied) == 1 else tied[self.rng.randrange(len(tied))]), len(tied)

    def _book(self, event: Dispatched) -> None:
        last, self._last = self._last, _NOTHING
        self._waiting.pop(event.request_id, None)
        if last.request_id != event.request_id or event.replica not in last.loads:
            # Placed by somebody else: work it out for that replica alone.
            match = self._match(event.turn, FleetView([], now_us=event.at_us))
            host, disk = match.lower.get(event.replica, (0, 0))
            load = Load(device=match.device.get(event.replica, 0), host=host, disk=disk)
            last = _Choice(event.request_id, match.keys, {event.replica: load}, self.options)
        if event.counted:
            self._owe(event, last)
        if self._guesses is not None:
            self._guesses.routed(event.replica, last.keys, event.at_us)
        if self._homes is not None:
            self._homes.dispatched(event)

    def _owe(self, event: Dispatched, last: _Choice) -> None:
        load, options = last.loads[event.replica], last.options
        prompt_tokens = event.turn.prompt.tokens if event.turn.prompt is not None else 0
        held = _Match(NO_KEYS, {event.replica: load.device}, {event.replica: (load.host, load.disk)})
        uncached = prompt_tokens - math.floor(self.block_size * self._cached(held, event.replica) + 0.5)
        expected = (
            event.turn.max_tokens
            if options.expected_output_tokens == "max_tokens"
            else (options.expected_output_tokens)
        )
        if last.wishes.expected_output_tokens is not None:
            expected = last.wishes.expected_output_tokens
        self._sequences.book(
            event.request_id,
            event.replica,
            last.keys if options.track_active_blocks else NO_KEYS,
            prompt_tokens=prompt_tokens,
            prefill_tokens=uncached if options.track_prefill_tokens else 0,
            share=options.assume_kv_reuse,
            expected_output=expected,
            now_us=event.at_us,
        )
