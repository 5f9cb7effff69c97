"""Numbers out of all proportion: refused at once with the largest that goes; what passes is drawn without a halt."""

import json
import random
from collections import Counter
from itertools import islice

import pytest

from workloads import WORKLOADS, Streams, TraceError, WorkloadConfigError, make_workload
from workloads.limits import PAUSE_MS_MAX, SESSIONS_MAX, TOKENS_MAX, TURNS_MAX
from workloads.rag import _Zipf

GENERATORS = sorted(set(WORKLOADS) - {"trace"})
COUNTS = {
    "agentic-coding": "sessions",
    "group-burst": "bursts",
    "multi-turn": "sessions",
    "rag": "requests",
    "rl-rollout": "steps",
    "shared-prefix": "num_groups",
    "uniform-unique": "requests",
    "waves": "wave_size",
}


def refused(table):
    with pytest.raises(WorkloadConfigError) as caught:
        make_workload(table)
    return str(caught.value)


@pytest.mark.parametrize("kind", GENERATORS)
def test_ten_million_sessions_are_refused_with_the_most_that_can_be(kind):
    said = refused({"kind": kind, COUNTS[kind]: 10**7})
    assert "= 10000000: at most 1,000,000 can be drawn" in said


def test_what_two_keys_multiply_to_is_refused_with_both():
    said = refused({"kind": "shared-prefix", "num_groups": 10_000, "num_prompts_per_group": 10_000})
    assert "num_groups x num_prompts_per_group = 100000000: at most 1,000,000 sessions" in said


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("turns", 10**7, f"{TURNS_MAX:,}"),
        ("turns", {"dist": "geometric", "mean": 1e7}, "in half of its samples or more"),
        ("turns", {"dist": "uniform", "low": 1, "high": 10**400}, "high = 10^400 or more"),
        ("output_tokens", 10**12, f"{TOKENS_MAX:,}"),
        ("output_tokens", {"dist": "lognormal", "mean": 1e300, "sigma": 1}, "in half of its samples or more"),
        ("output_tokens", {"dist": "normal", "mean": 100, "sd": 10, "max": float("inf")}, "not a finite number"),
        ("output_tokens", 10**400, "10^400 or more: at most 10,000,000"),
        ("think_time_ms", 1e15, "1,000,000,000 ms"),
        ("think_time_ms", float("nan"), "give a finite number"),
        ("think_time_ms", {"dist": "exponential", "mean": 1e15}, "in half of its samples or more"),
        ("think_time_ms", {"dist": "choice", "values": [1, 1e15]}, "at its highest"),
    ],
)
def test_a_number_beyond_all_use_names_its_key(key, value, most):
    said = refused({"kind": "multi-turn", key: value})
    assert key in said
    assert most in said


def test_the_tail_of_a_spread_ends_where_numbers_end():
    table = {
        "kind": "multi-turn",
        "sessions": 400,
        "turns": {"dist": "lognormal", "mean": 3, "sigma": 1},
        "output_tokens": {"dist": "lognormal", "mean": 1e7, "sigma": 2},
        "first_input_tokens": {"dist": "normal", "mean": 1, "sd": 1e308},
        "think_time_ms": {"dist": "normal", "mean": 1, "sd": 1e308},
    }
    turns = [turn for session in make_workload(table).sessions(Streams(0)) for turn in session.turns]
    assert max(turn.output[1] for turn in turns) == TOKENS_MAX
    assert {turn.input[0][1] for turn in turns if turn.index == 0} == {1, TOKENS_MAX}
    assert {turn.think_us for turn in turns if turn.index} == {0, round(PAUSE_MS_MAX * 1000)}


LARGEST = {
    "agentic-coding": {"sessions": 9_900, "subagents": 100, "turns": 10_000, "subagent_turns": 100},
    "group-burst": {"bursts": 10_000, "burst_size": 100},
    "multi-turn": {"sessions": SESSIONS_MAX, "turns": TURNS_MAX},
    "rag": {"requests": SESSIONS_MAX, "corpus_chunks": 100_000, "popularity": 5},
    "rl-rollout": {"steps": 100, "rollouts_per_step": 10_000, "stragglers": 10_000},
    "shared-prefix": {"num_groups": 1_000, "num_prompts_per_group": 1_000},
    "uniform-unique": {"requests": SESSIONS_MAX},
    "waves": {"waves": 1_000, "wave_size": 1_000, "every_ms": PAUSE_MS_MAX},
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_first_sessions_of_the_largest_workload_come_at_once(kind):
    """Nothing is drawn ahead but what belongs together; a hang would end the whole suite, so time is not measured."""
    workload = make_workload({"kind": kind, **LARGEST[kind]})
    assert 900_000 <= workload.session_count(Streams(0)) <= SESSIONS_MAX
    assert len(list(islice(workload.sessions(Streams(0)), 2))) == 2


def test_more_chunks_than_anybody_waits_for_are_refused_with_both_keys():
    said = refused({"kind": "rag", "requests": 20_000, "corpus_chunks": 1_000, "chunks_per_request": 1_000})
    assert "requests x chunks_per_request = 20000000: at most 6,000,000 chunks" in said
    make_workload({"kind": "rag", "requests": 6_000, "corpus_chunks": 1_000, "chunks_per_request": 1_000})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kind": "waves", "wave_size": 10**6}, "waves x wave_size = 4000000: at most 1,000,000 sessions"),
        (
            {"kind": "waves", "wave_size": {"dist": "uniform", "low": 1, "high": 10**6}},
            "waves x wave_size = 4e+06 at its highest: at most 1,000,000 sessions",
        ),
        (
            {"kind": "group-burst", "burst_size": {"dist": "geometric", "mean": 9e5}},
            "in half of its samples or more: at most 1,000,000 sessions",
        ),
        (
            {"kind": "agentic-coding", "sessions": 10**5, "subagents": {"dist": "uniform", "low": 0, "high": 90}},
            "sessions x (1 + subagents) = 9.1e+06 at its highest",
        ),
        (
            {"kind": "agentic-coding", "subagents": {"dist": "choice", "values": [1, 900]}},
            "subagents = 900 at its highest: at most 100",
        ),
        (
            {"kind": "rl-rollout", "stragglers": {"dist": "uniform", "low": 0, "high": 9}},
            "stragglers = 9 at its highest: a step has 8 rollouts",
        ),
        (
            {"kind": "rag", "corpus_chunks": 8, "chunks_per_request": {"dist": "uniform", "low": 1, "high": 9}},
            "chunks_per_request = 9 at its highest: the corpus has 8 chunks",
        ),
        (
            {
                "kind": "multi-turn",
                "shared_system_prompts": 2,
                "system_prompt_tokens": {"dist": "choice", "values": [0]},
            },
            "system_prompt_tokens = 0 at its highest: a shared system prompt has at least 1 token",
        ),
        (
            {"kind": "group-burst", "every_ms": {"dist": "uniform", "low": 1, "high": 15}},
            "within_ms = 20 is longer than every_ms = 15 at its highest",
        ),
    ],
)
def test_a_spread_count_is_refused_where_a_constant_would_be(table, says):
    assert says in refused(table)


def test_the_tail_of_a_spread_count_is_cut_to_what_can_be_drawn():
    heavy = {"dist": "lognormal", "mean": 90, "sigma": 3}
    waves = make_workload({"kind": "waves", "waves": 1_000, "wave_size": heavy})
    counted = waves.session_count(Streams(0))
    assert counted <= SESSIONS_MAX
    assert counted == sum(1 for _ in waves.sessions(Streams(0)))
    few = {"dist": "geometric", "mean": 5}
    rag = make_workload({"kind": "rag", "corpus_chunks": 6, "chunks_per_request": few, "system_prompt_tokens": 0})
    assert {len(s.turns[0].input) - 1 for s in rag.sessions(Streams(0))} == {1, 2, 3, 4, 5, 6}
    steps = make_workload({"kind": "rl-rollout", "steps": 50, "stragglers": few})
    late = Counter(s.rollout_step for s in steps.sessions(Streams(0)) if s.straggler)
    assert max(late.values()) == 8


def test_all_ranks_of_the_steepest_law_are_drawn_in_the_end():
    assert sorted(_Zipf(1_000, 5.0).draw(1_000, random.Random(0))) == list(range(1_000))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 5.0])
def test_leaving_used_up_ranks_out_changes_no_chance(exponent):
    """Second ranks against the law without the first one: long before and long after repeats begin."""
    ranks, count = _Zipf(4, exponent), 4_000
    weights = [(rank + 1) ** -exponent for rank in range(4)]
    rng = random.Random(1)
    pairs = Counter(tuple(ranks.draw(4, rng)[1:3]) for _ in range(count))
    for (second, third), seen in pairs.items():
        chance = 0.0
        for first in set(range(4)) - {second, third}:
            left = [w for rank, w in enumerate(weights) if rank != first]
            last = [w for rank, w in enumerate(weights) if rank not in (first, second)]
            chance += weights[first] / sum(weights) * weights[second] / sum(left) * weights[third] / sum(last)
        assert abs(seen - count * chance) < 5 * (count * chance) ** 0.5 + 3


@pytest.mark.parametrize(("exponent", "count"), [(0.0, 38), (1.0, 36), (2.0, 20), (5.0, 12)])
def test_a_law_of_the_free_ranks_draws_each_as_often_as_drawing_again_does(exponent, count):
    """Against the plain way, over enough ranks that laws are made anew while drawing."""
    ranks, rounds = _Zipf(40, exponent), 1_500
    weights = [(rank + 1) ** -exponent for rank in range(40)]
    seen, plain = Counter(), Counter()
    rng = random.Random(2)
    for _ in range(rounds):
        seen.update(ranks.draw(count, rng)[-3:])
        left = dict(enumerate(weights))
        picked = []
        for _ in range(count):
            (rank,) = rng.choices(list(left), list(left.values()))
            picked.append(rank)
            del left[rank]
        plain.update(picked[-3:])
    assert sum(seen.values()) == sum(plain.values()) == 3 * rounds
    for rank in range(40):
        assert abs(seen[rank] - plain[rank]) < 5 * (seen[rank] + plain[rank]) ** 0.5 + 3


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"timestamp": 1e300}, "a time of more than 3,000 years"),
        ({"timestamp": 0, "input_length": 10**12}, "no model takes more than 10,000,000"),
        ({"timestamp": 0, "session_id": "s", "delay": 1e300}, "a time of more than 3,000 years"),
        ({"chat_id": 10**30, "timestamp": 0.0}, "an id has more than 63 bits"),
        ({"chat_id": 1, "timestamp": 0.0, "output_length": -1}, "-1 tokens: lengths are 0"),
    ],
)
def test_a_row_out_of_all_proportion_is_named_with_its_line(tmp_path, row, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"input_length": 5, "output_length": 5, "hash_ids": [1], **row}) + "\n")
    with pytest.raises(TraceError, match=rf"bad\.jsonl:1: .*{said}"):
        list(make_workload({"kind": "trace", "path": str(path)}).sessions(Streams(0)))


@pytest.mark.parametrize("speedup", [0.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_a_speedup_that_makes_no_time_is_refused(tmp_path, speedup):
    path = tmp_path / "t.jsonl"
    path.write_text("{}\n")
    assert "give a factor above 0, 2 to send twice as fast (1e-06 to 1e+06)" in refused(
        {"kind": "trace", "path": str(path), "speedup": speedup}
    )
