import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import Session, Streams, Turn, make_workload, requests_in_order

TABLES = [
    {"kind": "agentic-coding", "sessions": 4, "turns": 5, "subagents": 3, "subagent_turns": 2},
    {"kind": "agentic-coding", "sessions": 2, "turns": 5, "subagents": 3, "subagent_prefix": "context"},
    {"kind": "group-burst", "bursts": 3, "burst_size": 5, "every_ms": 300.0, "output_tokens": 4},
    {"kind": "multi-turn", "sessions": 9, "think_time_ms": {"dist": "exponential", "mean": 900}},
    {"kind": "waves", "waves": 3, "wave_size": 4},
]


def sent(table, seed, slots):
    return list(requests_in_order(make_workload(table).sessions(Streams(seed)), slots, lambda t: t.output[1] * 1000))


@given(st.sampled_from(TABLES), st.integers(0, 99), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_every_request_goes_out_once_and_when_the_rules_say(table, seed, slots):
    sessions = list(make_workload(table).sessions(Streams(seed)))
    order = sent(table, seed, slots)
    keys = [(s.session.session_id, s.turn.index) for s in order]
    assert sorted(keys) == sorted((s.session_id, t.index) for s in sessions for t in s.turns)
    assert [s.at_us for s in order] == sorted(s.at_us for s in order)
    ends, at = {}, {}
    for request in order:
        end = request.at_us + request.turn.output[1] * 1000
        at[request.session.session_id, request.turn.index] = request.at_us
        ends[request.session.session_id, request.turn.index] = end
        ends[request.session.session_id] = end  # the last one stays
        if request.turn.name:
            ends[request.turn.name] = end
        assert request.prompt == request.session.prompt(request.turn.index)
    for session in sessions:
        for turn in session.turns:
            sent_us = at[session.session_id, turn.index]
            if turn.index:
                assert sent_us >= ends[session.session_id, turn.index - 1] + turn.think_us
            for name in turn.after + (session.after if turn.index == 0 else ()):
                assert sent_us >= ends[name]
        if session.start_us is not None:
            assert at[session.session_id, 0] == session.start_us


@given(st.integers(0, 99), st.integers(1, 6))
@settings(deadline=None, max_examples=20)
def test_a_closed_loop_holds_as_many_sessions_as_it_has_slots(seed, slots):
    order = sent(TABLES[3], seed, slots)
    spans = {}
    for request in order:
        first, _ = spans.get(request.session.session_id, (request.at_us, 0))
        spans[request.session.session_id] = (first, request.at_us + request.turn.output[1] * 1000)
    for instant, _ in spans.values():
        assert sum(first <= instant < last for first, last in spans.values()) <= slots


def session(name, *, after=(), start_us=None, turn_after=()):
    turns = (Turn(0, ((1, 4),), (2, 1), name=f"{name}#0"), Turn(1, ((3, 4),), (4, 1), after=turn_after))
    return Session(name, turns, after=after, start_us=start_us)


def test_a_session_that_waits_takes_no_slot():
    order = list(requests_in_order([session("a", turn_after=("b",)), session("b", after=("a#0",)), session("c")], 1))
    assert [(s.session.session_id, s.turn.index) for s in order] == [
        ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("c", 0), ("c", 1),
    ]  # fmt: skip


def test_slots_that_all_wait_let_the_next_session_in():
    order = list(requests_in_order([session("a", turn_after=("b",)), session("b")], 1))
    assert len(order) == 4


def test_what_waits_for_nothing_that_comes_is_sent_at_last():
    order = list(requests_in_order([session("a", after=("ghost",)), session("b")], 1))
    assert [s.session.session_id for s in order] == ["b", "b", "a", "a"]


def test_an_instant_holds_even_when_what_was_waited_for_ended_before():
    order = list(requests_in_order([session("a"), session("b", after=("a",), start_us=10**9)], 1))
    assert order[2].at_us == 10**9


def test_no_slots_is_an_error():
    with pytest.raises(ValueError, match="at least 1 slot"):
        requests_in_order([], 0)
