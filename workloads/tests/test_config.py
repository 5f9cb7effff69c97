import pytest

from workloads import WORKLOADS, WorkloadConfigError, WorkloadsError, make_workload, resolved, workload_keys


@pytest.mark.parametrize("kind", sorted(set(WORKLOADS) - {"trace"}))
def test_a_kind_alone_is_a_workload_with_every_default(kind):
    workload = make_workload({"kind": kind})
    table = resolved(workload)
    assert set(table) == set(workload_keys(kind))
    assert make_workload(table) == workload
    assert workload.kind == kind
    assert workload.barrier is False


def test_resolved_keeps_distributions():
    table = {
        "kind": "multi-turn",
        "turns": {"dist": "geometric", "mean": 4, "max": 12},
        "think_time_ms": {"dist": "choice", "values": [1, 2], "weights": [3, 4]},
    }
    assert {k: resolved(make_workload(table))[k] for k in table} == table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "add kind = one of agentic-coding, group-burst, multi-turn, rag, rl-rollout"),
        ({"kind": "multiturn"}, "did you mean 'multi-turn'?"),
        ({"kind": 3}, "no workload of kind 3"),
        ({"kind": "multi-turn", "trns": 4}, "unknown key 'trns' in workload 'multi-turn': did you mean 'turns'?"),
        ({"kind": "multi-turn", "turns": "4"}, "turns = '4' is text where a whole number or a table with dist"),
        ({"kind": "multi-turn", "turns": 1.5}, "turns = 1.5 is a number where"),
        ({"kind": "multi-turn", "turns": 0}, "turns = 0 can never reach 1"),
        ({"kind": "multi-turn", "turns": {"mean": 4}}, "add dist = one of uniform"),
        ({"kind": "multi-turn", "turns": {"dist": "geo", "mean": 4}}, "turns has dist = 'geo': choose one of"),
        ({"kind": "multi-turn", "turns": {"dist": "geometric"}}, "turns has no 'mean': add it"),
        ({"kind": "multi-turn", "turns": {"dist": "geometric", "mean": 0.5}}, "a geometric number is at least 1"),
        ({"kind": "multi-turn", "turns": {"dist": "uniform", "low": 9, "high": 3}}, "low = 9 is above high = 3"),
        ({"kind": "multi-turn", "turns": {"dist": "uniform", "low": 1, "hig": 3, "high": 3}}, "did you mean 'high'?"),
        ({"kind": "multi-turn", "output_tokens": {"dist": "lognormal", "mean": -1, "sigma": 1}}, "mean = -1"),
        ({"kind": "multi-turn", "think_time_ms": -1}, "a pause is 0 ms or more"),
        ({"kind": "multi-turn", "think_time_ms": float("inf")}, "finite"),
        ({"kind": "multi-turn", "sessions": 0}, "sessions = 0: at least 1"),
        ({"kind": "multi-turn", "shared_system_prompts": 1, "system_prompt_tokens": 0}, "system_prompt_tokens = 0"),
        ({"kind": "rl-rollout", "stragglers": 9}, "give 0 to 8"),
        ({"kind": "rl-rollout", "samples_per_prompt": 3}, "does not divide rollouts_per_step = 8"),
        ({"kind": "rl-rollout", "steps": True}, "steps = True is true or false where a whole number is wanted"),
        ({"kind": "rl-rollout", "weight_sync_every_steps": -1}, "weight_sync_every_steps = -1: at least 0"),
        ({"kind": "rl-rollout", "groups": 2, "rollouts_per_step": 8}, "drop one of them"),
        ({"kind": "rl-rollout", "groups": 0}, "groups = 0: give a whole number, at least 1"),
        ({"kind": "rl-rollout", "groups": 2, "stragglers": 3}, "give 0 to 2"),
        ({"kind": "shared-prefix", "shared_fraction": 1.5}, "shared_fraction = 1.5: give a share from 0 to 1"),
        ({"kind": "shared-prefix", "num_groups": 0}, "num_groups = 0: at least 1"),
        ({"kind": "shared-prefix", "prefix_len": 8, "system_prompt_len": 9}, "another name for system_prompt_len"),
        ({"kind": "rag", "chunks_per_request": 9, "corpus_chunks": 8}, "the corpus has 8 chunks"),
        ({"kind": "rag", "popularity": -1.0}, "give an exponent from 0"),
        ({"kind": "rag", "chunk_order": "shuffled"}, "chunk_order = 'shuffled': choose one of "),
        ({"kind": "group-burst", "within_ms": 20_000.0}, "bursts would overlap"),
        ({"kind": "waves", "every_ms": -1.0}, "give a time in milliseconds"),
        ({"kind": "agentic-coding", "subagent_prefix": "all"}, "subagent_prefix = 'all': choose one of context"),
        ({"kind": "uniform-unique", "timestamp_prefix": 1}, "timestamp_prefix = 1 is a whole number where true"),
        ({"kind": "trace"}, "the workload of kind 'trace' has no 'path': add it"),
        ({"kind": "trace", "path": "/no/such.jsonl"}, "/no/such.jsonl: there is no such file"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_key_and_the_mend(table, says):
    with pytest.raises(WorkloadConfigError) as caught:
        make_workload(table)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, WorkloadsError)


def test_names_of_other_load_tools_stand_for_ours():
    table = {"kind": "shared-prefix", "num_prefixes": 3, "prefix_len": 50, "suffix_len": 7, "output_len": 9}
    found = resolved(make_workload(table))
    assert (found["num_groups"], found["system_prompt_len"], found["question_len"]) == (3, 50, 7)
    assert not set(found) & {"num_prefixes", "prefix_len", "suffix_len"}


def test_no_alias_hides_a_key():
    for struct in WORKLOADS.values():
        keys = set(workload_keys(struct.kind))
        assert not keys & set(struct.aliases)
        assert set(struct.aliases.values()) <= keys


def test_groups_of_samples_make_a_step():
    table = resolved(make_workload({"kind": "rl-rollout", "groups": 4, "samples_per_prompt": 16}))
    assert table["rollouts_per_step"] == 64
