import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import (
    Exchange,
    Streams,
    analyze,
    ceiling_cached_tokens,
    common_prefix_tokens,
    make_workload,
    requests_in_order,
    value_estimate,
)

TABLES = [
    {"kind": "multi-turn", "sessions": 6, "shared_system_prompts": 2, "system_prompt_tokens": 100, "turns": 3},
    {"kind": "rl-rollout", "steps": 2, "turns": 3, "samples_per_prompt": 4, "first_input_tokens": 300},
    {"kind": "shared-prefix", "num_groups": 3, "num_prompts_per_group": 5, "shared_fraction": 0.6},
    {"kind": "rag", "requests": 20, "corpus_chunks": 8, "chunks_per_request": 3},
    {"kind": "agentic-coding", "sessions": 2, "turns": 4, "subagent_turns": 3, "subagent_prefix": "context"},
    {"kind": "group-burst", "bursts": 2, "burst_size": 4},
    {"kind": "shared-prefix", "num_groups": 3, "num_prompts_per_group": 9, "tenants": 2},
]
tables = st.sampled_from(TABLES)


def exchange(sent):
    return Exchange(sent.prompt, sent.turn.output, sent.session.cache_salt)


def order(table, seed=0, slots=16):
    return list(requests_in_order(make_workload(table).sessions(Streams(seed)), slots))


@given(tables, st.integers(0, 20), st.sampled_from([16, 64]))
@settings(deadline=None, max_examples=25)
def test_the_ceiling_is_that_of_one_infinite_cache(table, seed, block_size):
    found = analyze(make_workload(table), Streams(seed), block_size=block_size)
    sent = order(table, seed)
    hits = ceiling_cached_tokens(map(exchange, sent), block_size)
    assert found.hit_rate == pytest.approx(hits / found.prompt_tokens)
    assert found.cache_hit_rates[-1] == pytest.approx(found.hit_rate)
    assert list(found.cache_hit_rates) == sorted(found.cache_hit_rates)
    assert found.requests == len(sent)


@given(tables, st.integers(0, 20), st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_shared_prefixes_are_those_with_any_of_the_recent_requests(table, seed, window):
    found = analyze(make_workload(table), Streams(seed), window_requests=window, min_prefix_tokens=64)
    sent = order(table, seed)
    texts = [(*s.prompt, (s.turn.output[0], s.turn.output[1] - 1)) for s in sent]
    shared = []
    for i, request in enumerate(sent):
        recent = [
            texts[k] for k in range(max(0, i - window), i) if sent[k].session.cache_salt == request.session.cache_salt
        ]
        longest = max((common_prefix_tokens(text, request.prompt) for text in recent), default=0)
        shared.append(longest // 16 * 16)
    long = [length for length in shared if length >= 64]
    assert found.sharing_requests == len(long)
    if long:
        assert found.shared_tokens_mean == pytest.approx(sum(long) / len(long))
    else:
        assert found.shared_tokens_mean is None


@pytest.mark.parametrize("replicas", [2, 3])
def test_dilution_is_the_mean_over_all_random_placements(replicas):
    table = {"kind": "shared-prefix", "num_groups": 2, "num_prompts_per_group": 3, "shared_fraction": 0.8}
    found = analyze(make_workload(table), Streams(3), replicas=[replicas])
    sent = order(table, 3)
    total = 0
    for places in itertools.product(range(replicas), repeat=len(sent)):
        for replica in range(replicas):
            mine = [exchange(s) for s, place in zip(sent, places, strict=True) if place == replica]
            total += ceiling_cached_tokens(mine, 16)
    expected = total / replicas ** len(sent) / found.prompt_tokens
    assert found.dilution[-1].hit_rate == pytest.approx(expected)


def test_a_prefix_seen_once_before_is_found_one_time_in_n():
    found = analyze(make_workload({"kind": "group-burst", "bursts": 5, "burst_size": 2}), Streams(0))
    for row in found.dilution:
        assert row.hit_rate == pytest.approx(row.rule_of_thumb) == pytest.approx(found.hit_rate / row.replicas)


def test_the_two_examples_of_the_value_formula():
    """The seed's section 7: 30 % prefill, 12 to 85 %, 88 % shared; and 6 %, 12 to 60 %, 40 %."""
    assert value_estimate(0.30, 0.85, 0.12, 0.88) == pytest.approx(0.19, abs=0.005)
    assert value_estimate(0.06, 0.60, 0.12, 0.40) == pytest.approx(0.012, abs=0.0005)


@given(*[st.floats(0, 1)] * 4)
def test_a_value_is_a_share_and_never_negative(prefill, achievable, baseline, shared):
    assert 0 <= value_estimate(prefill, achievable, baseline, shared) <= 1


def test_what_is_no_share_is_refused():
    with pytest.raises(ValueError, match="baseline = 12: give a share"):
        value_estimate(0.3, 0.85, 12, 0.88)


def verdict(table, replicas, prefill, blocks=None):
    return analyze(make_workload(table), Streams(0)).verdict(replicas, prefill, blocks)


def test_the_verdict_names_the_reason():
    conversations = {"kind": "multi-turn", "sessions": 30}
    assert verdict(conversations, 8, 0.3).worth_it
    assert "Worth it: about 1" in verdict(conversations, 8, 0.3).text
    assert "nothing to route" in verdict(conversations, 1, 0.3).text
    assert "Only 5% of the time is prefill" in verdict(conversations, 8, 0.05).text
    assert "Hardly any prompt begins like another" in verdict({"kind": "uniform-unique"}, 8, 0.3).text
    short = {"kind": "multi-turn", "first_input_tokens": 40, "input_tokens": 8, "output_tokens": 8}
    assert "shorter than 256 tokens" in verdict(short, 8, 0.3).text
    popular = {"kind": "shared-prefix", "num_groups": 1, "num_prompts_per_group": 200}
    assert "already finds most of it with 2 replicas" in verdict(popular, 2, 0.3).text


def test_small_caches_make_it_worth_less():
    table = {"kind": "multi-turn", "sessions": 64}
    assert verdict(table, 8, 0.3, 8).value < verdict(table, 8, 0.3, 200).value < verdict(table, 8, 0.3).value


def test_a_timestamp_in_front_leaves_no_hit():
    table = {"kind": "multi-turn", "shared_system_prompts": 1}
    assert analyze(make_workload(table), Streams(0)).hit_rate > 0.5
    stamped = analyze(make_workload(table | {"timestamp_prefix": True}), Streams(0))
    assert stamped.hit_rate == 0
    assert stamped.sharing_requests == 0


def test_few_distinct_prompts_are_seen():
    found = analyze(make_workload({"kind": "group-burst", "bursts": 2, "burst_size": 40}), Streams(0))
    assert (found.requests, found.distinct_prompts) == (80, 2)


def test_ranked_chunks_are_reused_more():
    table = {"kind": "rag", "corpus_chunks": 12, "chunks_per_request": 4, "popularity": 1.5}
    drawn, ranked = (
        analyze(make_workload(table | {"chunk_order": how}), Streams(0)).hit_rate for how in ("drawn", "ranked")
    )
    assert ranked > drawn + 0.1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size = 0: at least 1"),
        ({"window_requests": 0}, "window_requests = 0"),
        ({"min_prefix_tokens": 8}, "less than one block of 16: raise it"),
        ({"replicas": [0]}, "give numbers of at least 1"),
    ],
)
def test_impossible_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        analyze(make_workload({"kind": "uniform-unique"}), Streams(0), **options)


def test_a_verdict_for_replicas_that_were_not_asked_for_is_refused():
    with pytest.raises(ValueError, match="made for 1, 3; make it again"):
        analyze(make_workload({"kind": "waves"}), Streams(0), replicas=[3]).verdict(4, 0.3)


def test_an_analysis_may_stop_early():
    assert analyze(make_workload({"kind": "uniform-unique"}), Streams(0), requests_max=10).requests == 10


@given(tables, st.integers(0, 20), st.integers(1, 30))
@settings(deadline=None, max_examples=15)
def test_every_request_stands_in_one_bin_of_the_shared_lengths(table, seed, window):
    found = analyze(make_workload(table), Streams(seed), window_requests=window)
    bins = found.shared_lengths
    assert sum(b.requests for b in bins) == found.requests
    assert (bins[0].low, bins[0].high) == (0, 0)
    assert [b.low for b in bins[1:]] == [16 << k for k in range(len(bins) - 1)]
    assert all(b.high + 16 == 2 * b.low for b in bins[1:])
    assert sum(b.requests for b in bins if b.low >= 256) == found.sharing_requests


def test_a_verdict_says_what_its_value_is_made_of():
    found = verdict({"kind": "multi-turn", "sessions": 30}, 8, 0.3)
    assert found.value == value_estimate(
        found.prefill_fraction, found.achievable, found.baseline, found.shared_fraction
    )
