"""How many KV blocks fit a GPU beside a model's weights: the arithmetic behind a preset's `kv_blocks_16`.

It is vLLM's budget (a share of the memory, minus weights, minus what else lives there) with one constant for the rest.
Nine capacities that vLLM reported agree within 1.4 %.
"""

from __future__ import annotations

from mock_engine.errors import ConfigError
from mock_engine.presets import BLOCK_TOKENS

GPU_MEMORY_UTILIZATION = 0.90
RESERVE_GIB = 1.6  # activations, graphs and buffers of one GPU; chosen on the capacities reported
_GIB = 1 << 30


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, value_bytes: int = 2) -> int:
    """Keys and values of all layers; 2 bytes a value is bf16, 1 is FP8."""
    return 2 * layers * kv_heads * head_dim * value_bytes


def kv_blocks(
    *,
    hbm_gib: float,
    weights_gib: float,
    bytes_per_token: int,
    tensor_parallel: int = 1,
    kv_heads: int | None = None,
    utilization: float = GPU_MEMORY_UTILIZATION,
) -> int:
    """Blocks of 16 tokens of one replica. `weights_gib` is the whole model's; each GPU of the `tensor_parallel` holds
    its part, and `kv_heads` (None: enough) bounds into how many parts the KV cache can be split."""
    parts = tensor_parallel if kv_heads is None else min(tensor_parallel, kv_heads)
    room_gib = hbm_gib * utilization - weights_gib / tensor_parallel - RESERVE_GIB
    blocks = int(room_gib * _GIB / (BLOCK_TOKENS * bytes_per_token / parts))
    if blocks < 2:
        raise ConfigError(
            f"{weights_gib:g} GiB of weights on {tensor_parallel} GPUs of {hbm_gib:g} GiB leave {room_gib:.1f} GiB "
            "each for KV blocks: that is no replica, give more GPUs, a larger one or smaller weights"
        )
    return blocks
