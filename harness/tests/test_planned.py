"""Planning ends, whatever a scenario says: the plan's bounds, and what is told of a plan before any answer."""

import json

import pytest

from harness import planned as planning
from harness.drive import Drive, Stage
from harness.errors import UsageError
from harness.mode_check import require_live, require_simulable
from harness.planned import extent_of, planned, require_an_end, require_enough
from harness.scenario import check_scenario, load_scenario
from workloads import Session, Streams, Turn, make_workload

CHAT = {"kind": "multi-turn", "sessions": 10, "turns": 3, "think_time_ms": 1000.0}


def plan(table, **drive):
    return planned(make_workload(table), Drive(**drive), Streams(1))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("workload.sessions=10000000", "sessions = 10000000: at most 1,000,000"),
        ("workload.turns=10000000", "turns = 10000000: at most 10,000"),
        ("workload.think_time_ms=1e15", "at most 1,000,000,000 ms"),
        ("workload.think_time_ms=1e9", "a run of 4 replicas can follow at most 125,000 s"),
        ("workload.think_time_ms=nan", "give a finite number"),
        ("workload.output_tokens=9000000", "engine.max_model_len"),
        ("load.concurrency=1000000000", "no workload has more than 1,000,000 sessions"),
        ("repeats=1000000000", "from 1 to 1000"),
        ("slo.ttft_ms=nan", "a bound is a time above 0 ms"),
    ],
)
def test_a_slip_of_the_pen_is_refused_before_anything_starts(override, said):
    with pytest.raises(UsageError) as caught:
        load_scenario("quickstart", overrides=[override])
    assert said in str(caught.value)


def test_a_plan_ends_at_the_most_requests_that_an_arm_can_hold(monkeypatch):
    monkeypatch.setattr(planning, "REQUESTS_MAX", 30)
    assert len(list(plan(CHAT))) == 10
    with pytest.raises(UsageError, match="more than 30 requests, the most that one arm can hold: ask for fewer"):
        list(plan(CHAT | {"sessions": 11}))


def test_a_plan_ends_at_the_most_text_that_can_be_drawn_in_time(monkeypatch):
    monkeypatch.setattr(planning, "SPANS_MAX", 800)
    with pytest.raises(UsageError, match="more than 800 pieces of text"):
        list(plan({"kind": "rag", "requests": 101, "chunks_per_request": 6}))


def test_a_trace_that_is_too_long_is_to_be_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "REQUESTS_MAX", 2)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"input_length": 9, "output_length": 1}) + "\n" for _ in range(3)))
    with pytest.raises(UsageError, match="give sample or max_sessions"):
        list(plan({"kind": "trace", "path": str(path)}))


def test_stages_that_start_sessions_without_end_are_refused_like_all_others():
    drive = Drive(driver="rate", stages=(Stage(rate_per_s=1e9, duration_s=1e9),))
    with pytest.raises(UsageError, match="the stages start more than 1000000 sessions and the workload has 3"):
        require_enough(drive, 3, Streams(1))


def test_pauses_and_instants_take_their_time_whatever_the_answers_do():
    assert extent_of(plan(CHAT), slots=2).shortest_us == 10_000_000
    assert extent_of(plan(CHAT), slots=None).shortest_us == 2_000_000
    spread = plan(CHAT, driver="rate", rate_per_s=0.1, arrival="constant")
    assert extent_of(spread, slots=None).shortest_us == 92_000_000


def test_a_load_whose_pauses_alone_fill_the_memory_is_refused():
    extent = extent_of(plan(CHAT), slots=2)
    require_an_end(extent, 4)
    with pytest.raises(UsageError, match="take 10 s, and a run of 60000 replicas can follow at most 8 s"):
        require_an_end(extent, 60_000)


def test_the_longest_context_may_lie_before_a_restart():
    turns = (Turn(0, ((1, 100),), (2, 10)), Turn(1, ((3, 5),), (4, 1), restart=True, front=(5, 1)))
    session = Session("s", turns)
    assert extent_of([planning.Planned(0, session, None)], None).longest_tokens == 110


def test_more_live_slots_than_ports_are_for_virtual_time():
    many = load_scenario("quickstart", overrides=["load.concurrency=100000"])
    with pytest.raises(UsageError, match="at most 25,000 connections fit between two live processes"):
        require_live(many)
    require_simulable(many)


@pytest.fixture
def timed(tmp_path):
    """A scenario whose sessions all start at instants of their own."""
    rows = ({"timestamp": 100 * i, "input_length": 64, "output_length": 4, "hash_ids": [i]} for i in range(5))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    trace = {"kind": "trace", "path": str(tmp_path / "trace.jsonl")}
    return lambda load, **keys: check_scenario(
        {"name": "timed", "routers": ["random"], "workload": {**trace, **keys}, "load": load}, "timed"
    )


def test_sessions_with_instants_of_their_own_are_an_open_loop_unless_slots_are_asked_for(timed):
    load = timed({}).load
    assert (load.driver, load.arrival, load.concurrency) == ("rate", "trace", None)
    assert load.describe() == "an open loop (trace): sessions at instants of their own"
    assert timed({"api": "chat"}).load.open_loop
    assert check_scenario(timed({}).resolved(), "again").load == load
    slots = timed({"concurrency": 3}, arrivals="slots").load
    assert (slots.driver, slots.slots) == ("sessions", 3)


@pytest.mark.parametrize("load", [{"driver": "sessions"}, {"concurrency": 4}, {"max_concurrency": 4}, {"ramp_s": 1.0}])
def test_slots_that_no_session_would_wait_for_are_refused(timed, load):
    with pytest.raises(UsageError, match="none would wait for a slot: leave driver, concurrency and ramp_s out"):
        timed(load)
