"""What a run says of its own load: too slow, not what Little's law gives, or less than was asked for."""

import pytest

from harness.load_health import inside, little, load_notes
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


def samples(counts, replicas=3):
    """Half-second samples of three engines that share what they hold."""
    return [
        {
            "t_us": at * 500_000 + 250_000,
            "replica": f"r{k}",
            "running": count // replicas + (k < count % replicas),
            "waiting": 0,
            "step_us_mean": 0.0,
        }
        for at, count in enumerate(counts)
        for k in range(replicas)
    ]


def always(count, seconds=10):
    """So many slots, each of which sends a request of a second after the other."""
    return [row(second * 1_000_000, took=1_000_000) for second in range(seconds) for _ in range(count)]


def test_the_loads_own_count_is_held_against_its_rows():
    rows = always(4)
    assert little(rows, held_us=40_000_000).share == 0
    (note,) = load_notes(arm(small()), rows, {"held_us": 50_000_000})
    assert "5.0 requests were in flight on average, and those that succeeded account for 4.0" in note
    assert "1.0 of them waited in the load generator to be sent, or have no row" in note


def test_what_the_engines_do_not_have_is_on_the_way():
    (note,) = load_notes(arm(small()), always(20), {}, samples([14] * 20))
    assert "20.0 requests were in flight on average and the engines had 14.0 of them running or waiting" in note


def test_engines_that_have_more_work_for_others():
    (note,) = load_notes(arm(small()), always(20), {}, samples([24] * 20))
    assert "the engines had 24.0 running or waiting: somebody else uses them, too" in note


def test_a_request_that_ends_while_the_next_is_on_its_way_is_no_reason():
    assert load_notes(arm(small()), always(20), {}, samples([19, 20] * 10)) == []


def test_an_engine_that_gave_no_sample_at_an_instant_says_nothing_of_it():
    fleet = [
        sample for sample in samples([20] * 20) if sample["t_us"] % 1_000_000 > 500_000 or sample["replica"] != "r0"
    ]
    seen = inside(arm(small()), always(20), fleet)
    assert (seen.sent, seen.held) == ([20] * 10, [20] * 10)


def test_a_cap_before_the_engines_is_named_with_where_it_lies():
    """A client library that stops at 1,000 connections looks like an engine's plateau."""
    scenario = small(load={"concurrency": 1500})
    notes = load_notes(arm(scenario), always(1500), {}, samples([1000] * 20))
    assert any("capped at 1000: 1500 requests in flight were asked for and sent" in note for note in notes)


def test_short_requests_that_are_on_the_way_now_and_then_are_no_cap():
    scenario = small(load={"concurrency": 40})
    notes = load_notes(arm(scenario), always(40), {}, samples([24, 26, 28, 30, 38] * 4))
    assert not any("capped" in note for note in notes)


def test_in_virtual_time_the_kernels_count_and_the_engines_agree_with_the_rows():
    run = Simulation(arm(small())).run()
    found = little(run.requests, run.facts["held_us"])
    assert found.share < 0.05
    assert found.uncounted == 0
    seen = inside(arm(small()), run.requests, run.fleet)
    assert sum(seen.held) == pytest.approx(sum(seen.sent), rel=0.1)
