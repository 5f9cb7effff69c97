"""Which numbers of a generator may be spread, and what spreading one leaves alone."""

import types
from collections import Counter
from itertools import pairwise
from typing import get_args

import msgspec
import pytest

from workloads import WORKLOADS, Streams, make_workload, prompt_tokens, resolved
from workloads.distributions import Distribution

GENERATORS = sorted(set(WORKLOADS) - {"trace"})
CONSTANTS = {
    "agentic-coding": {"sessions", "parallel_share", "max_context_tokens"},
    "group-burst": {"bursts", "within_ms"},
    "multi-turn": {"sessions", "shared_system_prompts"},
    "rag": {"requests", "corpus_chunks", "popularity"},
    "rl-rollout": {"steps", "rollouts_per_step", "samples_per_prompt", "weight_sync_every_steps"},
    "shared-prefix": {"num_groups", "shared_fraction"},
    "uniform-unique": {"requests"},
    "waves": {"waves"},
}
"""Sizes of the whole, chances, and a limit of the model; see `workloads.table`."""
AT = {
    "multi-turn": {"shared_system_prompts": 3, "think_time_ms": 7.0},
    "rl-rollout": {"tool_tokens": 9, "tool_time_ms": 7.0},
    "waves": {"every_ms": 7.0},
}
"""Values at which every number of a kind has an effect, where the defaults are not."""


def spread_keys(kind):
    workload = make_workload({"kind": kind})
    return [*workload.lengths(), *workload.pauses]


SPREAD = [(kind, key) for kind in GENERATORS for key in spread_keys(kind)]


def drawn(table, seed=0):
    return list(make_workload(table).sessions(Streams(seed)))


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_number_may_be_spread_but_sizes_of_the_whole_and_chances(kind):
    numbers, spread = set(), set()
    for field in msgspec.structs.fields(WORKLOADS[kind]):
        types_of = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        if {int, float} & set(types_of):
            numbers.add(field.encode_name)
        if set(get_args(Distribution)) <= set(types_of):
            spread.add(field.encode_name)
    assert spread == set(spread_keys(kind))
    assert numbers - spread == CONSTANTS[kind] | {"tenants"}


@pytest.mark.parametrize(("kind", "key"), SPREAD)
def test_a_spread_of_one_value_gives_the_sessions_of_the_constant(kind, key):
    """A spread number has a stream of its own, so that spreading it shifts no other draw."""
    table = resolved(make_workload({"kind": kind, **AT.get(kind, {})}))
    value = int(table[key]) if not isinstance(table[key], dict) else 5
    one = {"dist": "uniform", "low": value, "high": value}
    assert drawn(table | {key: one}, 3) == drawn(table | {key: value}, 3)


@pytest.mark.parametrize(("kind", "key"), SPREAD)
def test_a_spread_number_changes_what_comes_and_reads_back_as_it_stands(kind, key):
    table = {"kind": kind, **AT.get(kind, {}), key: {"dist": "choice", "values": [3, 6], "weights": [1, 2]}}
    if key == "every_ms" and kind == "group-burst":
        table |= {"within_ms": 1.0}
    workload = make_workload(table)
    assert make_workload(resolved(workload)) == workload
    assert resolved(workload)[key] == {"dist": "choice", "values": [3.0, 6.0], "weights": [1.0, 2.0]}
    differ = 0
    for seed in range(6):
        sessions = list(workload.sessions(Streams(seed)))
        assert len(sessions) == workload.session_count(Streams(seed))
        differ += sessions != drawn(table | {key: 3}, seed)
    assert differ


def test_every_system_prompt_has_a_length_of_its_own_and_none_when_it_is_0():
    table = {"kind": "multi-turn", "sessions": 200, "turns": 1, "shared_system_prompts": 20}
    sessions = drawn(table | {"system_prompt_tokens": {"dist": "choice", "values": [0, 100, 300]}})
    lengths = {}
    for session in sessions:
        assert (session.group is None) == (len(session.turns[0].input) == 1)
        if session.group is not None:
            lengths.setdefault(session.group, set()).add(session.turns[0].input[0])
    assert all(len(found) == 1 for found in lengths.values())
    assert {tokens for found in lengths.values() for _, tokens in found} == {100, 300}
    assert len(lengths) < 20


@pytest.mark.parametrize("kind", ["rag", "agentic-coding"])
def test_a_prompt_that_all_share_is_drawn_once_a_run(kind):
    table = {"kind": kind, "system_prompt_tokens": {"dist": "uniform", "low": 100, "high": 9_000}}
    first = [{s.turns[0].input[0] for s in drawn(table, seed) if s.group != "sub"} for seed in range(5)]
    assert all(len(found) == 1 for found in first)
    assert len({tokens for found in first for _, tokens in found}) == 5


def test_retrieval_down_to_a_score_takes_another_number_of_chunks_each_time():
    table = {"kind": "rag", "requests": 300, "chunks_per_request": {"dist": "uniform", "low": 2, "high": 5}}
    counts = Counter(len(s.turns[0].input) - 2 for s in drawn(table))
    assert set(counts) == {2, 3, 4, 5}
    assert min(counts.values()) > 50


def test_every_main_agent_calls_a_number_of_subagents_of_its_own():
    table = {"kind": "agentic-coding", "sessions": 30, "subagents": {"dist": "uniform", "low": 0, "high": 3}}
    calls = Counter(s.session_id.split("-sub")[0] for s in drawn(table))
    assert set(calls.values()) == {1, 2, 3, 4}


def test_every_step_has_a_number_of_stragglers_of_its_own():
    table = {"kind": "rl-rollout", "steps": 40, "stragglers": {"dist": "uniform", "low": 0, "high": 3}}
    late = Counter()
    for session in drawn(table):
        late[session.rollout_step] += session.straggler
    assert set(late.values()) == {0, 1, 2, 3}


def test_groups_of_unlike_size_come_mixed_and_whole():
    table = {"kind": "shared-prefix", "num_prompts_per_group": {"dist": "geometric", "mean": 20}}
    groups = [s.group for s in drawn(table)]
    sizes = Counter(groups)
    assert len(sizes) == 10
    assert len(set(sizes.values())) > 5
    assert groups != sorted(groups)


def test_bursts_at_drawn_instants_never_overlap():
    table = {"kind": "group-burst", "bursts": 40, "every_ms": {"dist": "exponential", "mean": 60}, "burst_size": 3}
    starts = [s.start_us for s in drawn(table)]
    opens = starts[::3]
    assert starts == sorted(starts)
    assert len({b - a for a, b in pairwise(opens)}) > 30
    for first, last, following in zip(opens, starts[2::3], opens[1:], strict=False):
        assert last - first <= 20_000
        assert last <= following


def test_waves_of_spread_lengths_still_start_together():
    lengths = {"dist": "uniform", "low": 500, "high": 1500}
    table = {"kind": "waves", "wave_size": 20, "every_ms": 900.0, "input_tokens": lengths, "output_tokens": lengths}
    sessions = drawn(table)
    assert Counter(s.start_us for s in sessions) == {0: 20, 900_000: 20, 1_800_000: 20, 2_700_000: 20}
    assert len({prompt_tokens(s.turns[0].input) for s in sessions}) > 20
    assert len({s.turns[0].output[1] for s in sessions}) > 20
