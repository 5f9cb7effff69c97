"""The drivers in a real Locust process: the same schedule as in the simulation, on a real clock."""

from collections import Counter
from itertools import islice

import pytest

from harness.arrivals import arrivals_us
from harness.drive import Drive, Stage
from harness.planned import ARRIVALS
from harness.tests.load_process import SMALL, drawn, run
from harness.tests.sse_server import DONE, END, HEAD, completion, event, honest, http_chunk, usage
from workloads import Streams

SLACK_US = 60_000
"""Loose: two busy cores wake a greenlet late."""


def turns_of(workload):
    return Counter(f"{s.session_id}-{t.index}" for s in drawn(workload) for t in s.turns)


@pytest.mark.parametrize("several", [(), ("--processes", "2", "--expect-workers", "2")], ids=["one", "two"])
def test_an_open_loop_sends_on_the_instants_of_its_plan_from_however_many_processes(tmp_path, several):
    """Answers take longer than the gaps, so a closed loop would fall behind."""
    workload = SMALL | {"sessions": 16, "turns": 1}
    drive = {"driver": "rate", "rate_per_s": 20.0, "concurrency": None}
    result, requests = run(tmp_path, lambda r: [300.0, *honest(r)], workload, *several, users=2, **drive)
    assert result.code == 0, result.output
    result.assert_accounted()
    assert Counter(r.headers["x-request-id"] for r in requests) == turns_of(workload)
    plan = list(islice(arrivals_us(Drive(**drive), Streams(7)[ARRIVALS]), 16))
    due = sorted(r["scheduled_us"] for r in result.rows)
    assert [t - due[0] for t in due] == [t - plan[0] for t in plan]
    late = sorted(r["sent_us"] - r["scheduled_us"] for r in result.rows)
    assert late[0] >= 0
    assert late[len(late) // 2] < SLACK_US
    assert {e["rank"] for e in result.events if e["event"] == "start"} == set(range(2 if several else 1))


def test_a_cap_on_requests_is_filled_by_turns_of_any_session(tmp_path):
    """Three slots; while sessions think for 400 ms, others are sent."""
    workload = SMALL | {"sessions": 9, "turns": 2, "think_time_ms": 400}
    result, _ = run(tmp_path, lambda r: [50.0, *honest(r)], workload, driver="requests")
    assert result.code == 0, result.output
    result.assert_accounted()
    rows = sorted(result.rows, key=lambda r: r["sent_us"])
    assert [r["turn"] for r in rows] == [0] * 9 + [1] * 9
    instants = sorted((i, d) for r in rows for i, d in ((r["sent_us"], 1), (r["end_us"], -1)))
    flying = [sum(d for _, d in instants[: k + 1]) for k in range(len(instants))]
    assert max(flying) == 3


def test_a_run_ends_with_its_drain_when_some_requests_are_never_answered(tmp_path):
    def some_never(request):
        return [60_000] if request.number % 5 == 4 else honest(request)

    workload = SMALL | {"sessions": 10, "turns": 2}
    result, _ = run(tmp_path, some_never, workload, driver="rate", rate_per_s=40.0, drain_s=0.8, concurrency=None)
    assert result.code == 0, result.output
    result.assert_accounted()
    assert len(result.rows) == 20
    cut = [r for r in result.rows if r["status"] == "cancelled" and r["sent_us"] is not None]
    assert cut
    assert {r["error"] for r in cut} == {"still in flight when the drain of 0.8 s was over"}
    last_start = max(r["scheduled_us"] for r in result.rows if r["turn"] == 0)
    for row in cut:
        assert row["end_us"] - last_start == pytest.approx(800_000, abs=300_000)


def test_every_stage_keeps_its_time_although_some_requests_are_never_answered(tmp_path):
    """What hangs in one stage neither holds back the next nor outlives the drain; all of it is counted."""

    def hangs_at_times(request):
        return [60_000] if request.number % 30 == 15 else honest(request)

    rates = (5.0, 10.0, 20.0, 30.0)
    asked = {"driver": "rate", "arrival": "constant", "concurrency": None, "drain_s": 1.0}
    result, _ = run(
        tmp_path,
        hangs_at_times,
        SMALL | {"sessions": 80, "turns": 1},
        **asked,
        stages=tuple(Stage(rate_per_s=rate, duration_s=1.0) for rate in rates),
    )
    assert result.code == 0, result.output
    result.assert_accounted()
    assert len(result.rows) == sum(rates)
    begins = min(row["scheduled_us"] for row in result.rows)
    stage_of = [min(3, (row["scheduled_us"] - begins) // 1_000_000) for row in result.rows]
    assert [stage_of.count(n) for n in range(4)] == pytest.approx(rates, abs=1)
    cut = [row for row in result.rows if row["status"] == "cancelled"]
    assert len(cut) == 2
    assert {row["error"] for row in cut} == {"still in flight when the drain of 1 s was over"}
    late_us = 10_000_000  # loose: a busy machine wakes late, and what hangs would hang for a minute
    assert all(row["end_us"] < begins + 5_000_000 + late_us for row in result.rows)


def test_warm_up_is_tagged_and_measured_phases_follow(tmp_path):
    result, _ = run(
        tmp_path,
        honest,
        SMALL | {"sessions": 12, "turns": 1},
        driver="rate",
        arrival="constant",
        rate_per_s=20.0,
        warmup_s=0.3,
        concurrency=None,
    )
    rows = sorted(result.rows, key=lambda r: r["scheduled_us"])
    assert [r["phase"] for r in rows] == ["warmup"] * 6 + ["steady"] * 6


def test_new_weights_reset_every_engine_between_steps(tmp_path):
    """The server stands for the router and for both engines; one of the two engines refuses."""
    resets = []

    def script(request):
        if request.path == "/r1/reset_prefix_cache":
            resets.append(request.number)
            body = b'{"success": false}'
        elif request.path == "/r0/reset_prefix_cache":
            resets.append(request.number)
            body = b'{"success": true}'
        else:
            return honest(request)
        return [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]

    workload = {
        "kind": "rl-rollout",
        "steps": 3,
        "rollouts_per_step": 2,
        "turns": 2,
        "first_input_tokens": 20,
        "output_tokens": 3,
        "stragglers": 0,
        "weight_sync_every_steps": 1,
    }
    result, requests = run(tmp_path, script, workload, replicas=lambda url: {"r0": f"{url}/r0", "r1": f"{url}/r1"})
    assert result.code == 0, result.output
    result.assert_accounted()
    syncs = [e for e in result.events if e["event"] == "weight_sync"]
    assert [(e["step"], e["done"], e["refused"], e["failed"]) for e in syncs] == [(0, 1, 1, 0), (1, 1, 1, 0)]
    kinds = ["reset" if "reset" in r.path else "turn" for r in requests]
    assert kinds == ["turn"] * 4 + ["reset"] * 2 + ["turn"] * 4 + ["reset"] * 2 + ["turn"] * 4


TOKEN = http_chunk(event(completion(" a")))


@pytest.mark.parametrize("end", ["itself", "SIGINT"])
def test_every_request_is_accounted_for_across_processes_whatever_happens_to_it(tmp_path, end):
    """5 % of sockets are closed, 1 % of requests never answered, in two load processes, also when interrupted."""

    def unreliable(request):
        if request.number % 100 == 50:
            return [60_000]
        if request.number % 20 == 7:
            return [None] if request.number % 40 == 7 else [HEAD, TOKEN, None]
        if request.number % 20 == 13:
            return [HEAD, TOKEN, http_chunk(event(usage(40, 1))), http_chunk(DONE) + END]
        return [5.0, *honest(request)]

    workload = SMALL | {"sessions": 150 if end == "itself" else 100_000, "turns": 2}
    result, requests = run(
        tmp_path,
        unreliable,
        workload,
        "--processes",
        "2",
        "--expect-workers",
        "2",
        concurrency=8,
        request_timeout_s=1.0,
        interrupt_after=150 if end == "SIGINT" else None,
    )
    result.assert_accounted()
    sent = [r for r in result.rows if r["sent_us"] is not None]
    assert len({r["request_id"] for r in sent}) == len(sent)
    reached = Counter(r.headers["x-request-id"] for r in requests)
    assert max(reached.values()) == 1
    assert set(reached) <= {r["request_id"] for r in sent}
    classes = Counter(r["error_class"] for r in sent)
    assert classes["router"] > 0
    assert classes["truncated"] > 0
    assert classes["answer"] > 0
    if end == "itself":
        assert Counter(r["request_id"] for r in result.rows) == turns_of(workload)
        assert classes["timeout"] >= 1
        assert "cancelled" not in {r["status"] for r in sent}
    else:
        assert {e["rank"] for e in result.events if e["event"] == "start"} == {0, 1}
        assert len(result.ends) == 2
