"""The schedule: who may send when. Played out here against answers of drawn lengths, without engine or socket."""

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.drive import Drive, Stage
from harness.errors import UsageError
from harness.planned import check_together, planned, require_enough, share_of
from harness.schedule import Schedule
from workloads import Session, Streams, Turn, make_workload

CHAT = {"kind": "multi-turn", "sessions": 12, "turns": {"dist": "uniform", "low": 1, "high": 4}, "think_time_ms": 30}
RL = {"kind": "rl-rollout", "steps": 4, "rollouts_per_step": 3, "turns": 2, "stragglers": 1}
AGENTS = {"kind": "agentic-coding", "sessions": 3, "turns": 4, "subagents": 2, "subagent_turns": 2, "tool_time_ms": 5}


class Played:
    """What happened when a schedule was followed to its end."""

    def __init__(self, workload, drive, *, seed=1, answer_us=None, fails=lambda s, t: False, rank=0, of=1):
        self.workload = make_workload(workload) if isinstance(workload, dict) else workload
        rng = random.Random(seed)
        answer_us = answer_us or (lambda session, turn: rng.randrange(1_000, 80_000))
        plan = share_of(planned(self.workload, drive, Streams(seed)), rank, of)
        schedule = Schedule(self.workload, drive, plan)
        schedule.open_slots()
        self.sent, self.ended, self.cuts, self.syncs = [], {}, [], []
        self.in_flight_peak = 0
        running = []
        now = 0
        while not schedule.done:
            instants = [t for t in (schedule.next_us(), running[0][0] if running else None) if t is not None]
            assert instants, "nothing will ever happen again"
            now = max(now, min(instants))
            while running and running[0][0] <= now:
                _, _, session, turn = heapq.heappop(running)
                ok = not fails(session, turn)
                self.ended[session.session_id, turn] = now
                schedule.ended(session, turn, now, ok=ok, why="it failed")
            for due in schedule.take(now):
                assert due.due_us <= now
                self.sent.append((now, due))
                heapq.heappush(running, (now + answer_us(due.session, due.turn), len(self.sent), due.session, due.turn))
            self.in_flight_peak = max(self.in_flight_peak, len(running))
            for step in schedule.syncs():
                self.syncs.append((now, step, len(running)))
                schedule.synced(now)
            if schedule.stopped:
                for _, _, session, turn in running:
                    schedule.ended(session, turn, now, ok=False, why="cancelled")
                self.cancelled, running = len(running), []
            self.cuts += schedule.cuts()
        self.end_us = now

    def sent_turns(self):
        return [(due.session.session_id, due.turn) for _, due in self.sent]


def turns_of(workload, seed=1):
    return Counter((s.session_id, t.index) for s in make_workload(workload).sessions(Streams(seed)) for t in s.turns)


DRIVES = {
    "sessions": Drive(concurrency=3, ramp_s=0.2),
    "requests": Drive(driver="requests", concurrency=3),
    "rate": Drive(driver="rate", rate_per_s=40.0),
    "capped rate": Drive(driver="rate", rate_per_s=200.0, concurrency=2),
}


@pytest.mark.parametrize("drive", DRIVES.values(), ids=DRIVES)
@pytest.mark.parametrize("workload", [CHAT, RL, AGENTS], ids=["chat", "rl", "agents"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_every_turn_is_sent_exactly_once_and_after_the_one_before(workload, drive, seed):
    played = Played(workload, drive, seed=seed)
    assert Counter(played.sent_turns()) == turns_of(workload, seed)
    sent = {(d.session.session_id, d.turn): at for at, d in played.sent}
    for _, due in played.sent:
        session, turn = due.session, due.session.turns[due.turn]
        if due.turn:
            assert sent[session.session_id, due.turn] >= played.ended[session.session_id, due.turn - 1] + turn.think_us
    assert not played.cuts


@pytest.mark.parametrize("drive", DRIVES.values(), ids=DRIVES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1))
def test_whatever_fails_every_turn_is_sent_or_listed_as_cut(drive, seed, share):
    """AGENTS has sessions that wait for turns of others, so a failure can cut what never began."""
    chance = random.Random(seed)
    failing = {key for key in turns_of(AGENTS, seed) if chance.random() < share}
    played = Played(AGENTS, drive, seed=seed, fails=lambda s, t: (s.session_id, t) in failing)
    listed = [(cut.session.session_id, turn.index) for cut in played.cuts for turn in cut.session.turns[cut.turn :]]
    assert Counter(played.sent_turns()) + Counter(listed) == turns_of(AGENTS, seed)


def test_sessions_hold_their_slot_through_think_times():
    played = Played(CHAT, Drive(concurrency=2))
    opens = {d.session.session_id: at for at, d in played.sent if d.turn == 0}
    last = {s: max(at for (name, _), at in played.ended.items() if name == s) for s in opens}
    for session, at in opens.items():
        assert sum(opens[o] <= at < last[o] for o in opens if o != session) <= 1
    assert played.in_flight_peak <= 2


def test_a_request_cap_is_filled_by_turns_of_any_session():
    """Think times are long beside answers: slots of the sessions driver stand empty, a cap on requests does not."""
    slow = CHAT | {"turns": 3, "think_time_ms": 500}
    held = Played(slow, Drive(concurrency=2), answer_us=lambda s, t: 10_000)
    filled = Played(slow, Drive(driver="requests", concurrency=2), answer_us=lambda s, t: 10_000)
    assert filled.in_flight_peak == 2
    assert filled.end_us < held.end_us / 3
    assert [d.due_us for _, d in filled.sent] == [at for at, _ in filled.sent]


def test_an_open_loop_does_not_wait_for_answers():
    slow = Played(CHAT | {"turns": 1}, Drive(driver="rate", rate_per_s=10.0), answer_us=lambda s, t: 10_000_000)
    fast = Played(CHAT | {"turns": 1}, Drive(driver="rate", rate_per_s=10.0), answer_us=lambda s, t: 10)
    assert [at for at, _ in slow.sent] == [at for at, _ in fast.sent]
    assert slow.in_flight_peak == 12


def test_a_cap_on_an_open_loop_shows_as_lag_and_leaves_the_plan_as_it_was():
    one = CHAT | {"turns": 1}
    free = Played(one, Drive(driver="rate", rate_per_s=100.0), answer_us=lambda s, t: 100_000)
    capped = Played(one, Drive(driver="rate", rate_per_s=100.0, concurrency=1), answer_us=lambda s, t: 100_000)
    assert [d.due_us for _, d in capped.sent] == [d.due_us for _, d in free.sent]
    assert capped.in_flight_peak == 1
    assert max(at - d.due_us for at, d in capped.sent) > 500_000


def test_no_stage_starts_before_all_of_the_one_before_was_sent():
    """The first stage asks for four times what the cap lets through, so it is still being sent in the second's time."""
    stages = (Stage(rate_per_s=40.0, duration_s=0.5), Stage(rate_per_s=20.0, duration_s=0.5))
    drive = Drive(driver="rate", arrival="constant", stages=stages, concurrency=1)
    played = Played(CHAT | {"turns": 1, "sessions": 40}, drive, answer_us=lambda s, t: 100_000)
    of_first = [at for at, due in played.sent if due.due_us < 500_000]
    of_second = [at for at, due in played.sent if due.due_us >= 500_000]
    assert (len(of_first), len(of_second)) == (20, 10)
    assert max(of_first) > 500_000
    assert max(of_first) < min(of_second)


def test_warm_up_is_the_first_sessions_or_the_first_seconds():
    by_count = Played(CHAT, Drive(concurrency=3, warmup_sessions=4))
    warm = {d.session.session_id for _, d in by_count.sent if d.phase == "warmup"}
    assert warm == {s.session_id for s in list(make_workload(CHAT).sessions(Streams(1)))[:4]}
    by_time = Played(CHAT, Drive(driver="rate", rate_per_s=20.0, warmup_s=0.3))
    assert all((d.phase == "warmup") == (d.due_us < 300_000) for _, d in by_time.sent)
    assert {d.phase for _, d in by_time.sent} == {"warmup", "steady"}


def test_a_ramp_is_warm_up():
    played = Played(CHAT, Drive(concurrency=4, ramp_s=0.4))
    assert all((d.phase == "warmup") == (d.due_us < 400_000) for _, d in played.sent)
    assert {d.phase for _, d in played.sent} == {"warmup", "steady"}


def test_under_a_cap_a_request_says_since_when_it_could_have_gone():
    """Twelve single turns, a cap of four, a second each: the last four wait two seconds for a place."""
    one = CHAT | {"turns": 1}
    played = Played(one, Drive(driver="requests", concurrency=4), answer_us=lambda s, t: 1_000_000)
    waits = [at - due.ready_us for at, due in played.sent]
    assert waits == [0] * 4 + [1_000_000] * 4 + [2_000_000] * 4
    assert all(at == due.due_us for at, due in played.sent)


def test_the_drain_ends_a_run_and_lists_what_it_cut():
    """The last of 12 sessions starts within 0.6 s at 20 a second; nothing is answered, so the drain decides."""
    drive = Drive(driver="rate", rate_per_s=20.0, arrival="constant", drain_s=2.0)
    played = Played(CHAT | {"turns": 3}, drive, answer_us=lambda s, t: 10**9)
    assert played.end_us == 550_000 + 2_000_000
    assert played.cancelled == 12
    assert sum(len(cut.session.turns) - cut.turn for cut in played.cuts) == 24


def test_stages_start_what_their_rates_say_and_need_as_many_sessions():
    drive = Drive(driver="rate", arrival="constant", stages=(Stage(rate_per_s=10.0, duration_s=0.5),))
    assert len(Played(CHAT | {"turns": 1}, drive).sent) == 5
    with pytest.raises(UsageError, match="the stages start 5 sessions and the workload has 3"):
        require_enough(drive, 3, Streams(1))


def test_a_barrier_holds_the_next_step_until_the_last_rollout_has_ended():
    played = Played(RL | {"barrier": True}, Drive(concurrency=5))
    for step in range(1, 4):
        begins = min(at for at, d in played.sent if d.session.rollout_step == step)
        before = {d.session.session_id for _, d in played.sent if d.session.rollout_step == step - 1}
        assert begins >= max(at for (name, _), at in played.ended.items() if name in before)


@pytest.mark.parametrize("driver", ["sessions", "requests"])
def test_new_weights_wait_until_nothing_runs_and_hold_back_later_steps(driver):
    played = Played(RL | {"weight_sync_every_steps": 2}, Drive(driver=driver, concurrency=5))
    assert [(step, running) for _, step, running in played.syncs] == [(1, 0)]
    synced = played.syncs[0][0]
    for at, due in played.sent:
        assert (at >= synced) == (due.session.rollout_step > 1)


def test_new_weights_at_once_come_while_later_steps_run():
    played = Played(RL | {"weight_sync_every_steps": 1}, Drive(concurrency=3, weight_sync="at-once"))
    assert [step for _, step, _ in played.syncs] == [0, 1, 2]
    assert all(running for _, _, running in played.syncs)


class Trace:
    """Sessions given one by one."""

    kind, barrier = "test", False

    def __init__(self, *sessions):
        self._sessions = sessions

    def sessions(self, streams):
        return iter(self._sessions)

    def syncs_after_step(self, step):
        return False


def one(name, **keys):
    return Session(session_id=name, turns=(Turn(0, ((1, 5),), (2, 5)),), **keys)


def test_sessions_with_an_instant_of_their_own_keep_it_in_every_driver():
    trace = Trace(one("a", start_us=0), one("b", start_us=70_000), one("c", start_us=70_000))
    for drive in (Drive(driver="rate", arrival="trace"), Drive(concurrency=1), Drive(driver="requests", concurrency=9)):
        assert [at for at, _ in Played(trace, drive, answer_us=lambda s, t: 10**6).sent] == [0, 70_000, 70_000]


def test_a_session_waits_for_what_it_names_and_for_nothing_that_never_comes():
    trace = Trace(one("a"), one("b", after=("a",)), one("c", after=("nobody",)))
    played = Played(trace, Drive(concurrency=1), answer_us=lambda s, t: 50_000)
    assert [(d.session.session_id, at) for at, d in played.sent] == [("a", 0), ("b", 50_000), ("c", 100_000)]


@pytest.mark.parametrize("workload", [CHAT, AGENTS], ids=["chat", "agents"])
@pytest.mark.parametrize("drive", [DRIVES["requests"], DRIVES["rate"]], ids=["requests", "rate"])
@pytest.mark.parametrize("of", [2, 5])
def test_several_processes_send_everything_once_on_the_instants_of_one(workload, drive, of):
    shares = [Played(workload, drive, rank=rank, of=of) for rank in range(of)]
    assert Counter(key for share in shares for key in share.sent_turns()) == turns_of(workload)
    if drive.open_loop:
        whole = {d.session.session_id: d.due_us for _, d in Played(workload, drive).sent if d.turn == 0}
        for share in shares:
            for _, due in share.sent:
                if due.turn == 0 and not due.session.after:
                    assert due.due_us == whole[due.session.session_id]


def test_sessions_that_wait_across_shares_are_refused():
    trace = Trace(one("a"), one("b"), one("c", after=("a", "b")))
    with pytest.raises(UsageError, match="other load processes send"):
        list(share_of(planned(trace, Drive(), Streams(1)), 0, 2))


@pytest.mark.parametrize(
    ("workload", "drive", "of", "says"),
    [
        (RL | {"barrier": True}, Drive(driver="rate", rate_per_s=1.0), 1, "barrier = false"),
        (RL | {"weight_sync_every_steps": 1}, Drive(driver="rate", rate_per_s=1.0), 1, "weight_sync = 'at-once'"),
        (RL | {"barrier": True}, Drive(), 2, "use one process"),
        (RL | {"weight_sync_every_steps": 1}, Drive(), 2, "use one process"),
    ],
)
def test_what_workload_and_driver_cannot_do_together_is_refused(workload, drive, of, says):
    with pytest.raises(UsageError, match=says):
        check_together(make_workload(workload), drive, of)


def test_an_open_loop_has_one_clock():
    with pytest.raises(UsageError, match="has none: write arrival = 'poisson'"):
        list(planned(Trace(one("a")), Drive(driver="rate", arrival="trace"), Streams(1)))
    with pytest.raises(UsageError, match="write arrival = 'trace'"):
        list(planned(Trace(one("a", start_us=5)), Drive(driver="rate", rate_per_s=1.0), Streams(1)))


def test_a_slot_that_is_taken_back_closes_when_it_is_free():
    schedule = Schedule(
        make_workload(CHAT), Drive(concurrency=2), planned(make_workload(CHAT), Drive(concurrency=2), Streams(1))
    )
    schedule.open_slots()
    first, second = schedule.take(0)
    schedule.close_slot()
    schedule.ended(first.session, 0, 10, ok=False)
    assert schedule.take(10) == []
    schedule.ended(second.session, 0, 20, ok=False)
    assert len(schedule.take(20)) == 1
