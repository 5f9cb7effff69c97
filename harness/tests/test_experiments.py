"""The built-in experiments find what they expect, and every failure of the field has its experiment or is said to lack
one."""

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from harness.experiments import (
    FAILURE_MODES,
    MISSING,
    PUBLISHED_RATIOS,
    Measured,
    experiment_names,
    later_turn_hits,
    measure,
    published_order,
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


@pytest.mark.parametrize("name", experiment_names())
def test_an_experiment_loses_no_request(name):
    for router, figures in found(name).figures.items():
        assert figures["errors"] == figures["incomplete"] == 0, router


def test_every_row_of_the_failure_table_names_a_scenario():
    assert set(FAILURE_MODES) == SEED_ROWS
    named = {scenario for _, scenarios in FAILURE_MODES.values() for scenario in scenarios}
    assert named - set(builtin_names()) == set(MISSING), "a scenario came or went: bring MISSING up to date"
    assert named - set(MISSING) <= set(experiment_names()), "a scenario that shows a failure must expect to see it"


def test_the_page_has_a_section_and_a_picture_of_every_experiment():
    page = (DOCS / "experiments.md").read_text("utf-8")
    for name in experiment_names():
        assert f"\n## {name}\n" in page, f"{name}: make the page again with python -m harness.experiments_page"
        assert (DOCS / "experiments" / f"{name}.svg").exists()
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
