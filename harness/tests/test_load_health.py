"""What a run says of its own load: too slow, not what Little's law gives, or less than was asked for."""

import pytest

from harness.drive import Drive, Stage
from harness.load_health import little, load_notes, slowest_rate, stage_rates
from harness.sim import Simulation
from harness.tests.arms import arm, small


def row(at, *, lag=0, took=100_000, status="ok", phase="steady"):
    sent = at + lag
    return {
        "scheduled_us": at,
        "sent_us": sent,
        "last_token_us": sent + took,
        "end_us": sent + took,
        "status": status,
        "phase": phase,
    }


OPEN = {"driver": "rate", "concurrency": None, "rate_per_s": 10.0, "ramp_s": 0.0}


def test_a_plan_that_was_kept_was_sent_at_the_rate_that_was_asked():
    rows = [row(k * 100_000) for k in range(50)]
    ((name, rate, lag_ms),) = stage_rates(Drive(driver="rate", rate_per_s=10.0), rows)
    assert (name, lag_ms) == ("the load", 0)
    assert rate.share == 1
    assert rate.asked_per_s == pytest.approx(10, rel=0.03)


def test_sends_that_fall_behind_show_as_a_lower_rate():
    """Asked for 10 a second, sent at 5: each is later than the one before by 100 ms."""
    rows = [row(k * 100_000, lag=k * 100_000) for k in range(50)]
    arms = [(arm(small(load=OPEN)), rows)]
    assert slowest_rate(arms).share == pytest.approx(0.5)


def test_the_slowest_stage_is_the_one_that_counts():
    stages = (Stage(rate_per_s=10.0, duration_s=2.0), Stage(rate_per_s=50.0, duration_s=1.0))
    rows = [row(k * 100_000) for k in range(20)] + [row(2_000_000 + k * 20_000, lag=k * 40_000) for k in range(50)]
    drive = Drive(driver="rate", stages=stages)
    found = stage_rates(drive, rows)
    assert [rate.share for _, rate, _ in found] == [1, pytest.approx(1 / 3, abs=0.01)]
    assert [lag_ms for _, _, lag_ms in found] == [0, 1_960]


def test_a_closed_loop_has_no_rate_to_miss():
    assert slowest_rate([(arm(small()), [row(0), row(5, lag=10**6)])]) is None


def test_littles_law_is_exact_when_everything_is_measured():
    found = little([row(k * 30_000, took=70_000 + k * 100) for k in range(40)])
    assert found.share == 0
    assert found.failed == found.after_last == 0


def test_what_little_does_not_count_is_named():
    rows = [row(k * 30_000) for k in range(40)]
    rows += [row(k * 30_000 + 5, status="incomplete") for k in range(10)]
    (note,) = load_notes(arm(small()), rows, {})
    assert note.startswith("round-robin.0: 3.9 requests")
    assert "0.8 of them were requests that failed or were cut" in note


def test_streams_that_end_long_after_their_last_token_are_named():
    rows = [row(k * 30_000) | {"end_us": k * 30_000 + 150_000} for k in range(40)]
    (note,) = load_notes(arm(small()), rows, {})
    assert "waited for the end of the stream" in note


def test_warm_up_is_no_reason_to_doubt_a_run():
    rows = [row(k * 30_000) for k in range(40)] + [row(k * 30_000 + 5, phase="warmup") for k in range(10)]
    assert load_notes(arm(small()), rows, {}) == []


def test_a_simulated_run_keeps_littles_law():
    run = Simulation(arm(small(load=OPEN))).run()
    assert little(run.requests).share < 0.05
    assert load_notes(arm(small(load=OPEN)), run.requests, run.facts) == []


def test_a_cap_that_was_never_reached_is_said():
    scenario = small(load={"driver": "requests", "concurrency": 40})
    run = Simulation(arm(scenario)).run()
    (note,) = load_notes(arm(scenario), run.requests, run.facts)
    assert "40 requests in flight were asked for and 12 were reached" in note


def test_resets_that_engines_refused_are_said():
    (note,) = load_notes(arm(small()), [], {"weight_syncs": {"done": 2, "refused": 1, "failed": 0}})
    assert "1 of 3 cache resets" in note
