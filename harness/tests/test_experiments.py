"""The built-in experiments find what they expect, and every failure of the field has its experiment."""

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from harness.experiments import (
    FAILURE_MODES,
    PUBLISHED_RATIOS,
    SMALL,
    Measured,
    experiment_names,
    later_turn_hits,
    measure,
    moved_sessions,
    published_order,
    stale_until_us,
    sweep_rows,
)
from harness.scenario import builtin_names, load_scenario

DOCS = Path(__file__).resolve().parents[2] / "docs"

SEED_ROWS = {
    "herding",
    "index-not-eviction-aware",
    "hit-rate-near-zero",
    "body-truncation",
    "index-growth",
    "lost-events",
    "two-routers",
    "cross-tenant-hits",
    "no-reuse",
}
"""Rows of the published failure-mode table, in short."""


@cache
def found(name: str, *overrides: str) -> Measured:
    return measure(load_scenario(name, overrides=overrides))


@pytest.mark.parametrize("name", experiment_names())
def test_an_experiment_finds_what_it_expects(name):
    wrong = [str(finding) for finding in found(name).findings if not finding.met]
    assert not wrong, "\n".join(wrong)


KILLS = ("crash", "restart")


@pytest.mark.parametrize("name", experiment_names())
def test_an_experiment_loses_no_request_unless_a_replica_is_killed_or_clients_ask_for_too_much(name):
    scenario = found(name).scenario
    killed = any(event.do in KILLS for event in scenario.churn)
    for router, figures in found(name).figures.items():
        assert figures["errors"] == 0 or scenario.load.overlong == "send", router
        assert figures["incomplete"] == 0 or killed, router


def test_every_row_of_the_failure_table_names_scenarios_that_expect_its_symptom():
    assert set(FAILURE_MODES) == SEED_ROWS
    for key, mode in FAILURE_MODES.items():
        assert mode.shown_by, key
        for name, metric in mode.shown_by.items():
            assert name in builtin_names(), f"{key}: no scenario {name}"
            assert metric in {expectation.metric for expectation in load_scenario(name).expect}, (
                f"{key}: {name} expects nothing of {metric}, in which its symptom is seen"
            )


def test_a_small_experiment_is_another_one_cut_down():
    for name in experiment_names():
        if name.endswith(SMALL):
            whole = load_scenario(name.removesuffix(SMALL))
            assert {e.metric for e in load_scenario(name).expect} <= {e.metric for e in whole.expect} | {"hit_rate"}


def test_the_page_tells_of_every_experiment():
    page = (DOCS / "experiments.md").read_text("utf-8")
    for name in experiment_names():
        again = f"{name}: make the page again with python -m harness.experiments_page"
        if name.endswith(SMALL):
            assert f"| {name} |" in page, again
        else:
            assert f"\n## {name}\n" in page, again
            assert (DOCS / "experiments" / f"{name}.svg").exists(), again
    assert "**not as expected**" not in page


def test_without_the_clock_in_front_the_same_traffic_is_cached():
    clean = found("timestamp-prefix", "workload.timestamp_prefix=false")
    assert clean.figure("dynamo-kv", "hit_rate") > 0.7
    assert clean.figure("dynamo-kv", "ttft_ms.p50") < found("timestamp-prefix").figure("dynamo-kv", "ttft_ms.p50")


def test_a_cut_body_costs_the_longest_conversations_their_hits_and_the_shortest_none():
    def rate(found_in: Measured, low: int, high: int) -> float:
        rows = [r for r in found_in.requests["dynamo-kv"] if r["turn"] and low < r["prompt_tokens"] <= high]
        return sum(r["cached_tokens"] for r in rows) / sum(r["prompt_tokens"] for r in rows)

    cut = found("long-body-truncation")
    whole = found("long-body-truncation", "faults.router_body_truncate_bytes=100000000")
    assert rate(cut, 4096, 10**6) < rate(whole, 4096, 10**6) - 0.1
    assert abs(rate(cut, 0, 2048) - rate(whole, 0, 2048)) < 0.1


def test_with_all_events_the_blind_router_sees():
    sound, blind = found("event-loss", "faults.event_drop=0.0"), found("event-loss")
    assert sound.figure("dynamo-kv", "phantom_hit_points") == 0
    assert sound.figure("dynamo-kv", "hit_rate") > 1.4 * blind.figure("dynamo-kv", "hit_rate")


def test_with_the_engines_template_blocks_match_again():
    assert found("template-mismatch", "faults.router_template_mismatch=false").figure("dynamo-kv", "hit_rate") > 0.65


def test_round_robin_puts_a_burst_on_every_replica_and_a_remembering_router_on_one():
    burst = found("prefix-burst")
    for router, share in (("round-robin", 4), ("prefix-hash", 32)):
        together: dict[tuple[str, str], int] = {}
        for row in burst.requests[router]:
            key = row["group"], row["replica"]
            together[key] = together.get(key, 0) + 1
        assert max(together.values()) == share, router


def test_the_drowning_engine_loses_its_hits_and_the_idle_ones_wait():
    """The field report's figures: windowed hit rate below half of the early one, idle for over 30 % of the run."""
    thrash = found("cache-thrash")
    shares = thrash.figures["hash-ring"]["placement"]
    drowned = max(shares, key=shares.get)
    samples = [s for s in thrash.fleet["hash-ring"] if s["replica"] == drowned]
    end = max(s["t_us"] for s in samples)

    def window(start: float, stop: float) -> float:
        inside = [s for s in samples if start * end <= s["t_us"] <= stop * end]
        asked = inside[-1]["query_tokens"] - inside[0]["query_tokens"]
        return (inside[-1]["hit_tokens"] - inside[0]["hit_tokens"]) / asked

    assert window(0.35, 0.65) < 0.5 * window(0.0, 0.1)
    assert samples[-1]["preemptions"] > 0
    idle = dict.fromkeys(thrash.scenario.fleet.names, 0)
    for sample in thrash.fleet["hash-ring"]:
        idle[sample["replica"]] += sample["running"] == sample["waiting"] == 0
    assert sum(count / len(samples) > 0.3 for count in idle.values()) >= 2, idle


def test_twice_the_traffic_doubles_an_index_that_forgets_nothing_and_no_other():
    once, twice = found("index-growth", "workload.sessions=300"), found("index-growth")
    growth = {name: twice.figure(name, "index_size_max") / once.figure(name, "index_size_max") for name in once.figures}
    assert growth["ray"] > 1.9
    assert growth["ray-eviction"] < 1.2
    assert growth["dynamo-kv"] < 1.01


def test_a_fifth_replica_moves_a_fifth_of_the_sessions_on_a_ring_and_four_fifths_by_modulo():
    churn = found("replica-churn")
    (event,) = churn.scenario.churn
    for router, low, high in (
        ("session-ring", 0.08, 0.32),
        ("ring-ramped", 0.08, 0.32),
        ("session-modulo", 0.65, 0.95),
    ):
        moved, sessions = moved_sessions(churn.requests[router], event.at_us, 1 << 62)
        assert sessions == 96
        assert low < moved / sessions < high, router


def test_a_ramp_moves_the_same_sessions_later():
    churn = found("replica-churn")
    (event,) = churn.scenario.churn
    at_once, ramped = (
        moved_sessions(churn.requests[router], event.at_us, event.at_us + 4_000_000)[0]
        for router in ("session-ring", "ring-ramped")
    )
    assert ramped < at_once / 2
    both = [moved_sessions(churn.requests[router], event.at_us, 1 << 62) for router in ("session-ring", "ring-ramped")]
    assert both[0] == both[1]


def test_a_router_that_heeds_nothing_goes_wrong_with_every_conversation_of_the_replica_until_each_was_there_once():
    restart = found("restart-in-place")
    (event,) = restart.scenario.churn
    assert stale_until_us(restart.requests["dynamo-kv"], event.at_us) is None
    until_us = stale_until_us(restart.requests["heedless"], event.at_us)
    assert until_us is not None
    assert event.at_us + 3_000_000 < until_us < event.at_us + 20_000_000


def test_a_router_that_overlooks_salts_expects_of_an_engine_what_another_tenant_left_there():
    tenants = found("tenant-isolation")
    missed = [row for row in tenants.requests["blind"] if row["believed_hit_tokens"] and not row["cached_tokens"]]
    assert len(missed) > 25
    assert {row["believed_hit_tokens"] for row in missed if row["turn"] == 0} == {4096}, "the system prompt, of others"
    for row in tenants.requests["pure-kv-affinity"]:
        assert row["believed_hit_tokens"] == row["cached_tokens"]


def test_who_moved_is_told_by_the_last_turns_before_and_after():
    def row(session, sent_us, replica):
        return {"session": session, "sent_us": sent_us, "replica": replica}

    rows = [
        *(row("moves", 1, "r0"), row("moves", 5, "r1"), row("stays", 2, "r0"), row("stays", 6, "r0")),
        *(row("comes back", 1, "r0"), row("comes back", 6, "r1"), row("comes back", 7, "r0")),
        *(row("ended", 1, "r0"), row("new", 8, "r1"), {"session": "moves", "replica": None}),
    ]
    assert moved_sessions(rows, 5, 100) == (1, 3)
    assert moved_sessions(rows, 5, 7) == (2, 3)


def test_hits_of_later_turns_are_counted_in_full_blocks():
    def row(turn, prompt, output, cached):
        return {
            "session": "s",
            "turn": turn,
            "status": "ok",
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": cached,
        }

    rows = [row(0, 100, 29, 0), row(1, 200, 10, 128), row(2, 300, 10, 128)]
    # 128 of (100 + 29 - 1) and of (200 + 10 - 1) tokens, the latter being 208 in full blocks
    assert later_turn_hits(rows, 16) == (0.5, 256 / 336)
    assert all(math.isnan(x) for x in later_turn_hits(rows[:1], 16))


def test_the_sweep_has_the_published_ratios():
    rows = sweep_rows(found("affinity-load-sweep"))
    assert [row.ratio for row in rows] == list(PUBLISHED_RATIOS)
    assert all(a.hit_percent <= b.hit_percent for a, b in pairwise(rows))


def test_the_published_order_holds_on_the_size_that_the_straggler_scenario_has():
    tail, hits, ratio = published_order(found("rl-rollout-stragglers"))
    assert tail
    assert hits
    assert ratio < 1
