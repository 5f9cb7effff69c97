"""Figures of a running test: near enough to what rows say, and the same however many processes add them up."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.live_figures import Figures, Window, engine_figures, quantile_ms
from harness.load_rows import Row


def row(ttft_us, tpot_us=20_000, tokens=5, status="ok", cached=None):
    return Row(
        request_id="r",
        session="s",
        turn=0,
        group=None,
        rollout_step=None,
        phase="steady",
        api="chat",
        sent_us=1_000,
        first_token_us=1_000 + ttft_us,
        last_token_us=1_000 + ttft_us + tpot_us * (tokens - 1),
        prompt_tokens=100,
        output_tokens=tokens,
        cached_tokens=cached,
        status=status,
    )


def added(rows):
    figures = Figures()
    for each in rows:
        figures.add(each)
    return figures


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.integers(1_000, 10**8), min_size=1), share=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_within_one_percent_of_the_nearest_rank(times, share):
    exact = sorted(times)[-(-round(share * 100) * len(times) // 100) - 1]
    assert quantile_ms(added(row(t) for t in times).ttft, share) == pytest.approx(exact / 1000, rel=0.011)


def test_figures_of_several_processes_add_up_to_those_of_one():
    rng = random.Random(1)
    rows = [row(rng.randrange(1_000, 10**6), rng.randrange(100, 10**5), cached=rng.randrange(100)) for _ in range(200)]
    whole, parts = added(rows), Figures()
    for part in (rows[:50], rows[50:51], rows[51:]):
        parts.merge(added(part).pack())
    assert parts.pack() == whole.pack()
    assert parts.hit_rate == sum(r.cached_tokens for r in rows) / (100 * len(rows))
    assert whole.mean_ms("ttft") == pytest.approx(sum(r.first_token_us - 1_000 for r in rows) / len(rows) / 1000)


def test_failures_count_and_their_latency_does_not():
    figures = added([row(5_000), row(9_000_000, status="incomplete")])
    assert (figures.counts["ok"], figures.counts["failed"]) == (1, 1)
    assert quantile_ms(figures.ttft, 0.99) == pytest.approx(5, rel=0.01)


def test_an_unknown_hit_rate_is_not_zero():
    assert added([row(5_000)]).hit_rate is None
    assert added([row(5_000, cached=0)]).hit_rate == 0


def test_a_window_forgets_what_is_older():
    figures, window = Figures(), Window(10.0)
    seen = []
    for second in range(30):
        figures.add(row(5_000))
        seen.append(window.note(float(second), figures).counts["ok"])
    assert seen[:3] == [1, 2, 3]
    assert set(seen[11:]) == {10}


def test_an_engines_figures_are_summed_over_its_ranks():
    text = (
        "# HELP x y\n"
        'vllm:time_to_first_token_seconds_sum{engine="0"} 1.5\n'
        'vllm:time_to_first_token_seconds_sum{engine="1"} 2.5e-01\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:num_requests_running_by_something{engine="0"} 9\n'
    )
    assert engine_figures(text) == {"ttft_s": 1.75, "kv_usage": 0.5}
