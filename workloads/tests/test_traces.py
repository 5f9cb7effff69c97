"""Each form by its fixture and by its oddities."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import TRACE_FORMATS, TraceError, prompt_tokens
from workloads.tests.trace_fixtures import DATA, FIXTURES, lengths, load, written
from workloads.traces.build import Builder, Timing
from workloads.traces.recognise import recognise
from workloads.traces.rows import Row


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_a_fixture_of_each_form_gives_its_lengths_and_instants(name):
    form, expected, starts = FIXTURES[name]
    sessions = load(DATA / name, format=form)
    assert lengths(sessions) == expected
    assert [s.start_us for s in sessions] == starts
    if form != "mooncake-delta":
        assert recognise(DATA / name) == form
        assert load(DATA / name) == sessions


def test_every_form_has_a_fixture():
    assert {form for form, _, _ in FIXTURES.values()} == set(TRACE_FORMATS)
    assert {p.name for p in DATA.iterdir()} == set(FIXTURES)


def test_equal_leading_ids_are_equal_leading_spans():
    first, second = (s.turns[0].input for s in load(DATA / "mooncake.jsonl"))
    assert first[:2] == second[:2]
    assert [tokens for _, tokens in first] == [512, 512, 76]
    assert [tokens for _, tokens in second] == [512, 512, 512, 64]
    assert first[2][0] != second[2][0]


def test_another_seed_is_the_same_shape_in_other_words():
    a, b = load(DATA / "mooncake.jsonl", seed=1), load(DATA / "mooncake.jsonl", seed=2)
    assert lengths(a) == lengths(b)
    assert not {i for s in a for i, _ in s.prompt(0)} & {i for s in b for i, _ in s.prompt(0)}
    c, d = (load(DATA / "sharegpt.json", seed=seed) for seed in (1, 2))
    assert not {i for s in c for i, _ in s.prompt(0)} & {i for s in d for i, _ in s.prompt(0)}


def test_a_later_row_that_repeats_prompt_and_answer_goes_on_with_the_live_answer(tmp_path):
    (session,) = load(DATA / "dynamo.jsonl")
    assert [t.input[0][1] for t in session.turns] == [512, 70]
    assert session.turns[1].think_us == 400_000
    assert session.turns[1].after == ()  # it waits for its own session anyway


@pytest.mark.parametrize(
    "second",
    [
        {"input_length": 629, "hash_ids": [0, 1]},  # too short for prompt and answer
        {"input_length": 900, "hash_ids": [9, 8]},  # other text
        {"input_length": 900, "hash_ids": [0, 8], "prefix_reset": True},  # the trace says so
    ],
)
def test_a_prompt_that_begins_anew_restarts_the_history(tmp_path, second):
    rows = [
        {"session_id": "s", "timestamp": 5, "input_length": 600, "output_length": 30, "hash_ids": [0, 1]},
        {"session_id": "s", "delay": 40, "output_length": 3, **second},
        {"session_id": "s", "input_length": 950, "output_length": 3, "hash_ids": [*second["hash_ids"][:1], 5]},
    ]
    (session,) = load(written(tmp_path, rows))
    assert [t.restart for t in session.turns] == [False, True, False]
    assert session.turns[1].think_us == 40_000
    assert prompt_tokens(session.prompt(1)) == second["input_length"]
    assert session.prompt(1) == session.turns[1].input
    assert session.prompt(2)[: len(session.prompt(1)) + 1] == (*session.prompt(1), session.turns[1].output)
    assert (session.prompt(1)[0] == session.prompt(0)[0]) == (second["hash_ids"][0] == 0)
    assert [p for _, p in session.prompts()] == [session.prompt(i) for i in range(3)]
    assert session.total_tokens == 953


def test_a_fork_behind_an_answer_shares_it(tmp_path):
    """Another session's ids name the block in which the first session's answer lies."""
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
        {"session_id": "a", "timestamp": 9, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
        {"session_id": "b", "timestamp": 20, "input_length": 2048, "output_length": 5, "hash_ids": [0, 1, 3, 7]},
    ]
    a, b = load(written(tmp_path, rows))
    assert a.turns[1].start_us == 9_000
    prompt = a.prompt(1)
    assert [tokens for _, tokens in prompt] == [512, 512, 76, 40, 396, 464]
    assert b.prompt(0)[:5] == prompt[:5]
    assert b.prompt(0)[5][1] == 512


def test_a_fork_within_a_long_answer_shares_its_beginning(tmp_path):
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 512, "output_length": 1000, "hash_ids": [0]},
        {"session_id": "a", "timestamp": 9, "input_length": 2048, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
        {"session_id": "b", "timestamp": 20, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "c", "timestamp": 30, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 9]},
    ]
    a, b, c = load(written(tmp_path, rows))
    answer = a.turns[0].output
    assert b.prompt(0) == (a.prompt(0)[0], (answer[0], 488))
    assert c.prompt(0)[:2] == (a.prompt(0)[0], answer)
    assert c.prompt(0)[2] == a.prompt(1)[2]


def test_equal_conversations_have_equal_answers(tmp_path):
    def turns(name):
        return [
            {"session_id": name, "timestamp": 0, "input_length": 600, "output_length": 30, "hash_ids": [0, 1]},
            {"session_id": name, "delay": 1, "input_length": 700, "output_length": 9, "hash_ids": [0, 2]},
        ]

    a, b = load(written(tmp_path, turns("a") + turns("b")))
    assert a.prompt(1) == b.prompt(1)
    assert a.turns[1].output != b.turns[1].output


def test_sessions_may_interleave_and_come_by_their_first_instant(tmp_path):
    rows = [
        {"session_id": "late", "timestamp": 500, "input_length": 10, "output_length": 1},
        {"session_id": "early", "timestamp": 100, "input_length": 10, "output_length": 1},
        {"session_id": "late", "delay": 3, "input_length": 20, "output_length": 1},
        {"session_id": "early", "delay": 3, "input_length": 21, "output_length": 1},
    ]
    sessions = load(written(tmp_path, rows))
    assert [(s.session_id, s.start_us) for s in sessions] == [("early", 0), ("late", 400_000)]
    assert lengths(sessions) == [[(10, 1), (21, 1)], [(10, 1), (20, 1)]]


def test_rows_wait_for_rows_of_other_sessions(tmp_path):
    rows = [
        {"session_id": "m", "request_id": "a", "timestamp": 0, "input_length": 10, "output_length": 1},
        {"session_id": "x", "request_id": "b", "wait_for": ["a"], "delay": 7, "input_length": 5, "output_length": 1},
        {"session_id": "m", "request_id": "c", "wait_for": ["a", "b"], "input_length": 20, "output_length": 1},
    ]
    path = written(tmp_path, rows)
    by_id = {s.session_id: s for s in load(path)}
    assert by_id["x"].after == ("request:a",)
    assert by_id["x"].turns[0].think_us == 7_000
    assert by_id["x"].start_us is None
    assert by_id["m"].turns[0].name == "request:a"
    assert by_id["m"].turns[1].after == ("request:b",)
    written(tmp_path, [*rows, {"request_id": "z", "wait_for": ["nobody"], "input_length": 5, "output_length": 1}])
    with pytest.raises(TraceError, match=r"trace.jsonl:4: waits for 'nobody', which is no row's request_id"):
        load(path)


def test_what_is_not_taken_is_not_waited_for(tmp_path):
    rows = [
        {"session_id": "m", "request_id": "a", "timestamp": 0, "input_length": 10, "output_length": 1},
        {"session_id": "m", "request_id": "c", "wait_for": ["b"], "input_length": 20, "output_length": 1},
        {"session_id": "x", "request_id": "b", "timestamp": 4, "input_length": 5, "output_length": 1},
    ]
    (session,) = load(written(tmp_path, rows), max_sessions=1)
    assert session.turns[1].after == ()


def test_names_of_other_writers_are_read(tmp_path):
    rows = [
        {"session_id": 1, "created_time": 0, "input_tokens": 10, "output_tokens": 2},
        {"session_id": 1, "delay_ms": 3.5, "input_tokens": 20, "output_tokens": 2},
    ]
    (session,) = load(written(tmp_path, rows))
    assert session.turns[1].think_us == 3_500


def test_recorded_pauses_lie_between_an_end_and_the_next_arrival(tmp_path):
    def end(at, name, received=None, **request):
        times = {} if received is None else {"request_received_ms": received}
        return {
            "schema": "dynamo.request.trace.v1",
            "event_type": "request_end",
            "event_time_unix_ms": at,
            "agent_context": {"session_id": "s"},
            "request": {"request_id": name, "output_tokens": 30, **times, **request},
        }

    tool = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_end",
        "event_time_unix_ms": 1400,
        "agent_context": {"session_id": "s"},
        "tool": {"tool_call_id": "t", "duration_ms": 400},
    }
    replay = {"trace_block_size": 16, "input_length": 40, "input_sequence_hashes": [2**64 - 1, 7, 9]}
    more = {"trace_block_size": 16, "input_length": 80, "input_sequence_hashes": [2**64 - 1, 7, 8, 10, 11]}
    rows = [
        end(1000, "a", 700, replay=replay),
        tool,
        end(2000, "b", 1500, replay=more),
        tool,
        end(3000, "c", input_tokens=200),
    ]
    (session,) = load(written(tmp_path, rows))
    assert [t.think_us for t in session.turns] == [0, 500_000, 400_000]
    assert [t.restart for t in session.turns] == [False, False, True]
    wrapped = load(written(tmp_path, [{"event": rows[0]}]))
    assert lengths(wrapped) == [[(40, 30)]]
    del rows[2]["agent_context"]
    with pytest.raises(TraceError, match=r":3: requests with and without agent_context are mixed"):
        load(written(tmp_path, rows))


def test_a_chat_tree_is_cut_into_sessions_and_forks(tmp_path):
    def chat(n, parent, t, ids):
        row = {"chat_id": n, "parent_chat_id": parent, "timestamp": t, "type": "text", "turn": 1}
        return row | {"input_length": 16 * len(ids), "output_length": 8, "hash_ids": ids}

    rows = [
        chat(1, -1, 0.0, [5, 6]),
        chat(9, -1, 0.5, [5, 7]),
        chat(2, 1, 4.0, [5, 6, 7, 8]),
        chat(3, 1, 5.0, [5, 6, 9, 9]),
        chat(4, 2, 6.0, [5, 6, 7, 8, 1, 2]),
        chat(5, 77, 7.0, [4]),
    ]
    sessions = {s.session_id: s for s in load(written(tmp_path, rows))}
    assert {name: len(s.turns) for name, s in sessions.items()} == {"chat1": 3, "chat9": 1, "chat3": 1, "chat5": 1}
    assert sessions["chat3"].prompt(0)[:2] == sessions["chat1"].prompt(0)
    assert sessions["chat9"].prompt(0)[0] == sessions["chat1"].prompt(0)[0]
    assert sessions["chat1"].turns[1].start_us == 4_000_000


@pytest.mark.parametrize("t", [0.0, 5.0])
def test_a_nested_agent_starts_after_its_caller_and_is_waited_for(tmp_path, t):
    """Its `t` counts from its own start in the specification, from the conversation's in newer captures."""
    sub = [
        {"t": t, "type": "s", "in": 70, "out": 5, "hash_ids": [7], "api_time": 1.0},
        {"t": t + 3, "type": "s", "in": 90, "out": 5, "hash_ids": [7]},
    ]
    document = {
        "id": "c1",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "s", "in": 150, "out": 20, "hash_ids": [1, 2], "api_time": 1.0},
            {"t": 5.0, "type": "subagent", "agent_id": "x", "requests": sub},
            {"t": 20.0, "type": "n", "in": 300, "out": 20, "hash_ids": [1, 2, 3, 4], "think_time": 2.5},
        ],
    }
    main, agent = load(written(tmp_path, json.dumps(document, indent=1), "c1.json"))
    assert agent.after == (main.turns[0].name,)
    assert main.turns[1].after == (agent.turns[-1].name,)
    assert main.turns[1].think_us == 2_500_000
    assert agent.turns[1].think_us == 2_000_000
    assert lengths([main, agent]) == [[(150, 20), (300, 20)], [(70, 5), (90, 5)]]


def test_local_ids_mean_nothing_in_another_conversation(tmp_path):
    for scope, shared in (("local", 0), ("global", 2)):
        for name in ("c1", "c2"):
            request = {"t": 0.0, "type": "s", "in": 130, "out": 2, "hash_ids": [1, 2]}
            text = json.dumps({"id": name, "block_size": 64, "hash_id_scope": scope, "requests": [request]})
            written(tmp_path, text, f"{name}.json")
        a, b = load(tmp_path)
        assert len(set(a.prompt(0)) & set(b.prompt(0))) == shared


def test_calls_that_quote_an_answer_go_on_from_it_or_fork(tmp_path):
    def call(n, start, messages, said):
        attributes = {"gen_ai.input.messages": json.dumps(messages), "gen_ai.output.text": said}
        ends = start + 1_000_000_000
        return {"span_id": str(n), "start_time": start, "end_time": ends, "attributes": attributes}

    ask = [{"role": "user", "content": "List the files of this folder, please, and sort them."}]
    told = [*ask, {"role": "assistant", "content": "a.py, b.py"}]
    spans = [
        call(1, 10_000_000_000, ask, "a.py, b.py"),
        call(2, 12_000_000_000, [*told, {"role": "user", "content": [{"type": "text", "text": "Read a.py"}]}], "done"),
        call(3, 13_000_000_000, [*told, {"role": "user", "content": "Read b.py"}], "done too"),
        {"span_id": "4", "start_time": 0, "end_time": 1, "attributes": {"tool": "shell"}},
        call(5, 11_500_000_000, [{"role": "user", "content": "Aside"}], "a remark"),
        call(
            6,
            20_000_000_000,
            [
                *told,
                {"role": "user", "content": "Read a.py"},
                {"role": "assistant", "content": "done"},
                {"role": "user", "content": "and"},
                {"role": "assistant", "content": "a remark"},
            ],
            "ok",
        ),
    ]
    main, aside, fork = load(written(tmp_path, json.dumps({"trace_id": "t", "spans": spans}), "t.json"))
    assert len(main.turns) == 3
    assert main.turns[2].after == (aside.turns[0].name,)
    assert fork.after == (main.turns[0].name,)
    heard = (*main.prompt(0), main.turns[0].output)
    assert fork.prompt(0)[: len(heard)] == heard
    assert main.prompt(1)[: len(heard)] == heard
    assert (main.turns[1].think_us, fork.turns[0].think_us) == (1_000_000, 2_000_000)


def test_text_shares_spans_as_far_as_it_agrees(tmp_path):
    def chat(n, text):
        said = [{"from": "system", "value": "x" * 640}, {"from": "human", "value": text}, {"from": "gpt", "value": "y"}]
        return {"id": n, "conversations": [{"from": "gpt", "value": "unasked"}, *said]}

    a, b = load(written(tmp_path, json.dumps([chat("1", "abc"), chat("2", "abd")]), "s.json"))
    assert a.prompt(0)[:10] == b.prompt(0)[:10]
    assert a.prompt(0)[10] != b.prompt(0)[10]
    assert prompt_tokens(a.prompt(0)) == 161


def test_failed_requests_are_left_out(tmp_path):
    assert len(load(DATA / "burstgpt-old.csv")) == 1


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=24), st.sampled_from(["", "c1"]))
def test_a_block_has_one_name_however_many_are_named_together(ids, scope):
    row = Row("t", 1, "s", 16 * len(ids), 1, hash_ids=tuple(ids), block_size=16, scope=scope)
    builder = Builder(5, Timing())
    assert builder._block_ids(row, 0) == [name for n in range(len(ids)) for name in builder._block_ids(row, n, n + 1)]
