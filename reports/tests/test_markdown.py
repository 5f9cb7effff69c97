from reports import finish_run, read_run, start_run
from reports.markdown import markdown
from reports.tests.synthetic import ceilings, header, make_run


def test_the_page_shows_no_time_and_no_machine(tmp_path):
    rows, samples = make_run(["random", "dynamo-kv"], sessions=12, turns=4, sim=True)
    here = finish_run(tmp_path / "a", header(), rows, samples, ceilings=ceilings(rows))
    there = header(environment={"cores": 64}, started_at="2031-05-05T00:00:00Z", wall_s=99.0)
    finish_run(tmp_path / "b", there, rows, samples, ceilings=ceilings(rows))
    page = (tmp_path / "a" / "report.md").read_bytes()
    assert page == (tmp_path / "b" / "report.md").read_bytes() == markdown(here).encode()


def test_the_page_is_a_table_with_the_winner_in_bold(tmp_path):
    rows, samples = make_run(["random", "dynamo-kv"], sessions=40, turns=4, sim=True)
    text = markdown(finish_run(tmp_path, header(), rows, samples, reports=False))
    row = next(line for line in text.splitlines() if line.startswith("| Hit rate |"))
    assert row.count("|") == 6
    assert "**" in row
    assert row.endswith("| dynamo-kv |")
    assert len(text) < 8_000


def test_a_run_without_figures_has_a_page(tmp_path):
    start_run(tmp_path, header())
    assert "No figures" in markdown(read_run(tmp_path))


def test_a_name_with_a_bar_stays_in_its_cell(tmp_path):
    rows, samples = make_run(["random"], sessions=8, turns=3, sim=True)
    rows, samples = ([row | {"router": "a|b"} for row in part] for part in (rows, samples))
    text = markdown(finish_run(tmp_path, header(), rows, samples, reports=False))
    assert "| | unit | a\\|b | winner |" in text
