"""Laws of every trace, over drawn ones: nothing is lost, text agrees exactly where ids do."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import Streams, TraceError, analyze, common_prefix_tokens, convert_workload, make_workload, prompt_tokens

BLOCK = 16


@st.composite
def chained_ids(draw):
    """A prompt of blocks from a small tree, so that prompts share prefixes: an id names all that leads to it."""
    path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
    ids = [int("1" + "".join(map(str, path[: n + 1])), 2) for n in range(len(path))]
    tail = draw(st.integers(1, BLOCK))
    return (len(ids) - 1) * BLOCK + tail, ids


@st.composite
def traces(draw, sessions):
    rows = []
    for number in range(draw(st.integers(1, 14))):
        length, ids = draw(chained_ids())
        row = {"timestamp": number * draw(st.integers(0, 3)), "input_length": length, "hash_ids": ids}
        row["output_length"] = draw(st.integers(1, 40))
        if sessions:
            row["session_id"] = f"s{draw(st.integers(0, 3))}"
        rows.append(row)
    if not sessions:
        rows.sort(key=lambda row: row["timestamp"])
    return rows


def load(rows, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = {"kind": "trace", "path": str(path), "block_size": BLOCK, **options}
        return list(make_workload(table).sessions(Streams(5)))


def shape(session):
    return [(prompt_tokens(prompt), turn.output[1]) for turn, prompt in session.prompts()]


@given(traces(sessions=False))
@settings(deadline=None, max_examples=60)
def test_prompts_share_exactly_the_blocks_whose_ids_agree(rows):
    sessions = load(rows)
    for a, row_a in zip(sessions, rows, strict=True):
        for b, row_b in zip(sessions, rows, strict=True):
            same = 0
            for x, y in zip(row_a["hash_ids"], row_b["hash_ids"], strict=False):
                if x != y:
                    break
                same += 1
            shared = min(same * BLOCK, row_a["input_length"], row_b["input_length"])
            assert common_prefix_tokens(a.prompt(0), b.prompt(0)) == shared


@given(traces(sessions=True))
@settings(deadline=None, max_examples=60)
def test_every_row_is_one_request_in_the_order_of_its_session(rows):
    expected = {}
    for row in rows:
        expected.setdefault(row["session_id"], []).append((row["input_length"], row["output_length"]))
    assert {s.session_id: shape(s) for s in load(rows)} == expected


@given(traces(sessions=True))
@settings(deadline=None, max_examples=60)
def test_a_turn_goes_on_from_the_one_before_or_restarts(rows):
    for session in load(rows):
        for before, turn in zip(session.turns, session.turns[1:], strict=False):
            heard = () if turn.restart else (*session.prompt(before.index), before.output)
            assert session.prompt(turn.index) == (*heard, *turn.input)
        assert [prompt for _, prompt in session.prompts()] == [session.prompt(t.index) for t in session.turns]


@given(traces(sessions=True), st.sampled_from([0.5, 2.0, 3.0]))
@settings(deadline=None, max_examples=40)
def test_speedup_scales_every_instant_and_pause_and_nothing_else(rows, speedup):
    for a, b in zip(load(rows), load(rows, speedup=speedup), strict=True):
        assert shape(a) == shape(b)
        pairs = [(a, b), *zip(a.turns, b.turns, strict=True)]
        for plain, fast in ((x.start_us, y.start_us) for x, y in pairs):
            assert (plain is None) == (fast is None)
            assert plain is None or abs(fast - plain / speedup) <= 0.5
        assert all(abs(t.think_us - s.think_us / speedup) <= 0.5 for s, t in zip(a.turns, b.turns, strict=True))


@given(traces(sessions=True), st.sampled_from([0.3, 0.6]), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_a_sample_holds_whole_conversations(rows, sample, sample_seed):
    whole = {s.session_id: shape(s) for s in load(rows)}
    taken = {}
    with suppress(TraceError):  # of a few conversations none may be left
        taken = {s.session_id: shape(s) for s in load(rows, sample=sample, sample_seed=sample_seed)}
    assert taken.items() <= whole.items()


conversations = st.fixed_dictionaries(
    {
        "kind": st.just("multi-turn"),
        "sessions": st.integers(1, 5),
        "turns": st.integers(1, 4),
        "shared_system_prompts": st.integers(0, 2),
        "system_prompt_tokens": st.integers(1, 90),
        "first_input_tokens": st.integers(1, 60),
        "input_tokens": st.one_of(st.just(0), st.integers(1, 60)),
        "output_tokens": st.integers(1, 60),
    }
)


@given(conversations, st.integers(0, 99), st.sampled_from([8, 16, 50]))
@settings(deadline=None, max_examples=40)
def test_conversion_keeps_every_request_and_every_hit_at_its_block_size(table, seed, block_size):
    workload = make_workload(table)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        convert_workload(workload, out, streams=Streams(seed), block_size=block_size)
        back = make_workload({"kind": "trace", "path": str(out)})
        before, after = (list(w.sessions(Streams(seed))) for w in (workload, back))
        figures = [analyze(w, Streams(seed), block_size=block_size) for w in (workload, back)]
    assert [shape(s) for s in before] == [shape(s) for s in after]
    assert figures[0].hit_rate == figures[1].hit_rate
    assert figures[0].cache_hit_rates == figures[1].cache_hit_rates
