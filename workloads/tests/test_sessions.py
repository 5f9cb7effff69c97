from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import Streams, make_workload, prompt_token_ids, prompt_tokens

lengths = st.one_of(
    st.integers(1, 60),
    st.builds(
        lambda low, more: {"dist": "uniform", "low": low, "high": low + more}, st.integers(1, 20), st.integers(0, 40)
    ),
)
small = st.integers(1, 5)
spread_small = st.just({"dist": "uniform", "low": 0, "high": 4})
gaps = st.just({"dist": "exponential", "mean": 40})
multi_turn = st.fixed_dictionaries(
    {
        "kind": st.just("multi-turn"),
        "sessions": st.integers(1, 5),
        "turns": st.one_of(st.integers(1, 5), lengths),
        "shared_system_prompts": st.integers(0, 3),
        "system_prompt_tokens": st.one_of(st.integers(1, 40), lengths, st.just({"dist": "choice", "values": [0, 9]})),
        "first_input_tokens": lengths,
        "input_tokens": st.one_of(st.just(0), lengths),
        "output_tokens": lengths,
        "think_time_ms": st.one_of(st.just(0), st.just({"dist": "exponential", "mean": 50})),
    }
)
rl_rollout = st.fixed_dictionaries(
    {
        "kind": st.just("rl-rollout"),
        "steps": st.integers(1, 3),
        "rollouts_per_step": st.just(4),
        "samples_per_prompt": st.sampled_from([1, 2, 4]),
        "turns": st.integers(1, 4),
        "first_input_tokens": lengths,
        "tool_tokens": st.one_of(st.just(0), lengths),
        "output_tokens": lengths,
        "stragglers": st.one_of(st.integers(0, 4), spread_small),
        "straggler_last_output_tokens": st.just(300),
        "barrier": st.booleans(),
    }
)
shared_prefix = st.fixed_dictionaries(
    {
        "kind": st.just("shared-prefix"),
        "num_groups": small,
        "num_prompts_per_group": st.one_of(small, spread_small),
        "system_prompt_len": lengths,
        "question_len": st.one_of(st.just(0), lengths),
        "output_len": lengths,
        "shared_fraction": st.floats(0, 1),
    }
)
rag = st.fixed_dictionaries(
    {
        "kind": st.just("rag"),
        "requests": small,
        "corpus_chunks": st.integers(5, 9),
        "chunk_tokens": lengths,
        "chunks_per_request": st.one_of(small, spread_small),
        "popularity": st.floats(0, 5),
        "chunk_order": st.sampled_from(["drawn", "ranked"]),
        "system_prompt_tokens": st.one_of(st.integers(0, 20), spread_small),
    }
)
agentic = st.fixed_dictionaries(
    {
        "kind": st.just("agentic-coding"),
        "sessions": small,
        "turns": st.integers(1, 6),
        "system_prompt_tokens": st.one_of(st.integers(0, 60), spread_small),
        "subagents": st.one_of(st.integers(0, 4), spread_small),
        "subagent_system_prompt_tokens": st.one_of(st.integers(0, 60), spread_small),
        "subagent_turns": st.integers(1, 4),
        "subagent_prefix": st.sampled_from(["system", "context"]),
        "max_context_tokens": st.sampled_from([20_000, 120_000]),
        "output_tokens": lengths,
    }
)
together = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("waves"),
            "waves": small,
            "wave_size": st.one_of(small, spread_small),
            "input_tokens": lengths,
            "output_tokens": lengths,
            "every_ms": st.one_of(st.sampled_from([0.0, 5.5]), gaps),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("group-burst"),
            "bursts": small,
            "burst_size": st.one_of(small, spread_small),
            "every_ms": st.one_of(st.sampled_from([0.0, 50.0]), gaps),
            "prompt_tokens": lengths,
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("uniform-unique"), "requests": small, "input_tokens": lengths, "output_tokens": lengths}
    ),
)
workloads = st.one_of(multi_turn, rl_rollout, shared_prefix, rag, agentic, together)
seeds = st.integers(0, 2**31 - 1)


def drawn(table, seed):
    return list(make_workload(table).sessions(Streams(seed)))


@given(workloads, seeds)
@settings(deadline=None, max_examples=40)
def test_a_prompt_begins_with_the_previous_prompt_and_its_answer(table, seed):
    for session in drawn(table, seed):
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            begins = (*session.prompt(before.index), before.output)
            prompt = session.prompt(after.index)
            assert prompt[: len(begins)] == begins
            assert prompt[len(begins) :] == after.input
        assert [p for _, p in session.prompts()] == [session.prompt(t.index) for t in session.turns]


@given(workloads, seeds)
@settings(deadline=None, max_examples=40)
def test_the_same_seed_gives_the_same_sessions(table, seed):
    assert drawn(table, seed) == drawn(table, seed)


@given(workloads, seeds)
@settings(deadline=None, max_examples=40)
def test_every_session_can_be_sent(table, seed):
    workload = make_workload(table)
    sessions = drawn(table, seed)
    assert len(sessions) == workload.session_count(Streams(seed))
    assert len({s.session_id for s in sessions}) == len(sessions)
    for session in sessions:
        assert [t.index for t in session.turns] == list(range(len(session.turns)))
        assert session.turns[0].think_us == 0
        for turn, prompt in session.prompts():
            assert prompt_tokens(prompt) >= 1
            assert turn.output[1] >= 1
            assert turn.think_us >= 0
            assert all(tokens >= 1 for _, tokens in prompt)
            assert all(0 <= span_id < 2**63 for span_id, _ in (*prompt, turn.output))


@given(workloads, seeds)
@settings(deadline=None, max_examples=40)
def test_sessions_come_by_their_instants_and_wait_for_what_comes(table, seed):
    sessions = drawn(table, seed)
    starts = [s.start_us for s in sessions if s.start_us is not None]
    assert starts == sorted(starts)
    names = [s.session_id for s in sessions] + [t.name for s in sessions for t in s.turns if t.name]
    assert len(set(names)) == len(names)
    for session in sessions:
        assert set(session.after) <= set(names)
        for turn in session.turns:
            assert set(turn.after) <= set(names)


@given(workloads, seeds)
@settings(deadline=None, max_examples=40)
def test_a_timestamp_in_front_leaves_everything_else_and_nothing_to_share(table, seed):
    plain, stamped = drawn(table, seed), drawn(table | {"timestamp_prefix": True}, seed)
    fronts = [turn.front for session in stamped for turn in session.turns]
    assert len({span_id for span_id, _ in fronts}) == len(fronts)
    assert all(tokens == 1 for _, tokens in fronts)
    for a, b in zip(plain, stamped, strict=True):
        assert a == replace(b, turns=tuple(replace(turn, front=None) for turn in b.turns))
        for turn, prompt in b.prompts():
            assert prompt == (turn.front, *a.prompt(turn.index)) == b.prompt(turn.index)
        assert b.total_tokens == a.total_tokens + 1


@given(workloads, seeds)
@settings(deadline=None, max_examples=30)
def test_no_two_spans_of_a_workload_share_an_id_by_accident(table, seed):
    ids = [t.output[0] for s in drawn(table, seed) for t in s.turns]
    ids += [span_id for s in drawn(table, seed) for t in s.turns[1:] for span_id, _ in t.input]
    assert len(set(ids)) == len(ids)


def test_another_seed_shares_no_text():
    a, b = (
        {
            sid
            for s in drawn({"kind": "multi-turn", "shared_system_prompts": 2}, seed)
            for t in s.turns
            for sid, _ in (*t.input, t.output)
        }
        for seed in (1, 2)
    )
    assert not a & b


def test_sessions_of_a_group_share_the_system_prompt_and_nothing_else():
    sessions = drawn({"kind": "multi-turn", "sessions": 40, "shared_system_prompts": 3, "system_prompt_tokens": 100}, 5)
    by_group = {}
    for session in sessions:
        by_group.setdefault(session.group, []).append(session.turns[0].input)
    assert len(by_group) == 3
    for inputs in by_group.values():
        assert len({i[0] for i in inputs}) == 1
        assert inputs[0][0][1] == 100
        assert len({i[1] for i in inputs}) == len(inputs)


def test_longer_answers_leave_inputs_and_turns_where_they_were():
    short = drawn({"kind": "multi-turn", "turns": {"dist": "geometric", "mean": 4}, "output_tokens": 10}, 9)
    spread = drawn(
        {
            "kind": "multi-turn",
            "turns": {"dist": "geometric", "mean": 4},
            "output_tokens": {"dist": "uniform", "low": 10, "high": 99},
        },
        9,
    )
    assert [[t.input for t in s.turns] for s in short] == [[t.input for t in s.turns] for s in spread]


def test_the_default_rollouts_have_the_straggler_experiments_shape():
    sessions = drawn({"kind": "rl-rollout"}, 42)
    assert len(sessions) == 6 * 8
    for step in range(6):
        members = [s for s in sessions if s.rollout_step == step]
        assert len(members) == 8
        assert sum(s.straggler for s in members) == 2
    for session in sessions:
        assert len(session.turns) == 10
        assert prompt_tokens(session.prompt(0)) == 2048
        assert {t.output[1] for t in session.turns[:-1]} == {1024}
        assert session.turns[-1].output[1] == (8192 if session.straggler else 1024)
    assert [s.rollout_step for s in sessions] == sorted(s.rollout_step for s in sessions)


def test_samples_of_one_prompt_share_the_first_input_only():
    sessions = drawn({"kind": "rl-rollout", "steps": 2, "samples_per_prompt": 4}, 3)
    groups = {}
    for session in sessions:
        groups.setdefault(session.group, []).append(session)
    assert sorted(map(len, groups.values())) == [4, 4, 4, 4]
    for members in groups.values():
        assert len({m.turns[0].input for m in members}) == 1
        assert len({m.turns[0].output for m in members}) == 4
    assert len({members[0].turns[0].input for members in groups.values()}) == 4


def test_which_rollouts_straggle_is_drawn():
    late = [
        tuple(i % 8 for i, s in enumerate(drawn({"kind": "rl-rollout", "steps": 1}, seed)) if s.straggler)
        for seed in range(40)
    ]
    assert all(len(pair) == 2 for pair in late)
    assert len(set(late)) > 10


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_token_ids_of_a_prompt_begin_with_those_of_the_turn_before(turn):
    session = drawn({"kind": "multi-turn", "sessions": 1, "turns": 5}, 1)[0]
    before, after = (prompt_token_ids(session.prompt(i)).tolist() for i in (turn, turn + 1))
    assert after[: len(before)] == before
