"""Slots: sessions are handed out once and in order, and a barrier holds back the next rollout step."""

from harness.slots import Slots
from workloads import Streams, make_workload


def rollouts(barrier: bool) -> Slots:
    return Slots(
        make_workload(
            {"kind": "rl-rollout", "rollouts_per_step": 2, "stragglers": 1, "turns": 1, "steps": 2, "barrier": barrier}
        ),
        Streams(1),
    )


def test_every_session_is_handed_out_once_and_in_order():
    workload = make_workload({"kind": "multi-turn", "sessions": 5, "turns": 1})
    slots = Slots(workload, Streams(1))
    taken = [slots.take(0) for _ in range(6)]
    assert [s.session_id for s in taken if s] == [s.session_id for s in workload.sessions(Streams(1))]
    assert taken[5] is None


def test_a_barrier_holds_the_next_step_until_the_last_rollout_has_ended():
    slots = rollouts(barrier=True)
    first, second = slots.take(0), slots.take(1)
    assert slots.take(2) is None
    assert first.rollout_step == second.rollout_step == 0
    assert slots.ended(first) == []
    assert slots.take(0) is None
    assert sorted(slots.ended(second)) == [0, 2]
    assert slots.take(1).rollout_step == 1


def test_without_a_barrier_steps_stream():
    slots = rollouts(barrier=False)
    assert [slots.take(i).rollout_step for i in range(4)] == [0, 0, 1, 1]
