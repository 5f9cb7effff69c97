import json

import pytest

from reports import (
    METRICS,
    BaselineError,
    ReportError,
    RunFolderError,
    default_rules,
    finish_run,
    gate,
    list_baselines,
    read_figures,
    save_baseline,
    start_run,
)
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "dynamo-kv"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows, samples = make_run(NAMES, sessions=20, turns=4, repeats=3)
    folder = tmp_path_factory.mktemp("run")
    return finish_run(folder, header(), rows, samples, routers=NAMES, ceilings=ceilings(rows), reports=False)


def test_a_baseline_is_small_and_judges_as_the_run_itself_would(run, tmp_path):
    path = save_baseline(run, "main", tmp_path)
    assert path.stat().st_size < 60_000
    saved = read_figures("main", tmp_path)
    assert list(saved.routers["round-robin"]) == list(METRICS)
    live = default_rules()
    current = read_figures(run.folder)
    assert gate(current, saved, live).to_json() == gate(current, current, live).to_json()


def test_the_same_run_saved_twice_is_the_same_bytes(run, tmp_path):
    one, two = save_baseline(run, "one", tmp_path), save_baseline(read_figures(run.folder), "two", tmp_path)
    assert one.read_bytes() == two.read_bytes()


def test_a_baseline_is_not_written_over_by_accident(run, tmp_path):
    save_baseline(run, "main", tmp_path)
    with pytest.raises(BaselineError, match="--replace"):
        save_baseline(run, "main", tmp_path)
    save_baseline(run, "main", tmp_path, replace=True)
    with pytest.raises(BaselineError, match="can be a file name"):
        save_baseline(run, "../main", tmp_path)


def test_a_run_that_is_no_measure_is_no_baseline(tmp_path):
    start_run(tmp_path / "run", header())
    pending = read_figures(tmp_path / "run")
    with pytest.raises(BaselineError, match="--force"):
        save_baseline(pending, "main", tmp_path)
    save_baseline(pending, "main", tmp_path, force=True)


def test_baselines_are_listed_and_other_files_are_not(run, tmp_path):
    save_baseline(run, "b", tmp_path)
    save_baseline(run, "a", tmp_path)
    (tmp_path / "other.json").write_text("{}")
    assert list(list_baselines(tmp_path)) == ["a", "b"]
    assert list_baselines(tmp_path / "none") == {}


def test_a_place_that_holds_no_figures_says_what_to_do(run, tmp_path):
    with pytest.raises(BaselineError, match="baseline list"):
        read_figures("nope", tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BaselineError, match="cannot be read"):
        read_figures(tmp_path / "x.json")
    with pytest.raises(BaselineError, match="give its folder"):
        read_figures(run.folder / "run.json")
    (tmp_path / "both" / "live").mkdir(parents=True)
    (tmp_path / "both" / "live" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match="a run of each mode"):
        read_figures(tmp_path / "both")
    document = json.loads(save_baseline(run, "new", tmp_path).read_text())
    (tmp_path / "new.json").write_text(json.dumps(document | {"schema_version": 99}))
    with pytest.raises(BaselineError, match="schema_version 99"):
        read_figures("new", tmp_path)
    del document["health"]
    (tmp_path / "new.json").write_text(json.dumps(document))
    with pytest.raises(BaselineError, match="'health'"):
        read_figures("new", tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": ' + "[" * 100_000, '{"a":' * 100_000])
def test_brackets_without_an_end_are_no_figures(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ReportError, match="deeper"):
        read_figures(tmp_path)
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ReportError, match="deeper"):
        read_figures(tmp_path / "b.json")
