"""The fault plan alone: what it hits is seeded, as frequent as asked, and independent of other faults."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError
from mock_engine.faults import OFF, SHARES, UNHARMED, FaultPlan, Faults, RequestFault, parse_faults

STORED = BlockStored(
    block_hashes=(b"a" * 32, b"b" * 32), parent_block_hash=b"p" * 32, token_ids=[1] * 32, block_size=16
)
EVENTS = (BlockRemoved(block_hashes=(b"x" * 32,)), STORED, AllBlocksCleared())


def requests(plan: FaultPlan, count: int) -> list[RequestFault]:
    return [plan.request() for _ in range(count)]


def test_without_faults_nothing_is_harmed_and_nothing_is_drawn() -> None:
    plan = FaultPlan()
    assert requests(plan, 3) == [UNHARMED] * 3
    assert plan.batch(0, EVENTS, 0).events is EVENTS
    assert not plan._streams


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(SHARES)), st.floats(0.05, 0.95), st.text(max_size=5))
def test_a_share_is_what_happens(name: str, share: float, seed: str) -> None:
    plan = FaultPlan(OFF.changed({name: share}), seed)
    if name.startswith("event_"):
        found = [plan.batch(0, EVENTS, 0) for _ in range(2000)]
        hits = sum(
            bool(batch.lost or batch.copies > 1 or batch.swap_us is not None or batch.wrong_parents) for batch in found
        )
    else:
        hits = sum(request != UNHARMED for request in requests(plan, 2000))
    assert abs(hits / 2000 - share) < 0.06


def test_the_same_seed_hits_the_same_requests_and_another_seed_others() -> None:
    faults = Faults(http_500=0.2, http_503=0.1, stall=0.3, cut=0.3)
    first = requests(FaultPlan(faults, "a"), 200)
    assert requests(FaultPlan(faults, "a"), 200) == first
    assert requests(FaultPlan(faults, "b"), 200) != first


def test_switching_one_fault_on_does_not_move_another() -> None:
    alone = [found.stall_after for found in requests(FaultPlan(Faults(stall=0.3), "a"), 100)]
    both = [found.stall_after for found in requests(FaultPlan(Faults(stall=0.3, cut=0.5, http_429=0.2), "a"), 100)]
    assert both == alone


def test_ranks_draw_apart() -> None:
    plan, other = FaultPlan(Faults(event_drop=0.5), "a"), FaultPlan(Faults(event_drop=0.5), "a")
    alone = [plan.batch(0, EVENTS, 0).lost for _ in range(50)]
    mixed = []
    for _ in range(50):
        other.batch(1, EVENTS, 0)
        mixed.append(other.batch(0, EVENTS, 0).lost)
    assert mixed == alone


def test_statuses_share_one_draw() -> None:
    found = [request.status for request in requests(FaultPlan(Faults(http_500=0.3, http_503=0.3, http_429=0.4)), 300)]
    assert None not in found
    assert {500, 503, 429} == set(found)


@pytest.mark.parametrize("action", ["crash", "restart", "refuse"])
def test_a_trigger_goes_off_once_as_its_request_arrives(action: str) -> None:
    plan = FaultPlan(OFF.changed({f"{action}_after_requests": 3}))
    assert [found.then for found in requests(plan, 6)] == [(), (), (action,), (), (), ()]
    assert plan.faults == OFF


def test_a_trigger_counts_on_when_another_fault_is_set_and_anew_when_it_is_set_again() -> None:
    plan = FaultPlan(Faults(restart_after_requests=3))
    requests(plan, 2)
    assert plan.set(plan.faults.changed({"stall": 0.5})) == ()
    assert plan.request().then == ("restart",)
    plan.set(plan.faults.changed({"restart_after_requests": 3}))
    assert [found.then for found in requests(plan, 3)] == [(), (), ("restart",)]


def test_a_trigger_of_0_goes_off_at_once_and_is_over() -> None:
    plan = FaultPlan()
    assert plan.set(Faults(crash_after_requests=0, refuse_after_requests=0)) == ("refuse", "crash")
    assert plan.faults == OFF
    assert FaultPlan(Faults(crash_after_requests=0)).at_start == ("crash",)


def test_a_wrong_parent_is_of_the_right_kind_and_only_stored_events_have_one() -> None:
    plan = FaultPlan(Faults(event_wrong_parent=1.0))
    found = plan.batch(0, EVENTS, 0)
    removed, stored, cleared = found.events
    assert (removed, cleared, found.wrong_parents) == (EVENTS[0], EVENTS[2], 1)
    assert isinstance(stored, BlockStored)
    assert isinstance(stored.parent_block_hash, bytes)
    assert len(stored.parent_block_hash) == 32
    assert stored.parent_block_hash != STORED.parent_block_hash
    assert msgspec.structs.replace(stored, parent_block_hash=STORED.parent_block_hash) == STORED


def test_a_late_publisher_loses_what_comes_before_it_begins() -> None:
    plan = FaultPlan(Faults(event_late_ms=5))
    assert [plan.batch(0, EVENTS, at_us).lost for at_us in (0, 4999, 5000)] == ["event_late_ms", "event_late_ms", None]


def test_flags_name_faults_with_dashes_or_underscores() -> None:
    faults = parse_faults(["http-500=0.25", "refuse_ms=7", "crash-after-requests=4"])
    assert faults.active() == {"refuse_ms": 7, "crash_after_requests": 4, "http_500": 0.25}
    assert parse_faults([]) == OFF


def test_null_puts_a_fault_back() -> None:
    faults = Faults(stall=0.5, stall_after_tokens=9, crash_after_requests=4)
    assert faults.changed({"stall": None, "stall_after_tokens": None, "crash_after_requests": None}) == OFF


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("stal=1", "choose from slow_start_ms"),
        ("stall=2", "a number from 0 to 1"),
        ("stall=lots", "write stall=0.1"),
        ("stall", "write stall=0.1"),
        ("refuse_ms=1.5", "write refuse_ms=100"),
        ("refuse_ms=-1", "give 0 or more"),
        ("crash_after_requests=", "a whole number"),
    ],
)
def test_a_fault_that_cannot_be_is_named_with_its_mend(text: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        parse_faults([text])


def test_statuses_may_not_be_more_than_all() -> None:
    with pytest.raises(ConfigError, match=r"add up to 1\.2"):
        parse_faults(["http_500=0.6", "http_503=0.6"])
