"""What /metrics says of what happened, and how old it may be."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mock_engine.metric_names import HISTOGRAMS, buckets
from mock_engine.metrics import EngineMetrics, Finished, Histogram, ReplicaMetrics


def values(metrics: ReplicaMetrics, staleness_ms: int = 0) -> dict[tuple[str, str], float]:
    """(sample name, value of the label that tells it apart): number."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition(staleness_ms).decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("engine", "model_name")}
            found[sample.name, ",".join(labels.values())] = sample.value
    return found


def finished(**changes: object) -> Finished:
    fields: dict[str, object] = {
        "reason": "length", "arrived_us": 0, "admitted_us": 1_000, "first_token_us": 31_000, "last_token_us": 71_000,
        "prompt_tokens": 40, "computed_tokens": 24, "output_tokens": 5, "max_tokens": 5, "preemptions": 1,
    }  # fmt: skip
    return Finished(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_series_exists_before_anything_happened() -> None:
    told = values(ReplicaMetrics("m", [EngineMetrics(0, 256)]))
    assert told["vllm:request_success_total", "length"] == 0
    assert told["vllm:num_requests_waiting_by_reason", "capacity"] == 0
    assert told["vllm:engine_sleep_state", "awake"] == 1
    for name in HISTOGRAMS:
        assert told[f"vllm:{name}_count", ""] == 0


def test_one_request_is_observed_once_in_every_histogram_of_requests() -> None:
    rank = EngineMetrics(0, 256)
    rank.admitted(40, 16)
    rank.first_token(31_000, 40, 16)
    rank.token_gaps(10_000, 4)
    rank.tokens(24 + 1, 1)
    rank.finished(finished())
    rank.group_finished(1, 5)
    told = values(ReplicaMetrics("m", [rank]))
    assert told["vllm:prefix_cache_queries_total", ""] == 40
    assert told["vllm:prefix_cache_hits_total", ""] == 16
    assert told["vllm:prompt_tokens_total", ""] == 40
    assert told["vllm:prompt_tokens_by_source_total", "local_compute"] == 24
    assert told["vllm:prompt_tokens_cached_by_source_total", "device"] == 16
    assert told["vllm:request_success_total", "length"] == 1
    assert told["vllm:inter_token_latency_seconds_count", ""] == 4
    assert told["vllm:iteration_tokens_total_sum", ""] == 25
    assert told["vllm:request_time_per_output_token_seconds_sum", ""] == 0.01
    assert told["vllm:request_queue_time_seconds_sum", ""] == 0.001
    assert told["vllm:request_prefill_time_seconds_sum", ""] == 0.03
    assert told["vllm:request_decode_time_seconds_sum", ""] == 0.04
    assert told["vllm:request_inference_time_seconds_sum", ""] == 0.07
    assert told["vllm:request_num_preemptions_sum", ""] == 1
    assert told["vllm:request_prefill_kv_computed_tokens_sum", ""] == 24


def test_an_answer_of_one_token_takes_no_time_per_output_token() -> None:
    rank = EngineMetrics(0, 256)
    rank.finished(finished(output_tokens=1, last_token_us=31_000))
    told = values(ReplicaMetrics("m", [rank]))
    assert told["vllm:request_time_per_output_token_seconds_sum", ""] == 0
    assert told["vllm:request_time_per_output_token_seconds_count", ""] == 1


def test_a_value_on_a_bound_falls_into_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(2.5)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 1.0), ("+Inf", 2.0)]


def test_token_buckets_go_in_1_2_5_decades_up_to_the_length_of_the_model() -> None:
    assert buckets("request_prompt_tokens", 256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert buckets("request_prompt_tokens", 1000)[-1] == 1000


def test_each_rank_has_its_own_series() -> None:
    ranks = [EngineMetrics(0, 256), EngineMetrics(1, 256)]
    ranks[1].step(3, 0, 0.5)
    text = ReplicaMetrics("m", ranks).exposition().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:num_requests_running{engine="1",model_name="m"} 3.0' in text


def test_the_sleep_level_shows_in_exactly_one_state() -> None:
    rank = EngineMetrics(0, 256)
    rank.sleep_level = 2
    told = values(ReplicaMetrics("m", [rank]))
    assert [told["vllm:engine_sleep_state", state] for state in ("awake", "weights_offloaded", "discard_all")] == [
        0,
        0,
        1,
    ]


def test_old_names_are_served_only_when_asked_for() -> None:
    rank = EngineMetrics(0, 256)
    rank.admitted(40, 10)
    rank.step(1, 0, 0.25)
    assert "gpu_cache_usage_perc" not in ReplicaMetrics("m", [rank]).exposition().decode()
    told = values(ReplicaMetrics("m", [rank], legacy=True))
    assert told["vllm:gpu_cache_usage_perc", ""] == 0.25
    assert told["vllm:gpu_prefix_cache_hit_rate", ""] == 0.25
    assert told["vllm:gpu_prefix_cache_hits_total", ""] == 10
    assert told["vllm:num_requests_swapped", ""] == 0


def test_values_may_be_as_old_as_asked_for_and_no_older() -> None:
    rank = EngineMetrics(0, 256)
    metrics = ReplicaMetrics("m", [rank])
    assert values(metrics, 60_000)["vllm:num_requests_running", ""] == 0
    rank.step(1, 0, 0.0)
    assert values(metrics, 60_000)["vllm:num_requests_running", ""] == 0
    assert values(metrics, 0)["vllm:num_requests_running", ""] == 1


def test_adapters_are_listed_with_the_time_they_were_seen() -> None:
    metrics = ReplicaMetrics("m", [EngineMetrics(0, 256)])
    metrics.lora = (2, {("ad1", ""): 5.0, ("", "ad1"): 4.0})
    text = metrics.exposition().decode()
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="ad1",waiting_lora_adapters=""} 5.0' in text
