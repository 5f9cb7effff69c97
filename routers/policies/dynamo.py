"""`dynamo-kv`: NVIDIA Dynamo's KV router (ai-dynamo 1.4.2): cached prefix as credit on prefill, plus decode load.

`cost` is its formula in blocks, lowest wins; the policy around it keeps the block index that engine events feed and
the active sequences that its own placements owe. Tests hold it to the worked figures of the observed package. What
the observed selector does not do is not done here either: no queue, no busy threshold, no pinned worker.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from routers.config import Options, at_least
from routers.errors import OptionError
from routers.hashing import NO_KEYS, PrefixKeys
from routers.index import PrefixIndex
from routers.policies.base import BasePolicy
from routers.sequences import ActiveSequences, RouteGuesses
from routers.view import (
    Decision,
    Dispatched,
    EventGap,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    KvEvents,
    Observation,
    Progress,
    ReplicaRemoved,
    Signal,
    TurnView,
)


class DynamoKvOptions(Options, frozen=True):
    """Names and defaults of Dynamo 1.4.2's `KvRouterConfig` (without its `router_` prefixes).

    - `overlap_score_credit`: blocks of prefill forgiven per block resident on the device; 0 builds no index at all.
    - `overlap_score_credit_decay`: fades the device credit of a replica whose active prefill is above the least
      loaded one's: 1 halves it at one request-equivalent of excess.
    - `prefill_load_scale`: weight of prefill blocks against decode blocks.
    - `host_cache_hit_weight`, `disk_cache_hit_weight`: credit of a block on a lower tier.
    - `decode_active_request_weight`: blocks charged per active request.
    - `temperature`: 0 takes the cheapest; above it, chance falls with exp(-(cost - min) / (range * temperature)).
    - `track_prefill_tokens`, `track_active_blocks`, `track_output_blocks`: which load is counted.
    - `assume_kv_reuse`: false counts equal prompts on one replica as separate blocks.
    - `expected_output_tokens`: fades a request's own blocks as its output nears this length; a number, or
      `max_tokens` to read the client's limit; unset, nothing fades. Works with `track_output_blocks`.
    - `overlap_score_weight`: deprecated there, kept for its trap: a value beats an explicit `prefill_load_scale`, and
      0 also sets the credit to 0 (`scheduling/config.rs`).
    - `use_kv_events`: false is Dynamo's approximate mode: the router believes in what it routed, for `ttl_s`.
    - `ttl_s`: how long that is believed, from the last decision that held the block.
    - `predicted_ttl_s`: with events, believes in what it routed for this long besides (predict on route); unset, not.
    - `count_copies`: true counts a block that the engine holds twice; false keeps a set as Dynamo's tree does [ours].
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    temperature: float = 0.0
    track_prefill_tokens: bool = True
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    assume_kv_reuse: bool = True
    expected_output_tokens: int | Literal["max_tokens"] | None = None
    overlap_score_weight: float | None = None
    use_kv_events: bool = True
    ttl_s: float = 120.0
    predicted_ttl_s: float | None = None
    count_copies: bool = True

    def __post_init__(self) -> None:
        at_least(
            0,
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            prefill_load_scale=self.prefill_load_scale,
            host_cache_hit_weight=self.host_cache_hit_weight,
            disk_cache_hit_weight=self.disk_cache_hit_weight,
            decode_active_request_weight=self.decode_active_request_weight,
            temperature=self.temperature,
            overlap_score_weight=self.overlap_score_weight or 0.0,
            ttl_s=self.ttl_s,
            predicted_ttl_s=self.predicted_ttl_s or 0.0,
        )
        if isinstance(self.expected_output_tokens, int):
            at_least(1, expected_output_tokens=self.expected_output_tokens)
        if self.expected_output_tokens is not None and not self.track_output_blocks:
            raise OptionError(
                "expected_output_tokens fades output blocks, which are not tracked: set track_output_blocks = true"
            )

    @property
    def credit(self) -> float:
        """The credit in force, the deprecated weight considered."""
        return 0.0 if self.overlap_score_weight == 0 else self.overlap_score_credit

    @property
    def scale(self) -> float:
        """The prefill scale in force, the deprecated weight considered."""
        return self.prefill_load_scale if self.overlap_score_weight is None else self.overlap_score_weight


class Load(msgspec.Struct, frozen=True):
    """What one candidate owes, and what it holds of the prompt, in the units of the formula."""

    active_prefill_tokens: int = 0
    active_blocks: int = 0
    active_requests: int = 0
    shared_blocks: int = 0  # blocks of this prompt that are active there already
    device: int = 0
    host: int = 0
    disk: int = 0
    shared_cache: int = 0  # blocks beyond the device match in a cache that all replicas share


def decay_factor(decay: float, active_prefill: int, least_prefill: int, prompt_tokens: int, block_size: int) -> float:
    """1 / (1 + decay * excess); excess is the active prefill above the least loaded candidate's, in blocks, over the
    prompt's blocks, a partial one counted whole."""
    if not decay:
        return 1.0
    prompt_blocks = max(1, -(-prompt_tokens // block_size))
    return 1.0 / (1.0 + decay * max(0, active_prefill - least_prefill) / block_size / prompt_blocks)


def cost(
    load: Load,
    *,
    prompt_tokens: int,
    block_size: int,
    least_prefill: int,
    options: DynamoKvOptions,
    shared_cache_multiplier: float = 0.0,
) -> float:
    """Cost in blocks of placing the prompt on a candidate (formula: spec of the observed 1.4.2 selector)."""
    credit = options.credit
    credited = (
        credit
        * decay_factor(
            options.overlap_score_credit_decay, load.active_prefill_tokens, least_prefill, prompt_tokens, block_size
        )
        * load.device
        + options.host_cache_hit_weight * load.host
        + options.disk_cache_hit_weight * load.disk
        + shared_cache_multiplier * load.shared_cache
    )
    decode = 0
    if options.track_active_blocks:
        decode = load.active_blocks + prompt_tokens // block_size - load.shared_blocks
    requests = options.decode_active_request_weight * load.active_requests
    if not options.track_prefill_tokens:
        # A decode-only router has no prefill to forgive, so the credit falls on the decode blocks.
        return (max(0.0, decode - credited) if credit > 0 else float(decode)) + requests
    raw = (load.active_prefill_tokens + prompt_tokens) / block_size
    return options.scale * max(0.0, raw - credited) + decode + requests


def softmax_weights(costs: Sequence[float], temperature: float) -> list[float]:
    """Relative chances at a temperature above 0; all alike when all costs are."""
    low, high = min(costs), max(costs)
    if high == low:
        return [1.0] * len(costs)
    return [math.exp(-(value - low) / ((high - low) * temperature)) for value in costs]


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
        "output blocks are tracked. Salts are not looked at there."
    )
    Options = DynamoKvOptions
    variants: ClassVar = {
        "decay": {"overlap_score_credit_decay": 1.0},
        "no-overlap": {"overlap_score_credit": 0.0},
    }

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self.options: DynamoKvOptions
        # Dynamo's KvRouter builds no indexer at credit 0, of events or of guesses.
        self._indexed = self.options.use_kv_events and self.options.credit > 0
        ttl_s = self.options.predicted_ttl_s if self.options.use_kv_events else self.options.ttl_s
        self._guesses = RouteGuesses(ttl_s) if ttl_s and self.options.credit > 0 else None
        self.needs = frozenset({Signal.TOKENS, Signal.KV_EVENTS} if self._indexed else {Signal.TOKENS})
        self.wants_progress = self.options.track_output_blocks
        self._index = PrefixIndex(count_copies=self.options.count_copies)
        self._sequences = ActiveSequences(block_size)
        # What `choose` worked out, for the Dispatched that follows in the same step.
        self._last: tuple[str, PrefixKeys, dict[str, Load]] = ("", NO_KEYS, {})

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        keys = NO_KEYS if turn.prompt is None else PrefixKeys(turn.prompt.block_hashes(self.block_size))
        prompt_tokens = turn.prompt.tokens if turn.prompt is not None else 0
        if self._guesses is not None:
            self._guesses.expire(fleet.now_us)
        loads = self._loads(keys, fleet)
        self._last = (turn.request_id, keys, loads)
        least = min(load.active_prefill_tokens for load in loads.values())
        costs = {
            name: cost(
                load,
                prompt_tokens=prompt_tokens,
                block_size=self.block_size,
                least_prefill=least,
                options=self.options,
            )
            for name, load in loads.items()
        }
        name, tied = self._pick(costs)
        load = loads[name]
        held = load.device + load.host + load.disk
        word = "cost" if self.options.temperature else "lowest cost"
        reason = f"{word} {costs[name]:.1f}: {held} of {len(keys)} blocks cached, {load.active_blocks} active"
        rule = "cost"
        if turn.prompt is None:
            reason, rule = f"{word} {costs[name]:.1f} by load alone, prompt not tokenised", "no-tokens"
        if self.options.temperature:
            reason, rule = f"drawn at temperature {self.options.temperature:g}; {reason}", "softmax"
        elif tied > 1:
            reason, rule = f"{reason}, one of {tied} tied", "tie"
        return Decision(name, reason, rule, costs, held * self.block_size if turn.prompt is not None else None)

    def observe(self, event: Observation) -> None:
        if isinstance(event, KvEvents):
            if self._indexed:
                self._index.apply(event.replica, event.events)
        elif isinstance(event, Dispatched):
            self._book(event)
        elif isinstance(event, FirstToken):
            self._sequences.prefill_done(event.request_id)
        elif isinstance(event, Progress):
            if self.options.track_output_blocks:
                self._sequences.output(event.request_id, event.output_tokens)
        elif isinstance(event, Finished | Failed):
            self._sequences.free(event.request_id)
        elif isinstance(event, EventGap):
            self._index.gap(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self._index.forget(event.replica)
            if self._guesses is not None:
                self._guesses.forget(event.replica)
            self._sequences.forget(event.replica)

    def owed(self, replica: str) -> tuple[int, int]:
        return self._sequences.prefill_tokens(replica), self._sequences.active_blocks(replica)

    def stats(self) -> dict[str, Any]:
        return {
            "index": msgspec.structs.asdict(self._index.stats),
            "index_blocks": len(self._index),
            "active_sequences": len(self._sequences),
            "expired_sequences": self._sequences.expired,
        }

    def _device(self, keys: PrefixKeys) -> dict[str, int]:
        """Device blocks per replica: what engines announced, or what was routed, whichever is more."""
        device = self._index.match(keys)
        if self._guesses is not None:
            for name, blocks in self._guesses.match(keys).items():
                device[name] = max(blocks, device.get(name, 0))
        return device

    def _loads(self, keys: PrefixKeys, fleet: FleetView) -> dict[str, Load]:
        device = self._device(keys)
        lower = self._index.lower_tiers(keys, device)
        options, sequences = self.options, self._sequences
        shared = sequences.shared_blocks(keys) if options.assume_kv_reuse and options.track_active_blocks else {}
        loads = {}
        for replica in fleet:
            name = replica.name
            host, disk = lower.get(name, (0, 0))
            loads[name] = Load(
                active_prefill_tokens=sequences.prefill_tokens(name) + replica.elsewhere.prefill_tokens,
                active_blocks=sequences.active_blocks(name) + replica.elsewhere.active_blocks,
                active_requests=sequences.requests(name) + replica.elsewhere.requests,
                shared_blocks=shared.get(name, 0),
                device=device.get(name, 0),
                host=host,
                disk=disk,
            )
        return loads

    def _pick(self, costs: dict[str, float]) -> tuple[str, int]:
        """Chosen name, and how many shared the lowest cost."""
        if self.options.temperature:
            names = list(costs)
            weights = softmax_weights(list(costs.values()), self.options.temperature)
            return self.rng.choices(names, weights)[0], 1
        low = min(costs.values())
        tied = [name for name, value in costs.items() if value == low]
        return (tied[0] if len(tied) == 1 else tied[self.rng.randrange(len(tied))]), len(tied)

    def _book(self, event: Dispatched) -> None:
        request_id, keys, loads = self._last
        if request_id != event.request_id or event.replica not in loads:
            # Placed by somebody else (a pinned request): work it out for that replica alone.
            prompt = event.turn.prompt
            keys = NO_KEYS if prompt is None else PrefixKeys(prompt.block_hashes(self.block_size))
            device = self._device(keys)
            host, disk = self._index.lower_tiers(keys, device).get(event.replica, (0, 0))
            load = Load(device=device.get(event.replica, 0), host=host, disk=disk)
        else:
            load = loads[event.replica]
        options = self.options
        prompt_tokens = event.turn.prompt.tokens if event.turn.prompt is not None else 0
        # Booked with full device blocks whatever credit and decay say (observed at 0, 0.5, 1.5 and 2).
        cached = load.device + options.host_cache_hit_weight * load.host + options.disk_cache_hit_weight * load.disk
        expected = options.expected_output_tokens
        self._sequences.book(
            event.request_id,
            event.replica,
            keys if options.track_active_blocks else NO_KEYS,
            prompt_tokens=prompt_tokens,
            prefill_tokens=prompt_tokens - math.floor(self.block_size * cached + 0.5)
            if options.track_prefill_tokens
            else 0,
            share=options.assume_kv_reuse,
            expected_output=event.turn.max_tokens if expected == "max_tokens" else expected,
            now_us=event.at_us,
        )
        if self._guesses is not None:
            self._guesses.routed(event.replica, keys, event.at_us)
        self._last = ("", NO_KEYS, {})


class DynamoApproxOptions(DynamoKvOptions, frozen=True):
    """As `dynamo-kv` with Dynamo 1.4.2's approximate mode.

    - `use_kv_events`: false: the router believes for `ttl_s` that what it routed is cached.
    """

    use_kv_events: bool = False


class DynamoApprox(DynamoKv):
    about = "dynamo-kv without events: believes for 120 s that a replica holds what was routed to it"
    believes = "A replica holds what this router sent it in the last 120 s. Load as in dynamo-kv."
    source = "ai-dynamo/dynamo 1.4.2, lib/kv-router/src/indexer/pruning.rs, observed in the package"
    fails = (
        "Evictions and answers are not heard of: under pressure it believes in blocks that are gone, and a session's "
        "own answer counts as new on its next turn. Each ingress believes in its own requests only."
    )
    Options = DynamoApproxOptions
    variants: ClassVar = {}


class DynamoLoadAwareOptions(DynamoKvOptions, frozen=True):
    """Dynamo 1.4.2's `--load-aware` preset.

    Of its ten overrides these are the ones that exist here; the others switch off remote and shared indexers, which are
    not built. Scale and tier weights stay as they are.

    - `overlap_score_credit`: 0: nothing is forgiven, and no index is built.
    - `use_kv_events`: false: none are asked for.
    - `track_active_blocks`, `track_prefill_tokens`: true: both loads count.
    - `assume_kv_reuse`: false: equal prompts on one replica count as separate blocks.
    - `predicted_ttl_s`: unset: nothing is guessed.
    """

    overlap_score_credit: float = 0.0
    use_kv_events: bool = False
    track_active_blocks: bool = True
    assume_kv_reuse: bool = False
    track_prefill_tokens: bool = True
    predicted_ttl_s: float | None = None


class DynamoLoadAware(DynamoKv):
    about = "dynamo-kv with its --load-aware preset: prefill and decode load alone, no cache and no sharing believed"
    believes = "Nothing of caches: every prompt is prefilled whole, and its blocks are its own until it ends."
    source = "ai-dynamo/dynamo 1.4.2, dynamo/common/configuration/groups/kv_router_args.py"
    fails = (
        "Reuse is thrown away: later turns meet their history by chance (stickiness 32.3 % against 65.6 % and a "
        "makespan 1.20 times as long in the reference example)."
    )
    Options = DynamoLoadAwareOptions
    variants: ClassVar = {}
