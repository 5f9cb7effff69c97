import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reports import finish_run, read_run, start_run
from reports.html import html, standing
from reports.plot_parts import log_ticks
from reports.plots import CURVE_POINTS
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "session-ring", "dynamo-kv"]
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    rows, samples = make_run(NAMES, sessions=24, turns=4, rollouts_a_step=8)
    return finish_run(tmp_path_factory.mktemp("run"), header(), rows, samples, routers=NAMES, ceilings=ceilings(rows))


@pytest.fixture(scope="module")
def page(finished):
    return (finished.folder / "report.html").read_text(encoding="utf-8")


def figures_of(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_fetches_nothing(page):
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert not re.search(r"<(?:script|img|iframe|link)[^>]+src=", page)
    assert re.findall(r'<link[^>]+href="([^"]*)"', page) == ["data:,"]


def test_the_plotting_library_is_inside_once(page):
    assert page.count('id="plotly-packed"') == 1
    assert 1_000_000 < len(page) < 3_000_000


def test_verdict_and_health_come_before_any_figure(page, finished):
    body = page[page.index("<body>") :]
    assert body.index('class="pill">ok') < body.index(finished.verdict["sentences"][0][:20]) < body.index("<table")


def test_every_plot_of_the_run_is_there(page):
    assert [figure["id"] for figure in figures_of(page)] == [
        "step-makespan",
        "ecdf-ttft_ms",
        "ecdf-tpot_ms",
        "ecdf-e2e_ms",
        "ecdf-session_e2e_ms",
        "time-ttft_ms",
        "time-tpot_ms",
        "lanes",
        "time-spent",
        "hit-rate",
        "placement",
        "waterfall",
        "placement-load",
        "load-running",
        "load-waiting",
        "load-used_blocks",
    ]
    for figure in figures_of(page):
        assert f'id="{figure["id"]}"' in page


def test_a_distribution_rises_to_all_requests_at_the_largest_value(page, finished):
    figure = next(figure for figure in figures_of(page) if figure["id"] == "ecdf-ttft_ms")
    for trace in figure["data"]:
        assert trace["y"] == sorted(trace["y"])
        assert trace["x"] == sorted(trace["x"])
        assert trace["y"][-1] == 100
        assert trace["x"][-1] == finished.routers[trace["name"]]["ttft_ms"]["max"]
        assert len(trace["x"]) <= CURVE_POINTS


@pytest.mark.parametrize("span", [(10, 12), (30, 310), (7, 21), (0.5, 900), (5, 5), (1, 90_000)])
def test_a_log_axis_has_ticks_that_can_be_read(span):
    ticks = log_ticks(list(map(float, span)))
    assert 1 <= len(ticks["tickvals"]) <= 14
    assert all(0.95 * span[0] <= tick <= 1.05 * span[1] for tick in ticks["tickvals"])


def test_names_from_outside_cannot_become_markup(tmp_path):
    rows, samples = make_run(["random", "dynamo-kv"], sessions=8, turns=3)
    evil = "</script><script>alert(1)</script>"
    for part in (*rows, *samples):
        part["router"] = evil if part["router"] == "random" else part["router"]
    page = html(finish_run(tmp_path, header(scenario={"name": "<b>x", "about": evil}), rows, samples, reports=False))
    assert "<script>alert" not in page
    assert "<b>x" not in page
    assert evil in [trace["name"] for trace in figures_of(page)[0]["data"]]


def test_a_run_that_never_ended_has_a_page(tmp_path):
    start_run(tmp_path, header(wall_s=None))
    page = html(read_run(tmp_path))
    assert "No figures" in page
    assert figures_of(page) == []


def test_many_replicas_are_drawn_as_a_band(tmp_path):
    rows, samples = make_run(["random"], sessions=20, turns=3, replicas=32)
    page = html(finish_run(tmp_path, header(), rows, samples, reports=False))
    load = next(figure for figure in figures_of(page) if figure["id"] == "load-running")
    assert [trace["name"] for trace in load["data"]] == ["lowest of 32", "median of 32", "highest of 32"]


def test_a_hundred_thousand_requests_stay_under_six_megabytes(tmp_path):
    chance, count = np.random.default_rng(1), 100_000
    sent = np.sort(chance.integers(0, 600_000_000, count))
    first = sent + chance.gamma(2, 50_000, count).astype(np.int64)
    last = first + chance.integers(100_000, 3_000_000, count)
    columns = {
        "router": [NAMES[n % 3] for n in range(count)],
        "repeat": np.zeros(count, dtype=np.int64),
        "request_id": [f"q{n}" for n in range(count)],
        "session": [f"s{n // 30}" for n in range(count)],
        "turn": np.arange(count) // 3 % 10,
        "replica": [f"r{n}" for n in chance.integers(0, 8, count)],
        "sent_us": sent,
        "first_token_us": first,
        "last_token_us": last,
        "end_us": last,
        "phase": ["steady"] * count,
        "prompt_tokens": chance.integers(500, 9_000, count),
        "cached_tokens": chance.integers(0, 500, count),
        "output_tokens": chance.integers(2, 200, count),
        "status": ["ok"] * count,
    }
    finish_run(tmp_path, header(scenario={"name": "large"}), columns, [])
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def browser():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: the page was not opened, its plots are unproven here")
    return found


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_every_plot_without_a_console_error(finished, page, tmp_path, scheme):
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--dump-dom",
        Path(finished.folder / "report.html").resolve().as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    figures = figures_of(page)
    assert f'data-plots="{len(figures)}"' in ran.stdout
    assert ran.stdout.count('class="plot-container') >= len(figures)
    assert "could not draw" not in ran.stdout.split("<script")[0]


def test_a_run_that_has_a_warning_is_not_said_to_have_nothing_against_it(finished):
    flag = {"kind": "preempted", "router": "a", "text": "a: preempted"}

    def told(health="ok", flags=(), mode="live"):
        return standing(replace(finished, health={"verdict": health}, verdict={"flags": list(flags)}, mode=mode))

    assert told() == "Nothing speaks against it."
    assert "beware" in told(flags=[flag])
    assert "may not come from the routers" in told("degraded")
    assert "may not come" not in told("degraded", mode="sim")  # virtual time has no machine
