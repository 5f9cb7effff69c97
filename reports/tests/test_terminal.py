import io

import pytest
from rich.console import Console

from reports import finish_run, mode_comparison, read_run, start_run, terminal_table
from reports.terminal import difference, folded
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "session-ring", "dynamo-kv", "pure-kv-affinity", "random", "least-requests"]


def printed(renderable, width=140):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def run_of(folder, names, **options):
    rows, samples = make_run(names, sessions=16, turns=4, **options)
    return finish_run(folder, header(), rows, samples, routers=names, ceilings=ceilings(rows), reports=False)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_any_number_of_routers_fits_a_hundred_columns(tmp_path, count):
    text = printed(terminal_table(run_of(tmp_path, NAMES[:count])))
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert text.count("TTFT p99 ms") == 1


def test_a_long_name_is_broken_after_a_hyphen_and_not_cut(tmp_path):
    rows, samples = make_run(["random"], sessions=8, turns=3)
    name = "a-very-long-name-of-a-router:with-a-variant"
    rows, samples = ([row | {"router": name} for row in part] for part in (rows, samples))
    text = printed(terminal_table(finish_run(tmp_path, header(), rows, samples, reports=False)))
    assert "".join(text.split()).replace("%", "").count("variant") >= 1
    assert max(map(len, text.splitlines())) <= 100


def test_the_table_shows_what_a_comparison_needs(tmp_path):
    text = printed(terminal_table(run_of(tmp_path, NAMES[:3])))
    for row in (
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "Session end to end p99",
        "Output tokens/s",
        "Hit rate",
        "Placement",
        "Load imbalance",
        "Errors",
        "winner",
    ):
        assert row in text, row
    lines = text.splitlines()
    assert lines[1].startswith("health ok")


def test_rollout_figures_come_first(tmp_path):
    text = printed(terminal_table(run_of(tmp_path, NAMES[:2], rollouts_a_step=8)))
    assert text.index("Step makespan p50") < text.index("TTFT p50")


def test_a_run_that_never_ended_says_so(tmp_path):
    start_run(tmp_path, header())
    text = printed(terminal_table(read_run(tmp_path)))
    assert "running" in text
    assert "No figures" in text
    assert "health invalid" in text


def test_two_modes_stand_side_by_side_with_the_difference(tmp_path):
    live, sim = run_of(tmp_path / "live", NAMES[:5], seed=1), run_of(tmp_path / "sim", NAMES[:4], seed=2, sim=True)
    text = printed(mode_comparison(live, sim))
    assert max(map(len, text.splitlines())) <= 100
    for word in ("live", "sim", "diff", "TTFT p99", "Hit rate"):
        assert word in text
    assert "not compared: random" in text
    same = printed(mode_comparison(live, live))
    assert "+" not in same.split("simulation\n")[1]


def test_the_difference_is_a_share_of_the_simulation():
    assert difference(110, 100) == pytest.approx(0.1)
    assert difference(0, 0) == 0
    assert difference(1, 0) is None
    assert difference(None, 5) is None


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_name_is_broken_within_a_word_at_any_width(tmp_path, width):
    text = printed(terminal_table(run_of(tmp_path, NAMES[:3])), width)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    words = text.split("requests/s")[1].split("TTFT p50")[0].replace("-", " ").split()
    assert {"round", "robin", "session"} <= set(words)
    tables = sum(line.rstrip().endswith("winner") for line in text.splitlines())
    assert (tables == 1) == (width >= 80)


def test_more_routers_than_a_table_holds_are_spread_evenly_over_tables(tmp_path):
    rows, samples = make_run(NAMES[:1], sessions=8, turns=3)
    names = [f"router-{number}" for number in range(7)]
    rows, samples = ([row | {"router": name} for name in names for row in part] for part in (rows, samples))
    text = printed(terminal_table(finish_run(tmp_path, header(), rows, samples, reports=False)))
    assert text.count("TTFT p99 ms") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_a_name_is_folded_where_a_reader_would():
    assert folded("round-robin") == "round-robin"
    assert folded("pure-kv-affinity") == "pure-kv-\naffinity"
    assert folded("my_router.py:MyPolicy") == "my_router.py:\nMyPolicy"
    assert folded("abcdefghijklmnopqrst") == "abcdefghijklmn\nopqrst"


def test_a_name_in_brackets_is_no_markup(tmp_path):
    rows, samples = make_run(["random"], sessions=8, turns=3)
    rows, samples = ([row | {"router": "mine[red]x"} for row in part] for part in (rows, samples))
    run = finish_run(tmp_path, header(), rows, samples, reports=False)
    assert "mine[red]x" in printed(terminal_table(run))
    assert "mine[red]x" in printed(mode_comparison(run, run))
