"""Every knob of Dynamo's KV router that this project has, with its default, and those that it refuses, with the reason.

Names are `KvRouterConfig`'s of ai-dynamo 1.4.2 without their `router_` prefix. A request may override some of them for
itself, and say where it may go, in the header `X-Dynamo-Select`: JSON with the fields of the selection service's
`/select` that are about this one request. The odd thing, and theirs: an override of the decay is read and has no
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from routers.config import Options, at_least, make_options
from routers.errors import OptionError
from routers.view import TurnView

SELECT_HEADER = "x-dynamo-select"
UNKNOWN_BATCHED_TOKENS = 10_000_000  # what the scheduler reckons with where no worker said its own (`queue.rs`)


class DynamoKvOptions(Options, frozen=True):
    """Names and defaults of Dynamo 1.4.2's `KvRouterConfig` (without its `router_` prefixes).

    - `overlap_score_credit`: blocks of prefill forgiven per block resident on the device; 0 builds no index at all.
    - `overlap_score_credit_decay`: fades the device credit of a replica whose active prefill is above the least
      loaded one's: 1 halves it at one request-equivalent of excess.
    - `prefill_load_scale`: weight of prefill blocks against decode blocks.
    - `host_cache_hit_weight`: credit of a block in the host's memory, beyond those on the device.
    - `disk_cache_hit_weight`: credit of a block on disk, beyond those.
    - `decode_active_request_weight`: blocks charged per active request.
    - `cost_policy`: `default` adds prefill and decode; `lmetric` multiplies what is left of prefill with decode + 1
      [a revision after 1.4.2, docs/components/router/router-concepts.md at 03037af].
    - `temperature`: 0 takes the cheapest; above it, chance falls with exp(-(cost - min) / (range * temperature)).
    - `track_prefill_tokens`: whether prefill that is owed counts as load.
    - `track_active_blocks`: whether the prompt blocks of running requests do.
    - `track_output_blocks`: whether the blocks of their answers do, as they grow.
    - `role`: `decode` is a router before the decode workers of a disaggregated fleet: with `track_prefill_tokens` off
      its credit is taken from decode blocks, where `aggregated` has nothing to take it from [1.4.2,
      `scheduling/selector.rs`, and the cost that its selection service prints].
    - `assume_kv_reuse`: false counts equal prompts on one replica as separate blocks.
    - `expected_output_tokens`: fades a request's own blocks as its output nears this length; a number, or
      `max_tokens` to read the client's limit; unset, nothing fades. Works with `track_output_blocks`.
    - `overlap_score_weight`: deprecated there, kept for its trap: a value beats an explicit `prefill_load_scale`, and
      0 also sets the credit to 0 (`scheduling/config.rs`).
    - `use_kv_events`: false is Dynamo's approximate mode: the router believes in what it routed, for `ttl_s`.
    - `ttl_s`: how long that is believed, from the last decision that held the block.
    - `max_tree_size`: blocks of that belief above which the oldest are forgotten; predicted blocks have no such cap
      there, either [1.4.2, `indexer/pruning.rs`].
    - `prune_target_ratio`: the share of `max_tree_size` that is left then [1.4.2, `indexer/pruning.rs`].
    - `predicted_ttl_s`: with events, believes in what it routed for this long besides (predict on route); unset, not.
    - `queue_threshold`: a request waits while every replica that it may have owes more prefill tokens than this factor
      of `max_num_batched_tokens`; unset, nothing waits [1.4.2, `scheduling/queue.rs`].
    - `queue_policy`: who goes first: `fcfs`, `lcfs`, or `wspt`, the least uncached prompt [1.4.2,
      `scheduling/policy.rs`].
    - `queue_refresh_s`: a request that waited longer is matched against the caches anew [1.4.2, `queue.rs`].
    - `max_num_batched_tokens`: the engines' step budget, which no engine tells a router; unset is taken for
      10,000,000, so that nobody is ever busy [1.4.2, `queue.rs`].
    - `active_decode_blocks_threshold`: share of `total_kv_blocks` above which a replica takes nothing more, by decode
      blocks owed or by the engine's own usage as last polled; all above it is an error. Unset, never [1.4.2,
      `discovery/worker_monitor.rs`].
    - `active_prefill_tokens_threshold`: prefill tokens owed above which a replica takes nothing more. Unset, never
      [1.4.2, `discovery/worker_monitor.rs`].
    - `active_prefill_tokens_threshold_frac`: the same as a factor of `max_num_batched_tokens` [1.4.2,
      `discovery/worker_monitor.rs`].
    - `total_kv_blocks`: the engines' KV blocks, which the registration of a worker tells there.
    - `session_affinity_ttl_s`: a session stays where it was dispatched first until it was idle for so long; unset, it
      does not [1.4.2, `X-Dynamo-Session-ID`; here any session id].
    - `count_copies`: true counts a block that the engine holds twice; false keeps a set as Dynamo's tree does [ours].
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    cost_policy: Literal["default", "lmetric"] = "default"
    temperature: float = 0.0
    track_prefill_tokens: bool = True
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    role: Literal["aggregated", "decode"] = "aggregated"
    assume_kv_reuse: bool = True
    expected_output_tokens: int | Literal["max_tokens"] | None = None
    overlap_score_weight: float | None = None
    use_kv_events: bool = True
    ttl_s: float = 120.0
    max_tree_size: int = 1 << 20
    prune_target_ratio: float = 0.8
    predicted_ttl_s: float | None = None
    queue_threshold: float | None = None
    queue_policy: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    queue_refresh_s: float = 10.0
    max_num_batched_tokens: int | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    total_kv_blocks: int | None = None
    session_affinity_ttl_s: float | None = None
    count_copies: bool = True

    refused: ClassVar[Mapping[str, str]] = {
        "shared_cache_multiplier": "it weighs blocks in a cache that all replicas share, and no engine here has one",
        "shared_cache_type": "no engine here has a cache that all replicas share",
        "use_remote_indexer": "the index is in the router's own process",
        "serve_indexer": "the index is in the router's own process",
        "replica_sync": "routers share their load here by --peer URL (in a scenario: `share_load` of `[router]`)",
        "event_threads": "events are applied in the router's own loop",
        "prefill_load_model": "`aic` asks AIConfigurator for each prefill's duration, which is no part of the package; "
        "`none` is what is built",
        "queue_policy_classes": "its YAML of cache buckets and deficit round robin was not read at the source",
        "routing_constraints": "replicas here carry no taints",
        "taints": "replicas here carry no taints; leave one out with /router/replicas/NAME/drain",
    }

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
            prune_target_ratio=self.prune_target_ratio,
            predicted_ttl_s=self.predicted_ttl_s or 0.0,
            queue_threshold=self.queue_threshold or 0.0,
            queue_refresh_s=self.queue_refresh_s,
            active_decode_blocks_threshold=self.active_decode_blocks_threshold or 0.0,
            active_prefill_tokens_threshold=self.active_prefill_tokens_threshold or 0,
            active_prefill_tokens_threshold_frac=self.active_prefill_tokens_threshold_frac or 0.0,
            session_affinity_ttl_s=self.session_affinity_ttl_s or 0.0,
        )
        at_least(
            1,
            max_tree_size=self.max_tree_size,
            max_num_batched_tokens=self.max_num_batched_tokens if self.max_num_batched_tokens is not None else 1,
            total_kv_blocks=self.total_kv_blocks if self.total_kv_blocks is not None else 1,
        )
        if self.prune_target_ratio > 1:
            raise OptionError(f"prune_target_ratio={self.prune_target_ratio} prunes nothing: give a share from 0 to 1")
        if isinstance(self.expected_output_tokens, int):
            at_least(1, expected_output_tokens=self.expected_output_tokens)
        if self.expected_output_tokens is not None and not self.track_output_blocks:
            raise OptionError(
                "expected_output_tokens fades output blocks, which are not tracked: set track_output_blocks = true"
            )
        if self.active_decode_blocks_threshold is not None and self.total_kv_blocks is None:
            raise OptionError(
                "active_decode_blocks_threshold is a share of the engines' KV blocks, which are not known: "
                "set total_kv_blocks"
            )
        if self.active_prefill_tokens_threshold_frac is not None and self.max_num_batched_tokens is None:
            raise OptionError(
                "active_prefill_tokens_threshold_frac is a factor of the engines' step budget, which is not known: "
                "set max_num_batched_tokens"
            )

    @property
    def credit(self) -> float:
        """The credit in force, the deprecated weight considered."""
        return 0.0 if self.overlap_score_weight == 0 else self.overlap_score_credit

    @property
    def scale(self) -> float:
        """The prefill scale in force, the deprecated weight considered."""
        return self.prefill_load_scale if self.overlap_score_weight is None else self.overlap_score_weight

    @property
    def batched_tokens(self) -> int:
        return self.max_num_batched_tokens if self.max_num_batched_tokens is not None else UNKNOWN_BATCHED_TOKENS


_OVERRIDES = {
    "overlap_score_credit": "overlap_score_credit",
    "prefill_load_scale": "prefill_load_scale",
    "overlap_score_weight": "overlap_score_weight",
    "router_temperature": "temperature",
    "assume_kv_reuse": "assume_kv_reuse",
    "track_prefill_tokens": "track_prefill_tokens",
    "overlap_score_credit_decay": None,  # read and without effect, as observed
}


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request asks of its own routing, by the names of `/select`; workers are named as replicas are here."""

    router_config_override: dict[str, Any] = {}
    pinned_worker: str | None = None
    allowed_worker_ids: tuple[str, ...] | None = None
    priority_jump: float = 0.0
    strict_priority: int = 0
    expected_output_tokens: int | None = None


NO_WISHES = Wishes()
_WISHES = msgspec.json.Decoder(Wishes)


def wishes_of(turn: TurnView) -> Wishes:
    """Raises OptionError for a header that cannot be followed."""
    return read_wishes(turn.headers.get(SELECT_HEADER) if turn.headers else None)


def read_wishes(raw: str | None) -> Wishes:
    if raw is None:
        return NO_WISHES
    try:
        return _WISHES.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        names = ", ".join(field.name for field in msgspec.structs.fields(Wishes))
        raise OptionError(f"header X-Dynamo-Select cannot be read ({error}): send JSON with any of {names}") from error


def overridden(options: DynamoKvOptions, wishes: Wishes) -> DynamoKvOptions:
    """The options of one request. Raises OptionError for a key that no request may set, or a value that cannot work."""
    if not wishes.router_config_override:
        return options
    values: dict[str, Any] = {}
    for name, value in wishes.router_config_override.items():
        if name not in _OVERRIDES:
            why = options.refused.get(name)
            raise OptionError(
                f"router_config_override: {name!r} {f'is not built: {why}' if why else 'cannot be overridden'}; "
                f"a request may set {', '.join(name for name, option in _OVERRIDES.items() if option)}"
            )
        option = _OVERRIDES[name]
        if option is not None and value is not None:
            values[option] = value
    return make_options(type(options), {**msgspec.structs.asdict(options), **values}, "dynamo-kv")
