import json
from dataclasses import replace

import pytest

from reports import finish_run, make_arms
from reports.plots import plots
from reports.plots_cache import FALLS, STAGES, waterfall
from reports.plots_lanes import LANES_MAX, swim_lanes
from reports.plots_routing import placement_against_load
from reports.plots_time import PHASES, latency_over_time, time_spent
from reports.tests.rows_by_hand import MS, request, sample
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "dynamo-kv"]


def arms_of(rows, samples=(), **options):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = finish_run(folder, header(), rows, samples, reports=False, **options)
    return make_arms(run.requests, run.fleet, run.routers)


@pytest.fixture(scope="module")
def rollouts():
    rows, samples = make_run(NAMES, sessions=24, turns=6, rollouts_a_step=8)
    return arms_of(rows, samples, ceilings=ceilings(rows))


@pytest.fixture(scope="module")
def chats():
    rows, samples = make_run(NAMES, sessions=60, turns=3)
    return arms_of(rows, samples, ceilings=ceilings(rows))


def test_the_longest_step_is_drawn_with_its_slowest_rollout_marked(rollouts):
    plot = swim_lanes(rollouts)
    assert plot.section == "rollouts"
    marks = [trace for trace in plot.data if trace["meta"].get("mark")]
    assert len(marks) == 2
    for place, mark in enumerate(marks):
        panel = [trace for trace in plot.data if trace["xaxis"] == mark["xaxis"] and trace is not mark]
        ends = [value for trace in panel for value in trace["x"] if value is not None]
        assert mark["x"][1] == max(ends)
        assert NAMES[place] in plot.layout["annotations"][place]["text"]


def test_a_session_has_the_same_height_for_every_router(rollouts):
    heights = {}
    for trace in swim_lanes(rollouts).data:
        for text, y in zip(trace.get("text", ()), trace["y"], strict=False):
            if text:
                heights.setdefault(text.split(" ")[0], set()).add(y)
    assert len(heights) == 8
    assert all(len(places) == 1 for places in heights.values())


def test_conversations_are_shown_around_the_slowest_and_no_more_than_fit(chats):
    plot = swim_lanes(chats)
    assert plot.section == "sessions"
    assert plot.layout["yaxis"]["range"][0] == LANES_MAX - 0.4
    slowest = max(chats[0].metrics["session_e2e_ms"]["max"], chats[1].metrics["session_e2e_ms"]["max"])
    longest = max(trace["x"][1] - trace["x"][0] for trace in plot.data if trace["meta"].get("mark"))
    assert longest == pytest.approx(slowest / 1_000, rel=0.3)


def test_the_phases_of_a_session_add_up_to_it():
    rows = [
        request(
            n,
            session="s",
            turn=n,
            sent_us=n * 1_000 * MS,
            routed_us=n * 1_000 * MS + 5 * MS,
            admitted_us=n * 1_000 * MS + 55 * MS,
            first_token_us=n * 1_000 * MS + 200 * MS,
            last_token_us=n * 1_000 * MS + 400 * MS,
            end_us=n * 1_000 * MS + 500 * MS,
        )
        for n in range(2)
    ]
    plot = time_spent(arms_of(rows))
    seconds = {trace["name"]: trace["x"][0] for trace in plot.data}
    assert seconds == pytest.approx(dict(zip(PHASES, (0.01, 0.1, 0.29, 0.4, 0.6), strict=True)))
    assert sum(seconds.values()) == pytest.approx(1.4)


def test_lanes_and_phases_show_the_sessions_that_the_figures_count():
    """Of two sessions, one began in the ramp and is whole all the same; the other ends in it."""
    rows = [
        request(
            n, session=session, turn=turn, phase=phase, sent_us=at, first_token_us=at + MS, last_token_us=at + 100 * MS
        )
        | {"second_token_us": None, "end_us": at + 100 * MS}
        for n, (session, turn, phase, at) in enumerate(
            (
                ("s0", 0, "warmup", 0),
                ("s0", 1, "steady", 900 * MS),
                ("s1", 0, "steady", 0),
                ("s1", 1, "cooldown", 950 * MS),
            )
        )
    ]
    (arm,) = arms_of(rows)
    assert arm.metrics["session_e2e_ms"]["max"] == 1_000
    assert swim_lanes([arm]).layout["annotations"][0]["text"] == "a: slowest s0, 1.0 s"
    assert sum(trace["x"][0] for trace in time_spent([arm]).data) == pytest.approx(1.0)


def test_an_unknown_phase_is_inside_the_next_one():
    plot = time_spent(arms_of([request()]))
    assert {trace["name"]: trace["x"][0] for trace in plot.data} == {"prefill": 0.2, "decode": 0.2}


def test_the_waterfall_ends_at_what_was_served(rollouts):
    plot = waterfall(rollouts)
    for place, arm in enumerate(rollouts):
        own = [trace for trace in plot.data if trace["meta"]["router"] == place]
        level = {
            stage: base + height
            for trace in own
            for stage, base, height in zip(trace["x"], trace["base"], trace["y"], strict=True)
        }
        assert level[STAGES[0]] == pytest.approx(100 * arm.metrics["hit_rate_ceiling"], abs=0.02)
        last = FALLS[1] if FALLS[1] in level else FALLS[0]
        assert level[last] == pytest.approx(level[STAGES[4]], abs=0.02)
        assert level[STAGES[4]] == pytest.approx(100 * arm.metrics["hit_rate"], abs=0.02)
        assert (STAGES[2] in level) == (arm.metrics["believed_hit_rate"] is not None)


def test_the_waterfall_has_no_place_for_a_belief_that_no_router_has():
    rows = [request(cached_tokens=60)]
    found = waterfall(arms_of(rows, ceilings={("a", 0): (80, 100)}))
    assert found.layout["xaxis"]["categoryarray"] == ["one infinite cache", "lost by placement or eviction", "served"]
    assert FALLS[1] not in found.note


def test_a_replica_has_the_same_colour_in_every_plot():
    """`r1` got nothing that was answered, and is still the second of three."""
    rows = [
        request(n, replica=name, status=word)
        for n, name, word in ((0, "r0", "ok"), (1, "r1", "error"), (2, "r2", "ok"))
    ]
    drawn = {plot.id: plot for plot in plots(arms_of(rows, [sample(name, running=1) for name in ("r0", "r1", "r2")]))}
    for name in ("lanes", "placement", "load-running"):
        plot = drawn[name]
        assert plot.replicas == ["r0", "r1", "r2"]
        metas = {trace["name"]: trace["meta"] for trace in plot.data if "replica" in trace["meta"]}
        assert metas["r2"] == {"replica": 2, "replicas": 3}


def test_what_takes_seconds_has_an_axis_in_seconds(chats):
    axes = {plot.id: plot.layout["xaxis"]["title"]["text"] for plot in plots(chats) if plot.id.startswith("ecdf-")}
    assert axes["ecdf-ttft_ms"] == "ms, log scale"
    assert axes["ecdf-session_e2e_ms"] == "s, log scale"


def test_sessions_of_one_turn_are_not_drawn_twice(chats):
    assert "ecdf-session_e2e_ms" not in [plot.id for plot in plots(arms_of([request(0), request(1)]))]


def test_latency_over_time_keeps_p95_above_the_median(chats):
    data = latency_over_time(chats, "ttft_ms").data
    for median, tail in zip(data[::2], data[1::2], strict=True):
        assert any(value is not None for value in median["y"])
        assert all(low <= high for low, high in zip(median["y"], tail["y"], strict=True) if low is not None)


def test_nothing_known_draws_nothing():
    failed = [
        request(status="error", first_token_us=None, last_token_us=None, second_token_us=None, chunk_gaps_us=None)
    ]
    assert plots(arms_of(failed)) != []  # where it went is still known
    for draw in (swim_lanes, time_spent, waterfall):
        assert draw(arms_of(failed)) is None
    assert latency_over_time(arms_of(failed), "ttft_ms") is None


def test_every_plot_is_plain_json_and_small(rollouts, chats):
    for arms in (rollouts, chats):
        for plot in plots(arms):
            text = json.dumps([plot.data, plot.layout], allow_nan=False)
            assert len(text) < 200_000, plot.id


def test_no_line_is_drawn_over_the_time_in_which_a_replica_was_dead():
    instants = [*range(0, 10_000_001, 500_000), *range(15_000_000, 20_000_001, 500_000)]
    samples = [sample("r0", t, running=3) for t in range(0, 20_000_001, 500_000)]
    samples += [sample("r1", t, running=4) for t in instants]
    plot = next(plot for plot in plots(arms_of([request()], samples)) if plot.id == "load-running")
    whole, broken = (dict(zip(trace["x"], trace["y"], strict=True)) for trace in plot.data)
    assert None not in whole.values()
    assert [x for x, y in broken.items() if y is None] == [10.5]


def test_a_correlation_that_chance_explains_is_no_behaviour():
    def sign(r, turns):
        rows = [
            request(n, replica=f"r{n % 2}", sent_us=n * 1_000, first_token_us=None, second_token_us=None)
            for n in range(turns)
        ]
        samples = [sample(f"r{k}", 0, active_decode_blocks=5 + k) for k in range(2)]
        (arm,) = arms_of(rows, samples)
        return placement_against_load([replace(arm, metrics={**arm.metrics, "new_session_load_r": r})]).note

    assert sign(0.15, 20).endswith("a shows neither (r 0.15)")
    assert sign(-0.5, 20).endswith("a avoids load (r -0.50)")
    assert sign(0.15, 200).endswith("a seeks load (r 0.15)")
    assert sign(0.02, 200).endswith("a shows neither (r 0.02)")


def test_the_step_that_is_drawn_is_the_longest_of_any_router():
    """Step 1 is longer for both together, step 0 for one of them."""
    lengths = {("a", 0): 900, ("b", 0): 100, ("a", 1): 600, ("b", 1): 600}
    rows = [
        request(step, router=router, rollout_step=step, last_token_us=ms * 1_000, end_us=1_000 * MS)
        | {"first_token_us": 50 * MS, "second_token_us": 60 * MS}
        for (router, step), ms in lengths.items()
    ]
    assert swim_lanes(arms_of(rows)).title == "Rollouts of step 0"
