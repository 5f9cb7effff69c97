"""RL figures: who waits for whom, by cases small enough to count by hand, and laws over random ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import finish_run
from reports.tests.rows_by_hand import MS, metrics_of, request, sample
from reports.tests.synthetic import header

S = 1_000 * MS


def rollout(number, step, replica, starts_s, ends_s, **changes):
    values = {
        "session": f"s{number}",
        "rollout_step": step,
        "replica": replica,
        "sent_us": int(starts_s * S),
        "first_token_us": int(starts_s * S) + 1,
        "last_token_us": int(ends_s * S),
        "end_us": int(ends_s * S),
        "output_tokens": 1,
    }
    return request(number, **(values | changes))


def test_a_replica_waits_from_its_last_token_to_the_steps():
    metrics = metrics_of([rollout(0, 0, "r0", 0, 10), rollout(1, 0, "r1", 0, 4), rollout(2, 0, "r2", 0, 9)])
    assert metrics["tail_idle_replica_s"] == 6 + 1


def test_a_replica_that_got_nothing_waits_for_the_whole_step():
    rows = [rollout(0, 0, "r0", 0, 10)]
    assert metrics_of(rows, replicas=["r0", "r1"])["tail_idle_replica_s"] == 10
    assert metrics_of(rows, [sample("r1")])["tail_idle_replica_s"] == 10


def test_work_on_another_step_is_not_idle():
    rows = [rollout(0, 0, "r0", 0, 10), rollout(1, 0, "r1", 0, 4), rollout(2, 1, "r1", 5, 8)]
    # r1 idles 4..5 and 8..10 in step 0; r0 has nothing of step 1 but is busy all along.
    assert metrics_of(rows)["tail_idle_replica_s"] == 3


def test_an_instant_in_two_tails_counts_once():
    rows = [
        rollout(0, 0, "r0", 0, 10),
        rollout(1, 1, "r0", 0, 10),
        rollout(2, 0, "r1", 0, 4),
        rollout(3, 1, "r1", 0, 4),
    ]
    assert metrics_of(rows)["tail_idle_replica_s"] == 6


def test_repeats_add_up_and_runs_without_steps_have_none():
    rows = [rollout(n, 0, f"r{n % 2}", 0, 10 - 5 * (n % 2), repeat=n // 2) for n in range(4)]
    assert metrics_of(rows)["tail_idle_replica_s"] == 10
    assert metrics_of([request()])["tail_idle_replica_s"] is None
    assert metrics_of([rollout(0, 0, None, 0, 1)])["tail_idle_replica_s"] is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=14
    )
)
def test_idle_time_agrees_with_counting_seconds(jobs):
    rows = [
        rollout(n, step, f"r{replica}", start, start + length) for n, (step, replica, start, length) in enumerate(jobs)
    ]
    counted = 0
    for replica in {replica for _, replica, _, _ in jobs}:
        for second in range(60):
            busy = any(r == replica and start <= second < start + length for _, r, start, length in jobs)
            waits = False
            for step in {step for step, _, _, _ in jobs}:
                members = [(r, start, start + length) for s, r, start, length in jobs if s == step]
                own = [end for r, _, end in members if r == replica]
                since = max(own) if own else min(start for _, start, _ in members)
                waits |= since <= second < max(end for _, _, end in members)
            counted += waits and not busy
    assert metrics_of(rows)["tail_idle_replica_s"] == counted


def test_the_spread_compares_the_medians_of_replicas():
    rows = [
        request(n, replica=f"r{n % 2}", first_token_us=0, last_token_us=(100 + 100 * (n % 2)) * MS, output_tokens=11)
        for n in range(6)
    ]
    assert metrics_of(rows)["tpot_replica_spread"] == 2
    assert metrics_of(rows[:1])["tpot_replica_spread"] is None


def test_a_group_completes_with_its_slowest_member():
    rows = [
        rollout(0, 0, "r0", 0, 10, group="g"),
        rollout(1, 0, "r1", 2, 25, group="g"),
        rollout(2, 0, "r1", 0, 7, group="h"),
        rollout(3, 1, "r1", 30, 31, group="g"),  # the same name in another step is another group
    ]
    found = metrics_of(rows)["group_completion_ms"]
    assert (found["count"], found["max"], found["p50"]) == (3, 25_000, 7_000)
    failed = [*rows[:3], rollout(3, 0, "r0", 0, 99, group="h", status="error")]
    assert metrics_of(failed)["group_completion_ms"]["count"] == 1
    assert metrics_of([rollout(0, 0, "r0", 0, 10)])["group_completion_ms"] is None


def test_equal_means_do_not_hide_one_late_replica(tmp_path):
    """Both arms have the same mean; in one, a replica is late by 2x: the groups tell, and they come first."""
    rows = []
    for router in ("even", "late"):
        for n in range(64):
            step, slow = n // 8, n % 8 == 7
            took = 10 if router == "even" else 20 if slow else 60 / 7
            start = step * 30
            row = rollout(n, step, f"r{n % 8}", start, start + took, group=f"g{step}-{n % 8 // 4}")
            rows.append(row | {"router": router, "request_id": f"{router}{n}"})
    run = finish_run(tmp_path, header(), rows, [], routers=["even", "late"])
    even, late = run.routers["even"], run.routers["late"]
    assert even["e2e_ms"]["mean"] == pytest.approx(late["e2e_ms"]["mean"])
    assert (even["group_completion_ms"]["p90"], late["group_completion_ms"]["p90"]) == (10_000, 20_000)
    assert late["step_makespan_ms"]["p50"] == 2 * even["step_makespan_ms"]["p50"]
    assert late["tail_idle_replica_s"] > even["tail_idle_replica_s"] == 0
    rows_shown = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| ")][2:]
    heads = [line.split("|")[1].strip() for line in rows_shown]
    assert heads[:5] == [
        "Step makespan p50",
        "Step makespan max",
        "Group completion p50",
        "Group completion p90",
        "Group completion max",
    ]
    assert run.verdict["winners"]["step_makespan_ms.p50"]["winner"] == "even"
