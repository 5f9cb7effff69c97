"""Sequence numbers: nothing is applied out of order, and nothing stays believed across a hole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers.stream import Apply, AskReplay, EventStream, Invalidate
from routers.wire import Batch


def batch(ts):
    return Batch(float(ts), (), 0)


def feed(stream, *numbers, start_ts=0):
    """Batches in this order, each stamped later than the one before."""
    effects = []
    for place, number in enumerate(numbers):
        effects.append(stream.receive(number, batch(start_ts + place)))
    return effects


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def test_batches_in_order_are_applied_one_by_one():
    stream = EventStream()
    assert [kinds(effects) for effects in feed(stream, 0, 1, 2)] == [["Apply"]] * 3
    assert stream.stats.batches == 3
    assert stream.stats.invalidations == 0


def test_a_hole_voids_the_belief_and_what_follows_counts_again():
    stream = EventStream()
    feed(stream, 0, 1)
    assert stream.receive(4, batch(9)) == [Invalidate("gap"), Apply(batch(9))]
    assert (stream.stats.gaps, stream.stats.missed) == (1, 2)
    assert kinds(stream.receive(5, batch(10))) == ["Apply"]


def test_a_late_joiner_has_nothing_to_void():
    stream = EventStream()
    assert kinds(stream.receive(40, batch(1))) == ["Apply"]
    assert (stream.stats.gaps, stream.stats.missed, stream.stats.invalidations) == (1, 40, 0)


def test_a_restart_at_zero_voids_the_belief():
    """Field case BL-08: same address, empty cache, no removal announced."""
    stream = EventStream()
    feed(stream, 0, 1, 2)
    assert stream.receive(0, batch(50)) == [Invalidate("restart"), Apply(batch(50))]
    assert stream.stats.restarts == 1
    assert kinds(stream.receive(1, batch(51))) == ["Apply"]


def test_a_restart_whose_first_batches_were_missed_is_seen_by_its_newer_stamp():
    stream = EventStream()
    feed(stream, *range(10))
    assert stream.receive(3, batch(99)) == [Invalidate("restart"), Apply(batch(99))]
    assert stream.last == 3


def test_a_restart_right_after_the_first_batch_is_no_echo_of_it():
    stream = EventStream()
    stream.receive(0, batch(1))
    assert kinds(stream.receive(0, batch(2))) == ["Invalidate", "Apply"]


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_doubled_or_late_batch_is_dropped(number):
    stream = EventStream()
    feed(stream, *range(6))
    assert stream.receive(number, batch(number)) == []
    assert stream.stats.echoes == 1
    assert kinds(stream.receive(6, batch(9))) == ["Apply"]


def test_a_batch_that_cannot_be_read_voids_the_belief_but_not_the_order():
    stream = EventStream()
    feed(stream, 0)
    assert stream.receive(1, None) == [Invalidate("undecodable")]
    assert kinds(stream.receive(2, batch(3))) == ["Apply"]
    assert stream.stats.undecodable == 1


def test_with_replay_a_hole_is_asked_for_and_filled_in_order():
    stream = EventStream(replay=True)
    feed(stream, 0, 1)
    assert stream.receive(4, batch(4)) == [AskReplay(2)]
    assert stream.receive(5, batch(5)) == []  # waits behind the hole
    assert stream.catching_up
    effects = stream.replayed([(2, batch(2)), (3, batch(3)), (4, batch(4)), (5, batch(5))])
    assert effects == [Apply(batch(ts)) for ts in (2, 3, 4, 5)]
    assert (stream.stats.replayed, stream.stats.missed, stream.stats.invalidations) == (2, 0, 0)


def test_a_late_joiner_with_replay_asks_from_the_beginning():
    stream = EventStream(replay=True)
    assert stream.receive(2, batch(2)) == [AskReplay(0)]
    assert stream.replayed([(0, batch(0)), (1, batch(1))]) == [Apply(batch(ts)) for ts in (0, 1, 2)]


def test_a_replay_that_does_not_reach_back_voids_the_belief():
    stream = EventStream(replay=True)
    feed(stream, 0, 1)
    stream.receive(9, batch(9))
    effects = stream.replayed([(6, batch(6)), (7, batch(7)), (8, batch(8))])
    assert effects == [Invalidate("gap"), *(Apply(batch(ts)) for ts in (6, 7, 8, 9))]
    assert stream.stats.missed == 4


def test_a_replay_without_an_answer_is_a_hole():
    stream = EventStream(replay=True)
    feed(stream, 0)
    stream.receive(3, batch(3))
    assert stream.replayed([]) == [Invalidate("gap"), Apply(batch(3))]


def test_a_restart_in_the_middle_of_a_replay_is_still_a_restart():
    stream = EventStream(replay=True)
    feed(stream, 0, 1)
    stream.receive(5, batch(5))
    stream.receive(0, batch(50))
    effects = stream.replayed([])
    assert Invalidate("restart") in effects
    assert effects[-1] == Apply(batch(50))


def test_a_replay_that_nobody_asked_for_is_no_news():
    assert EventStream().replayed([(0, batch(0))]) == []


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 3), max_size=40), st.booleans(), st.integers(0, 30))
def test_what_is_applied_is_a_run_without_holes_since_the_last_time_belief_was_void(drops, replay, buffer):
    """Drop batches at will; the replica replays what is still in its buffer."""
    stream = EventStream(replay=replay)
    run, published, live = [], [], 0
    for number, drop in enumerate(drops):
        published.append((number, batch(number)))
        if drop == 0:
            continue
        live += 1
        pending = stream.receive(number, batch(number))
        while pending:
            effect = pending.pop(0)
            if isinstance(effect, AskReplay):
                kept = published[-buffer:] if buffer else []
                pending += stream.replayed([pair for pair in kept if pair[0] >= effect.start])
            elif isinstance(effect, Invalidate):
                run = []
            else:
                run.append(effect.batch.ts)
    assert run == list(range(int(run[0]), int(run[0]) + len(run))) if run else not live
    assert not stream.catching_up


def test_a_lost_connection_voids_the_belief_at_once_and_what_follows_counts_from_nothing():
    stream = EventStream()
    feed(stream, 0, 1, 2)
    assert stream.disconnected() == [Invalidate("disconnect")]
    assert kinds(stream.receive(3, batch(9))) == ["Apply"]
    assert (stream.stats.disconnects, stream.stats.restarts) == (1, 0)
    assert stream.stats.invalidated == {"disconnect": 1}


def test_a_restart_behind_a_lost_connection_is_told_from_a_mere_loss_and_voids_nothing_twice():
    stream = EventStream()
    feed(stream, 0, 1, 2)
    stream.disconnected()
    assert kinds(stream.receive(0, batch(1))) == ["Apply"]  # its clock may even have gone back
    assert kinds(stream.receive(1, batch(2))) == ["Apply"]
    assert (stream.stats.restarts, stream.stats.invalidations) == (1, 1)


def test_with_replay_everything_is_asked_for_again_after_a_lost_connection():
    stream = EventStream(replay=True)
    feed(stream, 0, 1, 2)
    stream.disconnected()
    assert stream.receive(5, batch(9)) == [AskReplay(0)]
    assert kinds(stream.replayed([(n, batch(n)) for n in range(5)])) == ["Apply"] * 6


def test_a_connection_that_is_lost_during_a_replay_makes_its_answer_old_news():
    stream = EventStream(replay=True)
    feed(stream, 0, 4)
    assert stream.catching_up
    stream.disconnected()
    assert stream.replayed([(1, batch(1))]) == []


def test_a_connection_lost_before_anything_was_heard_has_nothing_to_void():
    stream = EventStream()
    assert stream.disconnected() == []
    assert (stream.stats.disconnects, stream.stats.invalidations) == (1, 0)


def test_a_stream_that_heeds_nothing_applies_whatever_comes_and_voids_nothing():
    """Field case BL-08, the flawed consumer."""
    stream = EventStream(heed=False)
    assert [kinds(effects) for effects in feed(stream, 0, 1, 7, 0, 1)] == [["Apply"]] * 5
    assert stream.disconnected() == []
    assert (stream.stats.invalidations, stream.stats.restarts, stream.stats.gaps) == (0, 0, 0)
