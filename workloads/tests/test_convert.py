import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import Streams, TraceError, analyze, convert_workload, make_workload, prompt_token_ids, prompt_tokens
from workloads.traces.convert import BlockIds

TABLES = [
    {"kind": "multi-turn", "sessions": 6, "shared_system_prompts": 2, "turns": 3, "think_time_ms": 250.0},
    {"kind": "agentic-coding", "sessions": 2, "turns": 4, "subagent_turns": 3},
    {"kind": "agentic-coding", "sessions": 2, "turns": 4, "subagent_turns": 3, "subagent_prefix": "context"},
    {"kind": "group-burst", "bursts": 2, "burst_size": 4},
    {"kind": "rl-rollout", "steps": 1, "turns": 3, "samples_per_prompt": 2},
]

spans = st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 40))
prompts = st.lists(st.lists(spans, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@given(prompts, st.sampled_from([1, 4, 16]))
@settings(deadline=None, max_examples=60)
def test_equal_ids_are_equal_prefixes_whatever_was_hashed_before(sequence, size):
    goes_on = BlockIds(size)
    ids = [goes_on.of(prompt) for prompt in sequence]
    assert ids == [BlockIds(size).of(prompt) for prompt in sequence]
    tokens = [prompt_token_ids(prompt).tolist() for prompt in sequence]
    for a, b in ((0, len(ids) - 1),):
        for n in range(min(len(ids[a]), len(ids[b]))):
            assert (ids[a][n] == ids[b][n]) == (tokens[a][: (n + 1) * size] == tokens[b][: (n + 1) * size])


@pytest.mark.parametrize("table", TABLES)
def test_a_converted_workload_keeps_lengths_order_and_hits(tmp_path, table):
    workload, out = make_workload(table), tmp_path / "out.jsonl"
    stated = convert_workload(workload, out, streams=Streams(3), block_size=64)
    back = make_workload({"kind": "trace", "path": str(out)})
    sessions, again = (list(w.sessions(Streams(3))) for w in (workload, back))
    assert stated["requests"] == sum(len(s.turns) for s in sessions)
    assert stated["sessions"] == len(sessions) == len(again)
    for a, b in zip(sessions, again, strict=True):
        lengths = [[(prompt_tokens(p), t.output[1]) for t, p in s.prompts()] for s in (a, b)]
        assert lengths[0] == lengths[1]
        assert all(abs(s.think_us - t.think_us) <= 500 for s, t in zip(a.turns, b.turns, strict=True))
        assert len(a.after) == len(b.after)
        assert [len(t.after) for t in a.turns] == [len(t.after) for t in b.turns]
    before, after = (analyze(w, Streams(3), block_size=64).hit_rate for w in (workload, back))
    # Only forks behind a session's very last answer, which no row's ids cover, may share a little less.
    loss = 0.002 if table.get("subagent_prefix") == "context" else 1e-12
    assert before - loss <= after <= before + 1e-12


def test_a_converted_trace_states_its_block_size_and_is_read_by_it(tmp_path):
    source = tmp_path / "in.jsonl"
    rows = [{"timestamp": i, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, i + 2]} for i in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = make_workload({"kind": "trace", "path": str(source)})
    out = tmp_path / "out.jsonl"
    stated = convert_workload(trace, out, streams=Streams(0), block_size=100)
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_text()) == stated
    assert stated["block_size"] == 100
    assert stated["source"] == {
        "kind": "trace",
        "format": "mooncake",
        "file": "in.jsonl",
        "block_size": 512,
        "re_blocked": True,
        "left_out": {},
    }
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(row["hash_ids"]) for row in written] == [11, 11, 11]
    # 1,024 tokens are shared, which are 10 blocks of 100 and a rest that the form cannot tell
    assert written[0]["hash_ids"][:10] == written[1]["hash_ids"][:10]
    assert written[0]["hash_ids"][10] != written[1]["hash_ids"][10]
    sessions = list(make_workload({"kind": "trace", "path": str(out)}).sessions(Streams(0)))
    assert [s.start_us for s in sessions] == [0, 1000, 2000]
    assert {prompt_tokens(s.prompt(0)) for s in sessions} == {1100}


def test_a_trace_keeps_its_own_block_size_unless_told_otherwise(tmp_path):
    source = tmp_path / "in.jsonl"
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 32, "output_length": 0}
    rows = [row | {"hash_ids": [5, 6]}, row | {"chat_id": 2, "output_length": 3, "hash_ids": [5, 6]}]
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    trace = make_workload({"kind": "trace", "path": str(source)})
    stated = convert_workload(trace, tmp_path / "out.jsonl", streams=Streams(0))
    assert stated["block_size"] == 16
    assert not stated["source"]["re_blocked"]
    assert stated["source"]["left_out"] == {"length 0, a failed request": 1}


def test_a_trace_is_not_written_over_itself(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"timestamp": 0, "input_length": 5, "output_length": 4}\n')
    trace = make_workload({"kind": "trace", "path": str(source)})
    with pytest.raises(TraceError, match="would be written over while it is read"):
        convert_workload(trace, source, streams=Streams(0))


def test_a_failed_conversion_leaves_no_file(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"timestamp": 0, "input_length": 5, "output_length": 4}\n{"timestamp": 1}\n')
    trace = make_workload({"kind": "trace", "path": str(source)})
    with pytest.raises(TraceError, match=":2: has no input_length"):
        convert_workload(trace, tmp_path / "out.jsonl", streams=Streams(0))
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(TraceError, match="cannot be written"):
        convert_workload(trace, tmp_path / "none" / "out.jsonl", streams=Streams(0))
