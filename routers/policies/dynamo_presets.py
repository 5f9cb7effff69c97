"""Dynamo's KV router in two other settings: `dynamo-approx` without events, `dynamo-load-aware` without caches.

They are `dynamo-kv` with other defaults and nothing else; every option can still be set.
"""

from __future__ import annotations

from typing import ClassVar

from routers.policies.dynamo import DynamoKv
from routers.policies.dynamo_options import DynamoKvOptions


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
    - `track_active_blocks`: true: prompt blocks of running requests count as load.
    - `track_prefill_tokens`: true: prefill that is owed counts as load.
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
