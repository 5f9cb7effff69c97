"""The names, help texts, label values and bucket bounds of vLLM 0.33's metrics: one table each, in listing order."""

from __future__ import annotations

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")

GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
        "Sum of all reasons equals vllm:num_requests_waiting."
    ),
    "engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
    ),
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}

_FLOPS = "(for Model Flops Utilization calculations)."
COUNTERS = {
    "estimated_flops_per_gpu": f"Estimated number of floating point operations per GPU {_FLOPS}",
    "estimated_read_bytes_per_gpu": f"Estimated number of bytes read from memory per GPU {_FLOPS}",
    "estimated_write_bytes_per_gpu": f"Estimated number of bytes written to memory per GPU {_FLOPS}",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache sharing, "
        "in terms of number of queried tokens."
    ),
    "external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, "
        "in terms of number of cached tokens."
    ),
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
}
LABELLED_COUNTERS = {
    "prompt_tokens_by_source": ("Number of prompt tokens by source.", _SOURCES),
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), "
        "disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        _TIERS,
    ),
    "request_success": ("Count of successfully processed requests.", FINISHED_REASONS),
}
HISTOGRAMS = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
}
LEGACY_HELP = {
    "gpu_cache_usage_perc": "GPU KV-cache usage. 1 means 100 percent usage.",
    "gpu_prefix_cache_queries": "GPU prefix cache queries, in terms of number of queried tokens.",
    "gpu_prefix_cache_hits": "GPU prefix cache hits, in terms of number of cached tokens.",
    "gpu_prefix_cache_hit_rate": "GPU prefix cache block hit rate.",
    "cpu_cache_usage_perc": "CPU KV-cache usage. 1 means 100 percent usage.",
    "num_requests_swapped": "Number of requests swapped to CPU.",
    "time_per_output_token_seconds": "Histogram of time per output token in seconds.",
}

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_GAP = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_BOUNDS: dict[str, tuple[float, ...]] = {
    "iteration_tokens_total": (1, 8, *(16 << power for power in range(11))),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _TOKEN_GAP,
    "request_time_per_output_token_seconds": _TOKEN_GAP,
    "http_highr": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
        30.0, 60.0,
    ),
    "http_lowr": (0.1, 0.5, 1.0),
}  # fmt: skip


def buckets(name: str, max_model_len: int) -> tuple[float, ...]:
    """Upper bounds of a histogram; token counts go in 1-2-5 decades up to the model's length."""
    if name in _BOUNDS:
        return _BOUNDS[name]
    if name.endswith("_seconds"):
        return _REQUEST
    bounds: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > max_model_len:
                return tuple(bounds)
            bounds.append(step * decade)
        decade *= 10
