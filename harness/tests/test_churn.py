"""Replicas that come and go: what a list may say, and what becomes of requests in virtual time."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from harness.check_command import check_command
from harness.churn import ChurnEntry, absences, churn_events, churn_notes
from harness.errors import UsageError
from harness.mode_check import require_live
from harness.run import run_mode
from harness.scenario import check_scenario
from harness.sim import Simulation
from harness.tests.arms import arm, small
from harness.tests.test_sim import plain
from reports import read_run
from workloads import Streams

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = {
    "kind": "multi-turn",
    "sessions": 24,
    "turns": 3,
    "shared_system_prompts": 2,
    "system_prompt_tokens": 64,
    "first_input_tokens": 200,
    "input_tokens": 40,
    "output_tokens": 60,
    "think_time_ms": 300,
}
"""About three seconds on three replicas."""
ALL_OF_IT = [
    {"at_s": 0.4, "do": "add"},
    {"at_s": 0.6, "do": "drain", "replica": "r0"},
    {"at_s": 0.9, "do": "crash", "replica": "r1"},
    {"at_s": 1.2, "do": "restart", "replica": "r2"},
    {"at_s": 1.5, "do": "remove", "replica": "r1"},
    {"at_s": 1.7, "do": "add", "replica": "r0"},
    {"at_s": 2.0, "do": "remove", "replica": "r3", "limit_s": 0.1},
]


def run(churn, policy="least-requests", **tables):
    scenario = small(routers=[policy], workload=WORKLOAD, churn=churn, **tables)
    simulation = Simulation(arm(scenario))
    return simulation, simulation.run()


def deeds(entries, names=("r0", "r1", "r2")):
    found = churn_events([ChurnEntry(**entry) for entry in entries], names)
    return [(event.at_us / 1e6, event.do, event.replica) for event in found]


# ---- what a list may say ---------------------------------------------------------------------------------------------


def test_a_repeating_entry_is_written_out_and_each_time_it_is_another_replicas_turn():
    every = [{"every_s": 5, "until_s": 15, "do": "drain"}, {"every_s": 5, "until_s": 15, "do": "add"}]
    assert deeds(every) == [
        (5, "drain", "r0"),
        (5, "add", "r3"),
        (10, "drain", "r1"),
        (10, "add", "r4"),
        (15, "drain", "r2"),
        (15, "add", "r5"),
    ]
    assert deeds([{"at_s": 2, "every_s": 5, "until_s": 12, "do": "restart"}]) == [
        (2, "restart", "r0"),
        (7, "restart", "r1"),
        (12, "restart", "r2"),
    ]


def test_without_a_name_a_removal_means_the_crashed_one_first():
    assert deeds([{"at_s": 1, "do": "crash", "replica": "r2"}, {"at_s": 2, "do": "remove"}])[-1] == (2, "remove", "r2")
    assert deeds([{"at_s": 2, "do": "remove"}])[-1] == (2, "remove", "r0")


def test_a_replica_may_come_back_once_it_is_gone():
    back = [{"at_s": 1, "do": "remove", "replica": "r0", "limit_s": 2}, {"at_s": 3.5, "do": "add", "replica": "r0"}]
    assert deeds(back)[-1] == (3.5, "add", "r0")
    assert deeds([{"at_s": 1, "do": "drain", "replica": "r0"}, {"at_s": 2, "do": "add", "replica": "r0"}])
    assert deeds([{"at_s": 1, "do": "crash", "replica": "r0"}, {"at_s": 2, "do": "add", "replica": "r0"}])


WRONG = {
    "no replica of that name: choose one of r0, r1, r2": [{"at_s": 1, "do": "drain", "replica": "r7"}],
    "it is there already": [{"at_s": 1, "do": "add", "replica": "r1"}],
    "it was removed before: choose one of r1, r2": [
        {"at_s": 1, "do": "remove", "replica": "r0"},
        {"at_s": 2, "do": "crash", "replica": "r0"},
    ],
    "its removal may last until 31 s": [
        {"at_s": 1, "do": "remove", "replica": "r0"},
        {"at_s": 9, "do": "add", "replica": "r0"},
    ],
    "it drains already": [{"at_s": 1, "do": "drain", "replica": "r0"}, {"at_s": 2, "do": "drain", "replica": "r0"}],
    "it crashed before: restart it": [
        {"at_s": 1, "do": "crash", "replica": "r0"},
        {"at_s": 2, "do": "drain", "replica": "r0"},
    ],
    "no replica would be left to take a turn": [
        {"at_s": 1, "do": "drain"},
        {"at_s": 2, "do": "crash"},
        {"at_s": 3, "do": "remove", "replica": "r2"},
    ],
    "write the entries in order of time": [{"at_s": 2, "do": "drain"}, {"at_s": 1, "do": "add"}],
}


@pytest.mark.parametrize(("said", "entries"), WRONG.items())
def test_what_cannot_happen_is_refused_with_its_mend(said, entries):
    with pytest.raises(UsageError, match="churn: ") as caught:
        deeds(entries)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("said", "entry"),
    [
        ("nothing says when to add", {"do": "add"}),
        ("every_s and until_s go together", {"do": "add", "every_s": 1}),
        ("at_s = -1.0: give seconds, at least 0", {"do": "add", "at_s": -1.0}),
        ("at_s = 1e+308: give seconds, at least 0 and at most 1e+09", {"do": "add", "at_s": 1e308}),
        ("until_s = 1e+308: give seconds", {"do": "add", "every_s": 1, "until_s": 1e308}),
        ("limit_s = inf", {"do": "remove", "at_s": 1, "limit_s": float("inf")}),
        ("are far too many times: at most 10,000", {"do": "restart", "every_s": 1e-320, "until_s": 1}),
        ("every_s = 0 never ends", {"do": "add", "every_s": 0, "until_s": 1}),
        ("leave replica out", {"do": "crash", "every_s": 1, "until_s": 3, "replica": "r0"}),
        ("limit_s is about do = 'remove'", {"do": "drain", "at_s": 1, "limit_s": 3}),
        ("use letters, digits", {"do": "add", "at_s": 1, "replica": "a b"}),
        ("are 1,000,001 times", {"do": "restart", "every_s": 1, "until_s": 1_000_001}),
        ("'until'", {"do": "add", "every_s": 1, "until": 3}),
        ("do = 'kill': choose one of add, crash, drain, remove, restart", {"do": "kill", "at_s": 1}),
    ],
)
def test_an_entry_that_cannot_work_says_why(said, entry):
    with pytest.raises(UsageError) as caught:
        small(churn=[entry])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scenario_gives_its_list_back():
    scenario = small(churn=ALL_OF_IT)
    assert scenario.resolved()["churn"] == ALL_OF_IT
    assert check_scenario(scenario.resolved(), "again").churn == scenario.churn
    assert scenario.replica_names == ("r0", "r1", "r2", "r3")


def test_faults_may_name_a_replica_that_joins():
    assert small(churn=ALL_OF_IT, faults={"event_drop": 0.5, "replicas": ["r3"]})
    with pytest.raises(UsageError, match="r0, r1, r2"):
        small(faults={"event_drop": 0.5, "replicas": ["r3"]})


def test_live_refuses_what_nobody_can_be_told():
    other = {"name": "other", "command": ["other", "{port}"]}
    crash = [{"at_s": 1, "do": "crash"}]
    require_live(small(routers=[other], churn=crash))
    with pytest.raises(UsageError, match="not ours and is told of no change"):
        require_live(small(routers=[other], churn=[{"at_s": 1, "do": "drain"}]))
    with pytest.raises(UsageError, match="in front of replicas of its own"):
        require_live(small(routers=[{"name": "other", "url": "http://127.0.0.1:1"}], churn=crash))
    with pytest.raises(UsageError, match=r"remove fleet.urls or \[\[churn\]\]"):
        require_live(small(fleet={"replicas": 1, "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}, churn=crash))
    steps = {
        "kind": "rl-rollout",
        "steps": 2,
        "rollouts_per_step": 4,
        "turns": 1,
        "first_input_tokens": 64,
        "output_tokens": 32,
        "stragglers": 0,
        "weight_sync_every_steps": 1,
    }
    with pytest.raises(UsageError, match="weight_sync_every_steps"):
        require_live(small(workload=steps, churn=crash))


# ---- what becomes of requests ----------------------------------------------------------------------------------------


def test_a_new_replica_starts_cold_and_takes_turns():
    _, rows = run([{"at_s": 0.5, "do": "add"}])
    joined = [r for r in rows.requests if r["replica"] == "r3"]
    assert joined
    assert min(r["sent_us"] for r in joined) >= 500_000
    assert min(joined, key=lambda r: r["admitted_us"])["cached_tokens"] == 0
    samples = [s["t_us"] for s in rows.fleet if s["replica"] == "r3"]
    assert min(samples) == 500_000
    assert {r["status"] for r in rows.requests} == {"ok"}


def test_a_drained_replica_ends_what_it_has_and_gets_nothing_new():
    _, rows = run([{"at_s": 0.5, "do": "drain", "replica": "r0"}])
    had = [r for r in rows.requests if r["replica"] == "r0"]
    assert any(r["end_us"] > 500_000 for r in had)
    assert max(r["sent_us"] for r in had) < 500_000
    assert {r["status"] for r in rows.requests} == {"ok"}
    assert max(s["t_us"] for s in rows.fleet if s["replica"] == "r0") > 1_000_000  # it stays, idle


def test_a_drained_replica_that_is_added_again_still_has_its_cache():
    _, rows = run([{"at_s": 0.5, "do": "drain", "replica": "r0"}, {"at_s": 1.0, "do": "add", "replica": "r0"}])
    again = [r for r in rows.requests if r["replica"] == "r0" and r["sent_us"] >= 1_000_000]
    assert again
    assert all(r["cached_tokens"] >= 64 for r in again)  # the system prompt at least


def test_a_removed_replica_goes_when_it_is_idle_and_loses_nothing():
    simulation, rows = run([{"at_s": 0.5, "do": "remove", "replica": "r0"}])
    assert {r["status"] for r in rows.requests} == {"ok"}
    (line,) = rows.facts["churn"]
    last = max(r["end_us"] for r in rows.requests if r["replica"] == "r0")
    assert line["done_at_s"] == last / 1e6 > 0.5
    assert max(s["t_us"] for s in rows.fleet if s["replica"] == "r0") < last
    assert [view.name for view in simulation.routers[0].replicas()] == ["r1", "r2"]


def test_a_removal_that_takes_too_long_breaks_off_what_is_left():
    _, rows = run([{"at_s": 0.3, "do": "remove", "replica": "r0", "limit_s": 0.05}])
    broken = [r for r in rows.requests if r["status"] == "incomplete"]
    assert broken
    assert {(r["replica"], r["end_us"], r["error_class"]) for r in broken} == {("r0", 350_000, "truncated")}
    assert rows.facts["churn"][0]["done_at_s"] == 0.35


def test_a_crash_ends_what_the_replica_had_and_its_router_finds_out_by_itself():
    simulation, rows = run([{"at_s": 0.3, "do": "crash", "replica": "r1"}])
    broken = [r for r in rows.requests if r["status"] != "ok" and r.get("sent_us") is not None]
    assert broken
    assert {(r["replica"], r["end_us"]) for r in broken} == {("r1", 300_000)}
    for row in broken:
        assert (row["status"], row["error_class"]) == ("incomplete", "truncated")
        assert row["last_token_us"] is None or row["last_token_us"] <= 300_000
    assert max(s["t_us"] for s in rows.fleet if s["replica"] == "r1") <= 300_000
    later = [r for r in rows.requests if (r.get("sent_us") or 0) > 300_000]
    assert later
    assert all((r["status"], r["replica"] != "r1") == ("ok", True) for r in later)
    router = simulation.routers[0]
    # Its broken connections told it: nothing was sent there any more.
    assert router.placements["r1"] == sum(r.get("replica") == "r1" for r in rows.requests)
    assert router.down.since_us() == {"r1": 300_000}
    assert [view.name for view in router.replicas()] == ["r0", "r1", "r2"]  # nobody told it to forget r1


@pytest.mark.parametrize("policy", ["least-requests", "power-of-two", "session-ring", "dynamo-kv"])
def test_two_replicas_that_crash_at_once_cost_what_they_had_and_no_turn_after_it(policy):
    """Field case BL-38: that a dead replica looks idle draws no turns."""
    simulation, rows = run([{"at_s": 0.5, "do": "crash", "replica": f"r{i}"} for i in (0, 1)], policy)
    broken = [r for r in rows.requests if r["status"] in ("error", "incomplete")]
    assert {(r["error_class"], r["end_us"]) for r in broken} <= {("truncated", 500_000)}
    after = [r for r in rows.requests if (r.get("sent_us") or 0) > 500_000]
    assert {(r["status"], r["replica"]) for r in after} == {("ok", "r2")}
    router = simulation.routers[0]
    assert set(router.down.since_us()) == {"r0", "r1"}
    for name in ("r0", "r1"):  # found out by what broke, or by one refused turn
        assert router.placements[name] - sum(r.get("replica") == name for r in rows.requests) in (0, 1)


def test_each_ingress_finds_out_for_itself_by_one_refused_turn():
    workload = {**WORKLOAD, "sessions": 1, "turns": 12, "think_time_ms": 400}
    churn = [{"at_s": 0.0, "do": "crash", "replica": "r0"}]
    scenario = small(routers=["round-robin"], workload=workload, churn=churn, router={"ingresses": 2})
    simulation = Simulation(arm(scenario))
    rows = simulation.run()
    assert [(one.placements["r0"], one.down.times) for one in simulation.routers] == [(1, 1), (1, 1)]
    assert {(r["status"], r["replica"] == "r0") for r in rows.requests} == {("ok", False)}


def test_a_router_looks_every_second_and_only_then_sends_turns_again():
    simulation, rows = run(
        [{"at_s": 0.3, "do": "crash", "replica": "r1"}, {"at_s": 0.9, "do": "restart", "replica": "r1"}]
    )
    again = min(r["sent_us"] for r in rows.requests if r.get("replica") == "r1" and r["sent_us"] > 300_000)
    assert 1_300_000 <= again < 1_800_000  # it has been there since 0.9 s; the second look is at 1.3 s
    assert not simulation.routers[0].down


def test_a_restart_in_place_takes_nobody_out_because_the_replica_answers_at_once():
    simulation, rows = run([{"at_s": 0.3, "do": "restart", "replica": "r1"}])
    assert [r for r in rows.requests if r["status"] == "incomplete"]
    assert simulation.routers[0].down.times == 0


@pytest.mark.parametrize("router", ["session-ring", "reported-prefixes", "dynamo-kv"])
def test_a_replica_that_restarts_is_empty_and_is_believed_to_be(router):
    simulation, rows = run([{"at_s": 1.0, "do": "restart", "replica": "r0"}], router)
    first = min(
        (r for r in rows.requests if r.get("replica") == "r0" and (r["admitted_us"] or 0) > 1_000_000),
        key=lambda r: r["admitted_us"],
    )
    assert first["cached_tokens"] == 0
    assert not first["believed_hit_tokens"]
    counters = [s["query_tokens"] for s in rows.fleet if s["replica"] == "r0"]
    assert any(b < a for a, b in pairwise(counters))  # they begin at 0 again
    assert simulation.routers[0].in_flight == 0


def test_a_crashed_replica_that_restarts_takes_turns_again():
    _, rows = run([{"at_s": 0.5, "do": "crash", "replica": "r0"}, {"at_s": 1.0, "do": "restart", "replica": "r0"}])
    sent = [r["sent_us"] for r in rows.requests if r.get("replica") == "r0" and r["status"] == "ok"]
    assert not [us for us in sent if 500_000 < us < 1_000_000]
    assert [us for us in sent if us >= 1_000_000]


def test_what_is_due_after_the_load_has_ended_is_not_done():
    _, rows = run([{"at_s": 500.0, "do": "crash"}])
    assert rows.facts["churn"] == [{"at_s": 500.0, "do": "crash", "replica": "r0", "done_at_s": None}]
    assert {r["status"] for r in rows.requests} == {"ok"}


CHURNED = ["session-ring", "session-modulo", "sticky-least-loaded", "dynamo-kv", "dynamo-approx", "reported-prefixes",
           "clairvoyant", "sglang-cache-aware", "llmd-precise-prefix", "power-of-two"]  # fmt: skip


@pytest.mark.parametrize("ingresses", [1, 2])
@pytest.mark.parametrize("router", CHURNED)
def test_every_request_ends_once_whatever_happens_to_replicas(router, ingresses):
    simulation, rows = run(ALL_OF_IT, router, router={"ingresses": ingresses})
    expected = sorted(
        f"{s.session_id}-{t.index}"
        for s in simulation._arm.scenario.make_workload().sessions(Streams(3))
        for t in s.turns
    )
    assert sorted(r["request_id"] for r in rows.requests) == expected
    assert {r["status"] for r in rows.requests} <= {"ok", "error", "incomplete", "cancelled"}
    assert [one.in_flight for one in simulation.routers] == [0] * ingresses
    assert all(line["done_at_s"] is not None for line in rows.facts["churn"])
    assert not simulation._requests


def test_ten_replicas_of_which_one_leaves_and_one_joins_every_five_seconds_lose_nothing():
    """Field case: 1,500 requests; drained replicas finish what they have, so nothing may fail."""
    workload = {**WORKLOAD, "sessions": 300, "turns": 5, "think_time_ms": 1000}
    scenario = small(
        routers=["session-ring", "sticky-least-loaded", "dynamo-kv"],
        fleet={"replicas": 10},
        workload=workload,
        load={"driver": "rate", "rate_per_s": 6.0, "concurrency": None, "ramp_s": 0.0},
        churn=[{"every_s": 5, "until_s": 45, "do": "remove"}, {"every_s": 5, "until_s": 45, "do": "add"}],
    )
    for number in range(3):
        rows = Simulation(arm(scenario, number)).run()
        assert len(rows.requests) == 1500
        assert {r["status"] for r in rows.requests} == {"ok"}
        assert len({r["replica"] for r in rows.requests}) == 19
        assert sum(line["done_at_s"] is not None for line in rows.facts["churn"]) == 18


def test_ten_replicas_of_which_one_is_killed_every_five_seconds_cost_what_was_in_flight_there():
    """Field case BL-38, with kills: nine dead names stay in the fleet, and no turn is lost to one of them."""
    workload = {**WORKLOAD, "sessions": 300, "turns": 5, "think_time_ms": 1000}
    scenario = small(
        routers=["session-ring", "least-requests", "dynamo-kv"],
        fleet={"replicas": 10},
        workload=workload,
        load={"driver": "rate", "rate_per_s": 6.0, "concurrency": None, "ramp_s": 0.0},
        churn=[{"every_s": 5, "until_s": 45, "do": "crash"}, {"every_s": 5, "until_s": 45, "do": "add"}],
    )
    for number in range(3):
        simulation = Simulation(arm(scenario, number))
        rows = simulation.run()
        assert len(rows.requests) == 1500
        kills_us = {round(line["done_at_s"] * 1e6) for line in rows.facts["churn"]}
        failed = [r for r in rows.requests if r["status"] in ("error", "incomplete")]
        assert {(r["status"], r["error_class"], r["end_us"] in kills_us) for r in failed} <= {
            ("incomplete", "truncated", True)
        }
        assert len(simulation.routers[0].replicas()) == 19
        assert len(simulation.routers[0].down.since_us()) == 9
        assert simulation.routers[0].in_flight == 0


def test_churn_is_repeatable_over_hash_seeds():
    code = (
        "import hashlib; from harness.tests.test_churn import ALL_OF_IT, run\n"
        "done = [run(ALL_OF_IT, r, router={'ingresses': 2})[1] for r in ('dynamo-kv', 'session-ring', 'random')]\n"
        "rows = [sorted((k, str(v)) for k, v in r.items()) for d in done for r in (*d.requests, *d.fleet)]\n"
        "print(hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(seen) == 1


def test_a_list_that_never_comes_to_pass_changes_no_row():
    plainly, never = run([]), run([{"at_s": 9_000.0, "do": "crash"}])
    assert plain(plainly[1].requests) == plain(never[1].requests)
    assert plainly[1].fleet == never[1].fleet


# ---- what a run tells of it ------------------------------------------------------------------------------------------


def test_a_run_tells_what_was_done_and_where_requests_were_lost(tmp_path):
    scenario = small(routers=["least-requests"], workload=WORKLOAD, churn=ALL_OF_IT)
    run_mode(scenario, "sim", tmp_path)
    found = read_run(tmp_path)
    assert [(line["do"], line["replica"], line["router"]) for line in found.churn] == [
        (entry["do"], entry.get("replica", "r3"), "least-requests") for entry in ALL_OF_IT
    ]
    document = found.to_json()
    figures = document["routers"]["least-requests"]
    listed = document["unfinished"]
    assert listed
    assert {one["replica"] for one in listed} <= {"r1", "r2", "r3"}
    assert {one["stage"] for one in listed} <= {"decode", "prefill", "before its first token"}
    assert figures["errors"] == sum(one["status"] == "error" for one in listed)
    assert figures["placement"]["r3"] > 0
    assert "Where requests were that came to no good end" in (tmp_path / "report.md").read_text()


def test_a_replica_is_absent_from_its_end_to_its_next_start():
    def line(do, replica, done_us):
        return {"do": do, "replica": replica, "done_us": done_us}

    inf = float("inf")
    record = [
        line("add", "r3", 5),
        line("crash", "r0", 7),
        line("restart", "r0", 9),
        line("remove", "r3", 11),
        line("drain", "r1", 12),
        line("add", "r4", None),
    ]
    assert absences(record, ["r0", "r1"]) == {"r3": [(-inf, 5), (11, inf)], "r0": [(7, 9)], "r4": [(-inf, inf)]}


def test_what_was_refused_is_said():
    done = {"do": "add", "replica": "r3", "at_s": 1.0, "done_at_s": 1.0}
    refused = {"do": "drain", "replica": "r1", "at_s": 2.0, "done_at_s": None, "error": "timed out"}
    (note,) = churn_notes("x.0", [done, refused], 9.0)
    assert "drain r1 at 2 s was not done (timed out)" in note


def test_what_the_run_was_too_short_for_is_said():
    done = {"do": "add", "replica": "r3", "at_s": 1.0, "done_at_s": 1.0}
    crash = {"do": "crash", "replica": "r0", "at_s": 500.0, "done_at_s": None}
    removal = {"do": "remove", "replica": "r1", "at_s": 8.0, "done_at_s": None}
    (note,) = churn_notes("x.0", [done, crash], 9.0)
    assert note.startswith("x.0: crash r0 at 500 s was not reached, the run ended at 9.0 s: ")
    (note,) = churn_notes("x.0", [done, removal, crash], 9.0)
    assert "remove r1 at 8 s was begun and not over, the run ended at 9.0 s (2 of 3 events" in note
    assert not churn_notes("x.0", [done], 9.0)


def test_an_event_that_is_never_reached_makes_a_run_degraded_and_check_foretells_it(tmp_path, capsys):
    scenario = small(churn=[{"at_s": 0.1, "do": "add"}, {"at_s": 500.0, "do": "crash", "replica": "r0"}])
    result = run_mode(scenario, "sim", tmp_path).result
    assert result.health["verdict"] == "degraded"
    (reason,) = (said for said in result.health["reasons"] if "crash r0 at 500 s was not reached" in said)
    assert "the run ended at" in reason
    check_command(scenario)
    said = " ".join(capsys.readouterr().out.split())
    assert "! 500 s crash r0: not reached, an arm of round-robin ends at about" in said
    check_command(small(churn=[{"at_s": 0.1, "do": "add"}]))
    assert "not reached" not in capsys.readouterr().out
