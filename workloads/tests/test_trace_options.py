"""What a table may ask of a trace, and the errors that name a line."""

import json

import pytest

from workloads import Streams, TraceError, WorkloadConfigError, make_workload
from workloads.tests.trace_fixtures import DATA, FIXTURES, MOON, lengths, load, written


def test_speedup_divides_instants_and_pauses(tmp_path):
    rows = [
        {"session_id": s, "timestamp": t, "input_length": 9, "output_length": 1} for s, t in (("a", 1000), ("b", 9000))
    ] + [{"session_id": "a", "delay": 300, "input_length": 30, "output_length": 1}]
    path = written(tmp_path, rows)
    plain, fast = load(path), load(path, speedup=2.0)
    assert [s.start_us for s in plain] == [0, 8_000_000]
    for a, b in zip(plain, fast, strict=True):
        assert b.start_us == a.start_us / 2
        assert [t.think_us for t in b.turns] == [t.think_us / 2 for t in a.turns]
        assert [t.input for t in a.turns] == [t.input for t in b.turns]


def test_long_pauses_are_cut_in_the_traces_own_time(tmp_path):
    rows = [{"session_id": "a", "timestamp": 0, "input_length": 9, "output_length": 1}]
    rows += [{"session_id": "a", "delay": 60_000, "input_length": 30, "output_length": 1}]
    rows += [{"session_id": "b", "timestamp": 0, "input_length": 9, "output_length": 1}]
    rows += [
        {"session_id": "b", "timestamp": t, "input_length": n, "output_length": 1}
        for t, n in ((50_000, 20), (52_000, 40))
    ]
    a, b = load(written(tmp_path, rows), idle_gap_cap_s=10.0, speedup=2.0)
    assert a.turns[1].think_us == 5_000_000
    assert [t.start_us for t in b.turns] == [None, 5_000_000, 6_000_000]


def test_slots_may_take_the_sessions_of_a_trace(tmp_path):
    sessions = load(DATA / "burstgpt-new.csv", arrivals="slots")
    assert all(s.waits_for_a_slot for s in sessions)
    assert sessions[0].turns[1].start_us is None
    assert sessions[0].turns[1].think_us == 26_500_000


def test_samples_are_whole_sessions_and_nested(tmp_path):
    rows = [
        {"session_id": f"s{i % 50}", "timestamp": i, "input_length": 10 + 20 * (i // 50), "output_length": 1}
        for i in range(150)
    ]
    path = written(tmp_path, rows)
    everything = {s.session_id: s for s in load(path)}
    taken = {share: {s.session_id: s for s in load(path, sample=share)} for share in (0.2, 0.5)}
    assert taken[0.2].keys() < taken[0.5].keys() < everything.keys()
    assert 15 <= len(taken[0.5]) <= 35
    for session in taken[0.5].values():
        assert [t.index for t in session.turns] == [0, 1, 2]
        assert lengths([session]) == lengths([everything[session.session_id]])
    assert taken[0.5].keys() != {s.session_id for s in load(path, sample=0.5, sample_seed=1)}
    assert taken[0.5].keys() == {s.session_id for s in load(path, seed=9, sample=0.5)}


def test_the_first_sessions_are_counted_after_sampling(tmp_path):
    rows = [{"timestamp": i, "input_length": 10, "output_length": 1} for i in range(60)]
    path = written(tmp_path, rows)
    some = load(path, sample=0.5)
    assert load(path, sample=0.5, max_sessions=7) == some[:7]
    assert make_workload({"kind": "trace", "path": str(path), "sample": 0.5}).session_count(Streams(0)) == len(some)


def test_a_sample_of_nothing_is_an_error(tmp_path):
    path = written(tmp_path, [MOON])
    with pytest.raises(TraceError, match="no conversation is left to send: raise sample"):
        load(path, sample=1e-12)
    failed = written(tmp_path, "Timestamp,Model,Request tokens,Response tokens\n1,GPT-4,7,0\n")
    with pytest.raises(TraceError, match="every row was a failed one"):
        load(failed)


@pytest.mark.parametrize("options", [{}, {"max_sessions": 1}])
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_sessions_are_counted_as_they_come(name, options):
    options = options | {"format": FIXTURES[name][0]}
    workload = make_workload({"kind": "trace", "path": str(DATA / name), **options})
    counts = [workload.session_count(Streams(seed)) for seed in (0, 1)]
    assert counts == [len(load(DATA / name, **options))] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "trace.jsonl: the file is empty"),
        ("hello\n", "trace.jsonl:1: this is no form that we know by its looks: name it with workload.format"),
        ([MOON, MOON | {"hash_ids": [0, 1, 2, 3]}], r"trace.jsonl:2: 600 input tokens are 1.2 blocks of 512, but 4"),
        ([MOON, {"timestamp": 4, "hash_ids": []}], "trace.jsonl:2: has no input_length"),
        ([MOON, MOON | {"output_length": 0}], "trace.jsonl:2: input_length = 600 and output_length = 0"),
        ([MOON, MOON | {"input_length": "x"}], "trace.jsonl:2: Expected `int | null`, got `str`, at `input_length`"),
        ([MOON | {"timestamp": 9}, MOON], r"trace.jsonl:2: arrives 0.009 s before the row above it: sort"),
        ([MOON, MOON | {"delay": -1}], r"trace.jsonl:2: a wait of -1 ms"),
        (json.dumps(MOON) + "\n\n{cut", "trace.jsonl:3: is not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "trace.jsonl:2: TIMESTAMP = 'yesterday'"),
        ("TIMESTAMP,ContextTokens,Generated\n", "trace.jsonl:1: no column 'GeneratedTokens' in the header: did you"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1.5,2\n", r":2: ContextTokens = '1.5': a whole"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1\n", ":2: 2 columns where 3 belong"),
        ("Timestamp,Model,Request tokens,Response tokens\nx,GPT-4,1,2\n", ":2: Timestamp = 'x': seconds"),
        ('{"chat_id":1,"parent_chat_id":-1}\n', ":1: has no `timestamp`"),
        ('{"id":"c","requests":[{"t":0}]}\n', ":1: has no `type`"),
        ('[{"id":"x","conversations":[{"from":"human"}]}]', ":1: has no `value`"),
        ('[{"id":"x","conversations":[]},\n{"id":', ":2: is not JSON"),
        ('[{"id":"x","conversations":[]}\n', ":2: the file ends inside an array"),
        ('{"trace_id":"t","spans":[{"span_id":"1","start_time":"noon","end_time":1,"attributes":'
         '{"gen_ai.input.messages":"[{}]"}}]}', ":1: time 'noon'"),
        ('{"trace_id":"t","spans":[{"span_id":"1","start_time":1,"end_time":1,"attributes":'
         '{"gen_ai.input.messages":"[1"}}]}', ":1: gen_ai.input.messages of span 1"),
        ('{"schema":"dynamo.request.trace.v2","event_type":"x","event_time_unix_ms":1}\n', ":1: schema is"),
    ],
)  # fmt: skip
def test_an_error_names_file_and_line_and_the_mend(tmp_path, text, says):
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_right_block_size_makes_the_ids_fit(tmp_path):
    path = written(tmp_path, [MOON | {"hash_ids": [0, 1, 2, 3, 4]}])
    with pytest.raises(TraceError, match="about 120 tokens each"):
        load(path)
    (session,) = load(path, block_size=128)
    assert [tokens for _, tokens in session.prompt(0)] == [128, 128, 128, 128, 88]


@pytest.mark.parametrize("ids", [[0], [0, 1]])
def test_both_roundings_of_block_counts_are_read(tmp_path, ids):
    (session,) = load(written(tmp_path, [MOON | {"hash_ids": ids}]))
    assert [tokens for _, tokens in session.prompt(0)] == [512, 88]


def test_a_row_with_a_session_after_many_without_is_an_error(tmp_path):
    path = written(tmp_path, [MOON] * 201 + [MOON | {"session_id": "late"}])
    with pytest.raises(TraceError, match=":202: belongs to a session, which none of the first 200 rows does"):
        load(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "moon"}, "no trace format 'moon': did you mean 'mooncake'?"),
        ({"speedup": 0.0}, "give a factor above 0"),
        ({"sample": 0.0}, "give a share above 0"),
        ({"idle_gap_cap_s": -1.0}, "give seconds, 0 or more"),
        ({"block_size": 0}, "block_size = 0: at least 1"),
        ({"arrivals": "poisson"}, "arrivals = 'poisson': choose one of slots, trace"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_read(options, says):
    with pytest.raises(WorkloadConfigError) as caught:
        load(DATA / "mooncake.jsonl", **options)
    assert says in str(caught.value)


def test_a_folder_without_traces_is_an_error(tmp_path):
    with pytest.raises(WorkloadConfigError, match=r"has no \.json, \.jsonl or \.csv file"):
        load(tmp_path)
