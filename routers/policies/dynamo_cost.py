"""Dynamo's cost of a placement, in blocks, lowest wins: the arithmetic of `dynamo-kv`, without its state.

Each figure is the observed selector's (ai-dynamo 1.4.2); tests hold it to worked examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from routers.policies.dynamo_options import DynamoKvOptions


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
        # No prefill, so none to forgive. Before decode workers alone the credit falls on the decode blocks instead.
        forgiven = credited if options.role == "decode" and credit > 0 else 0.0
        return max(0.0, decode - forgiven) + requests
    raw = (load.active_prefill_tokens + prompt_tokens) / block_size
    prefill = options.scale * max(0.0, raw - credited)
    return prefill * (decode + 1) if options.cost_policy == "lmetric" else prefill + decode + requests


def softmax_weights(costs: Sequence[float], temperature: float) -> list[float]:
    """Relative chances at a temperature above 0; all alike when all costs are."""
    low, high = min(costs), max(costs)
    if high == low:
        return [1.0] * len(costs)
    return [math.exp(-(value - low) / ((high - low) * temperature)) for value in costs]
