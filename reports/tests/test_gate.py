import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports import METRICS, RuleError, default_rules, gate, rules_of, self_test
from reports.comparable import ASKED
from reports.tests.rows_by_hand import metrics_of, request
from reports.tests.runs_by_hand import SCENARIO, noisy_run, run_of, spoilt


def figures(**changes):
    rows = [request(number, replica=f"r{number % 4}", cached_tokens=60) for number in range(200)]
    return {**metrics_of(rows), "preemptions": 3, "load_cv": {"decode_blocks": 0.2, "waiting": None}} | changes


def sim(**changes):
    return run_of({"a": figures(), "b": figures()}, **changes)


def rules(**document):
    return rules_of(document, "rules.toml")


def line_of(result, router="a"):
    return next(line for line in result.lines if line.router == router)


def test_a_run_passes_against_itself():
    result = gate(sim(), sim(), default_rules())
    assert (result.outcome, result.exit_code) == ("pass", 0)
    assert {line.outcome for line in result.lines} == {"pass"}


def test_a_simulated_figure_is_judged_exactly_at_its_tolerance():
    base = sim()
    within = spoilt(base, "a", hit_rate=0.6 * 0.95)
    beyond = spoilt(base, "a", hit_rate=0.6 * 0.949)
    five = rules(relative=["hit_rate:-5%"])
    assert gate(within, base, five).outcome == "pass"
    result = gate(beyond, base, five)
    assert (result.outcome, result.exit_code) == ("regression", 1)
    assert "allowed -5.0 %" in result.reason
    assert line_of(result, "b").outcome == "pass"


def test_what_the_baseline_had_none_of_may_not_appear():
    base = spoilt(sim(), "a", preemptions=0)
    assert gate(spoilt(base, "a", preemptions=1), base, default_rules()).outcome == "regression"


def test_an_improvement_passes_and_is_said():
    result = gate(spoilt(sim(), "a", hit_rate=0.9), sim(), default_rules())
    assert result.outcome == "pass"
    assert "1 of them for the better" in result.reason


@pytest.mark.parametrize(
    ("rule", "changes", "outcome"),
    [
        ("placement", {"placement": {"r0": 51, "r1": 49, "r2": 50, "r3": 50}}, "regression"),
        ("hit_rate", {"hit_rate": 0.599999}, "regression"),
        ("hit_rate", {"hit_rate": 0.61}, "pass"),
        ("preemptions", {"preemptions": 4}, "regression"),
        ("preemptions", {"preemptions": 2}, "pass"),
        ("requests", {"requests": 201}, "regression"),
        ("load_cv", {"load_cv": {"decode_blocks": 0.1, "waiting": None}}, "regression"),
        ("ttft_ms:max", {"ttft_ms": {**figures()["ttft_ms"], "max": 200.000001}}, "regression"),
    ],
)
def test_an_exact_rule_allows_nothing_worse_and_no_change_where_nothing_is_worse(rule, changes, outcome):
    result = gate(spoilt(sim(), "a", **changes), sim(), rules(exact=[rule]))
    assert result.outcome == outcome
    assert gate(sim(), sim(), rules(exact=[rule])).outcome == "pass"


def test_exact_rules_are_refused_where_wall_time_decides():
    live = sim(mode="live")
    with pytest.raises(RuleError, match='mode = "sim"'):
        gate(live, live, rules(exact=["placement"]))
    narrowed = rules(exact=["errors"], rule=[{"mode": "sim", "exact": ["placement"]}])
    assert gate(live, live, narrowed).outcome == "pass"


def test_bounds_need_no_baseline_and_everything_else_does():
    assert gate(sim(), None, rules(bounds={"ttft_ms": ["p(99)<201", "avg>=200"]})).outcome == "pass"
    result = gate(sim(), None, rules(bounds={"ttft_ms": ["p(99)<200"]}))
    assert result.exit_code == 1
    assert "found 200.0 ms" in result.reason
    with pytest.raises(RuleError, match="needs a baseline"):
        gate(sim(), None, default_rules())


def test_rules_hold_per_router_and_scenario():
    base = sim()
    worse = spoilt(base, "a", hit_rate=0.1)
    for_b = rules(rule=[{"router": "b", "relative": ["hit_rate:-5%"]}])
    assert gate(worse, base, for_b).outcome == "pass"
    elsewhere = rules(rule=[{"scenario": "other", "relative": ["hit_rate:-5%"]}], exact=["errors"])
    assert gate(worse, base, elsewhere).outcome == "pass"


def test_a_rule_about_a_router_that_did_not_run_is_an_error():
    with pytest.raises(RuleError, match="would pass for ever"):
        gate(sim(), sim(), rules(rule=[{"router": "c", "exact": ["errors"]}]))


def test_a_users_rule_on_an_unknown_figure_does_not_pass():
    result = gate(sim(), sim(), rules(relative=["step_makespan_ms:p50:+5%"]))
    assert result.exit_code == 3
    assert "unknown in either run" in result.reason
    assert gate(sim(), sim(), rules(bounds={"step_makespan_ms": ["max<9"]})).exit_code == 3


def test_a_default_rule_on_a_figure_that_was_lost_does_not_pass():
    result = gate(spoilt(sim(), "a", ttft_ms=None), sim(), default_rules())
    assert result.exit_code == 3
    assert "does not know it any more" in result.reason


def test_rules_that_match_no_scenario_judge_nothing_and_say_so():
    result = gate(sim(), sim(), rules(rule=[{"scenario": "other", "exact": ["errors"]}]))
    assert result.exit_code == 3
    assert "nothing is known" in result.reason


def test_everything_on_one_replica_fails_even_if_latency_passes():
    lazy = spoilt(sim(), "a", placement={"r0": 190, "r1": 4, "r2": 3, "r3": 3})
    result = gate(lazy, lazy, default_rules())
    assert result.exit_code == 1
    assert "degenerate placement" in result.reason
    allowed = rules(relative=["hit_rate:-5%"], rule=[{"router": "a", "allow_degenerate_placement": True}])
    assert gate(lazy, lazy, allowed).outcome == "pass"
    even = spoilt(sim(), "a", placement={"r0": 100, "r1": 34, "r2": 33, "r3": 33})
    assert gate(even, even, default_rules()).outcome == "pass"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"status": "partial"}, "partial"),
        ({"health": {"verdict": "invalid", "reasons": ["the load generator ran out of CPU"]}}, "invalid-health"),
        ({"health": {"verdict": "invalid", "reasons": ["warm start: a began with 5 blocks"]}}, "warm-start"),
        ({"routers": {}, "repeats": []}, "no-figures"),
        ({"routers": {"a": figures(errors=30), "b": figures()}}, "errors-above-bound"),
        ({"routers": {"a": figures(incomplete=3), "b": figures()}}, "errors-above-bound"),
        ({"routers": {"a": figures(errors=200), "b": figures()}}, "nothing-completed"),
        ({"routers": {"a": figures(hit_rate=0.9, hit_rate_ceiling=0.5), "b": figures()}}, "warm-start"),
        ({"mode": "live"}, "other-mode"),
        ({"seed": 1}, "other-seed"),
        ({"routers": {"a": figures()}}, "router-missing"),
        ({"scenario": {**SCENARIO, "workload": {"kind": "rl-rollout"}}}, "other-workload"),
        ({"scenario": {**SCENARIO, "load": {**SCENARIO["load"], "concurrency": 99}}}, "other-load"),
        ({"scenario": {**SCENARIO, "engine": {"block_size": 32}}}, "other-engine"),
        ({"scenario": {**SCENARIO, "fleet": {"replicas": 8}}}, "other-fleet"),
        ({"scenario": {**SCENARIO, "faults": {"event_drop": 0.1}}}, "other-faults"),
    ],
)
def test_a_run_that_is_unfit_or_another_experiment_is_refused_with_a_code_of_its_own(changes, code):
    routers = changes.pop("routers", {"a": figures(), "b": figures()})
    current = run_of(routers, changes.pop("repeats", None), **changes)
    result = gate(current, sim(), default_rules())
    assert result.exit_code == 3
    assert code in [complaint.code for complaint in result.complaints]
    assert result.to_json()["code"] == result.complaints[0].code == result.reason.split(":")[0]
    assert result.lines == ()
    assert "\n" not in result.reason


def test_other_repeats_of_a_simulation_are_other_sessions():
    repeats = [{"router": name, "repeat": n, "metrics": figures()} for name in "ab" for n in (0, 1)]
    result = gate(sim(repeats=repeats), sim(), default_rules())
    assert [complaint.code for complaint in result.complaints] == ["other-repeats"]


def test_rows_that_are_missing_are_noticed():
    short = run_of({"a": figures(requests=150), "b": figures()})
    result = gate(short, sim(), default_rules())
    assert "missing-records" in result.reason


def test_another_load_is_told_with_what_was_in_flight_and_may_be_forced():
    base = run_of({"a": figures(in_flight_mean=118.2)})
    other = run_of(
        {"a": figures(in_flight_mean=1000.0)}, scenario={**SCENARIO, "load": {**SCENARIO["load"], "think_time_ms": 750}}
    )
    result = gate(other, base, default_rules())
    assert result.exit_code == 3
    assert "load differs: about 118 against 1,000 in flight" in result.reason
    forced = gate(other, base, default_rules(), force=True)
    assert forced.outcome == "pass"
    assert forced.complaints[0].forced
    broken = run_of({"a": figures(errors=100)})
    assert gate(broken, base, default_rules(), force=True).exit_code == 3


def test_names_words_routers_and_bounds_are_not_the_experiment():
    other = {**SCENARIO, "about": "other words", "slo": {"ttft_ms": 1}, "routers": [{"name": "a"}]}
    assert set(ASKED).isdisjoint({"about", "slo", "routers", "name", "repeats", "seed"})
    assert gate(sim(scenario=other), sim(), default_rules()).outcome == "pass"


def test_an_option_that_came_with_another_version_is_noted_and_no_difference():
    newer = {**SCENARIO, "load": {**SCENARIO["load"], "burstiness": 1.0, "caps": None}}
    for current, base in ((sim(scenario=newer), sim()), (sim(), sim(scenario=newer))):
        result = gate(current, base, default_rules())
        assert result.outcome == "pass"
        assert "only one side knows load.burstiness = 1: it was made by another version" in result.notes
    lengths = [
        {**SCENARIO, "workload": {"turns": {"dist": "lognormal", "mean": 5} | more}} for more in ({}, {"max": 9})
    ]
    assert gate(sim(scenario=lengths[0]), sim(scenario=lengths[1]), default_rules()).exit_code == 3


def test_a_new_router_is_noted_and_not_compared():
    base = run_of({"a": figures()})
    result = gate(sim(), base, default_rules())
    assert result.outcome == "pass"
    assert {line.router for line in result.lines} == {"a"}
    assert any("not in the baseline" in note for note in result.notes)


def test_the_order_of_arms_changes_no_verdict():
    one = gate(spoilt(sim(), "a", hit_rate=0.1), sim(), default_rules())
    other = gate(
        run_of({"b": figures(), "a": figures(hit_rate=0.1)}), run_of({"b": figures(), "a": figures()}), default_rules()
    )
    assert {(line.router, line.rule, line.outcome) for line in one.lines} == {
        (line.router, line.rule, line.outcome) for line in other.lines
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_arms_changes_no_verdict_of_a_live_run(seed):
    """A/B and B/A, with noise; every second pair has a slower prefill in it."""

    def turned(run):
        routers = dict(reversed(run.routers.items()))
        return run_of(routers, list(reversed(run.repeats)), mode="live")

    base, now = noisy_run(seed), noisy_run(100 + seed, prefill=1 + 0.08 * (seed % 2))
    one, other = gate(now, base, default_rules()), gate(turned(now), turned(base), default_rules())
    assert one.outcome == other.outcome
    assert {line.json()["rule"] + line.router: line.json() for line in one.lines} == {
        line.json()["rule"] + line.router: line.json() for line in other.lines
    }


NOISE = pytest.mark.parametrize(("repeats", "noise"), [(3, 0.01), (5, 0.02)])  # spread of the machine's speed


@NOISE
def test_wall_clock_noise_alone_is_at_most_one_regression_in_twenty(repeats, noise):
    found = [judged(n, repeats=repeats, noise=noise).outcome for n in range(20)]
    assert found.count("regression") <= 1
    assert found.count("invalid") == 0


@NOISE
def test_ten_percent_more_prefill_time_is_caught_nineteen_times_in_twenty(repeats, noise):
    found = [judged(n, prefill=1.1, repeats=repeats, noise=noise).outcome for n in range(20)]
    assert found.count("regression") >= 19


def judged(number, prefill=1.0, **size):
    """Neighbours of a row of runs of one build; with more prefill time, a run of the other build."""
    seed = 1_001 + number if prefill == 1.0 else 2_000 + number
    current = noisy_run(seed, prefill=prefill, requests=120, **size)
    return gate(current, noisy_run(1_000 + number, prefill=1.0, requests=120, **size), default_rules())


@pytest.mark.parametrize(("repeats", "requests"), [(1, 120), (2, 120), (3, 20)])
def test_too_few_repeats_or_samples_are_inconclusive_and_never_a_regression(repeats, requests):
    slow = noisy_run(1, prefill=2.0, repeats=repeats, requests=requests)
    result = gate(slow, noisy_run(2, repeats=repeats, requests=requests), default_rules())
    assert (result.outcome, result.exit_code) == ("inconclusive", 4)
    assert "too little to tell" in result.reason


def test_a_broken_bound_from_a_handful_of_requests_is_inconclusive_live_and_a_regression_in_sim():
    few = metrics_of([request(number, replica=f"r{number % 4}") for number in range(8)])
    strict = rules(bounds={"ttft_ms": ["p(99)<100"]})
    assert gate(run_of({"a": few}, mode="live"), None, strict).outcome == "inconclusive"
    assert gate(run_of({"a": few}), None, strict).outcome == "regression"


def test_the_verdict_is_json_without_nan():
    for result in (gate(noisy_run(1), noisy_run(2), default_rules()), gate(sim(), sim(seed=1), default_rules())):
        document = json.loads(json.dumps(result.to_json(), allow_nan=False))
        assert document["exit_code"] == result.exit_code
        assert document["reason"] == result.reason


@pytest.mark.parametrize("run", [sim(), noisy_run(5)], ids=["sim", "live"])
def test_the_self_test_catches_every_fault_it_injects(run):
    found = self_test(run, default_rules())
    assert [one.fault for one in found if not one.caught] == []
    assert {one.expected for one in found} == {"pass", "regression", "invalid"}
    assert len(found) > len(run.routers) * 5


def test_the_self_test_misses_what_too_few_repeats_cannot_show():
    found = self_test(noisy_run(5, repeats=2), default_rules())
    assert any(not one.caught and one.found == "inconclusive" for one in found)


def test_the_self_test_breaks_bounds_and_exact_rules_too():
    every = rules(
        bounds={"ttft_ms": ["p(99)<500"], "hit_rate": ["rate>0.1"], "placement.max_share": ["value<0.5"]},
        exact=["placement", "load_cv", "preemptions", "requests"],
    )
    assert [one.fault for one in self_test(sim(), every) if not one.caught] == []


def test_the_baseline_of_a_metric_that_did_not_exist_then_is_unknown_not_zero():
    older = {name: value for name, value in figures().items() if name != "tail_idle_replica_s"}
    assert "tail_idle_replica_s" in METRICS
    result = gate(run_of({"a": figures(tail_idle_replica_s=5.0)}), run_of({"a": older}), default_rules())
    assert result.outcome == "pass"


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.0, 0.4), st.floats(0.0, 0.4))
def test_what_is_worse_never_gets_a_better_verdict(base, first, more):
    """Exit codes rise with the loss: 0 while tolerated, 1 beyond, and never back."""
    run = spoilt(sim(), "a", hit_rate=base)
    codes = [
        gate(spoilt(run, "a", hit_rate=base - loss), run, rules(relative=["hit_rate:-10%"])).exit_code
        for loss in (0.0, first, first + more)
    ]
    assert codes[0] == 0
    assert codes == sorted(codes)


def test_what_differs_is_told_as_a_person_would():
    churn = [{"do": "crash", "at_s": 10.0, "replica": "r1"}]
    load = {**SCENARIO["load"], "concurrency": 4}
    mine = {**SCENARIO, "churn": []}
    base = {**SCENARIO, "churn": churn, "workload": {"kind": "rag", "documents": 4}, "load": load}
    found = gate(sim(scenario=mine), sim(scenario=base), default_rules())
    told = {one.code: one.text for one in found.complaints}
    assert told["other-churn"].startswith("churn is none where the baseline has crash r1 at 10 s: ")
    assert told["other-workload"].startswith("workload.kind is multi-turn where the baseline has rag")
    assert "documents" not in told["other-workload"]
    assert sum("load differs" in text for text in told.values()) <= 1
