import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from reports import METRICS, RecordError, RunFolderError, finish_run, read_run, render_reports, start_run
from reports.tests.rows_by_hand import request
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "session-ring", "dynamo-kv"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rows, samples = make_run(NAMES, sessions=24, turns=4, repeats=2)
    return finish_run(folder, header(), rows, samples, routers=NAMES, ceilings=ceilings(rows))


def test_a_finished_run_leaves_the_files_of_the_contract(finished):
    assert sorted(path.name for path in finished.folder.iterdir()) == [
        "fleet.parquet",
        "report.html",
        "report.md",
        "requests.parquet",
        "run.json",
    ]


def test_run_json_has_the_keys_of_the_contract(finished):
    document = json.loads((finished.folder / "run.json").read_text())
    assert list(document) == [
        "schema_version",
        "status",
        "scenario",
        "mode",
        "seed",
        "environment",
        "routers",
        "repeats",
        "health",
        "verdict",
        "started_at",
        "wall_s",
        "digests",
    ]
    assert document["schema_version"] == 1
    assert list(document["routers"]) == NAMES
    for metrics in document["routers"].values():
        assert list(metrics) == list(METRICS)
    assert [(repeat["router"], repeat["repeat"]) for repeat in document["repeats"]] == [
        (name, repeat) for name in NAMES for repeat in (0, 1)
    ]
    assert document["routers"]["dynamo-kv"]["requests"] == 2 * 24 * 4
    assert document["routers"]["dynamo-kv"]["hit_rate_ceiling"] is not None


def test_no_figure_is_nan_and_none_has_an_accidental_digit(finished):
    text = (finished.folder / "run.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text

    def floats(value):
        if isinstance(value, float):
            yield value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from floats(part)

    document = json.loads(text)
    assert all(value == round(value, 6) for value in floats(document["routers"]))


def test_a_run_reads_back_as_it_was_written(finished):
    again = read_run(finished.folder)
    assert again.to_json() == json.loads(json.dumps(finished.to_json()))
    pd.testing.assert_frame_equal(again.requests, finished.requests)
    pd.testing.assert_frame_equal(again.fleet, finished.fleet)


_SAME = """
import hashlib, pathlib, sys
from reports import finish_run, read_run
from reports.tests.synthetic import ceilings, header, make_run
names = ["round-robin", "dynamo-kv", "session-ring"]
rows, samples = make_run(names, sessions=16, turns=4, rollouts_a_step=8, sim=True)
folder = pathlib.Path(sys.argv[1])
finish_run(folder, header(), rows, samples, ceilings=ceilings(rows))
run = read_run(folder)
files = [(folder / name).read_text() for name in ("run.json", "report.md")]
parts = [*files, run.requests.to_csv(), run.fleet.to_csv()]
print(hashlib.sha256("".join(parts).encode()).hexdigest())
"""


def test_the_files_do_not_depend_on_the_hash_seed(tmp_path):
    found = set()
    for seed in ("0", "4242"):
        command = [sys.executable, "-c", _SAME, str(tmp_path / seed)]
        ran = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        found.add(ran.stdout)
    assert len(found) == 1


def test_a_run_that_was_killed_can_be_read(tmp_path):
    start_run(tmp_path, header(wall_s=None))
    run = read_run(tmp_path)
    assert (run.status, run.wall_s, run.routers) == ("running", None, {})
    assert run.health["verdict"] == "invalid"
    assert run.requests.empty


def test_a_partial_run_has_figures_of_what_there_is(tmp_path):
    run = finish_run(tmp_path, header(status="partial"), [request(router="a")], [], routers=["a", "b"])
    assert read_run(tmp_path).status == "partial"
    assert run.routers["a"]["requests"] == 1
    assert run.routers["b"]["requests"] == 0
    assert run.routers["b"]["ttft_ms"] is None


def test_an_empty_run_leaves_readable_files(tmp_path):
    run = finish_run(tmp_path, header(status="partial"), [], [])
    assert run.health["verdict"] == "invalid"
    assert read_run(tmp_path).routers == {}


def test_a_ceiling_that_is_missing_for_one_repeat_leaves_the_pooled_one_unknown(tmp_path):
    rows = [request(0, cached_tokens=0), request(0, repeat=1, cached_tokens=0)]
    run = finish_run(tmp_path, header(), rows, [], ceilings={("a", 0): (50, None)}, reports=False)
    assert run.routers["a"]["hit_rate_ceiling"] is None
    assert [repeat["metrics"]["hit_rate_ceiling"] for repeat in run.repeats] == [0.5, None]


@pytest.mark.parametrize(
    ("changes", "told"), [({"sede": 1}, "unknown sede"), ({"status": "done"}, "running, complete, partial")]
)
def test_a_wrong_header_is_refused_before_anything_is_written(tmp_path, changes, told):
    with pytest.raises(RecordError, match=told):
        finish_run(tmp_path / "run", header(**changes), [], [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no run.json"),
        ('{"schema', "cannot be read"),
        ('{"schema_version": 99}', "schema_version 99"),
        ('{"schema_version": 1}', "no key 'status'"),
        ("[]", "schema_version None"),
    ],
)
def test_a_folder_without_a_readable_run_is_an_error_with_the_mend(tmp_path, text, told):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=told):
        read_run(tmp_path)


def test_a_run_of_an_earlier_version_reads_with_its_missing_figures_unknown(tmp_path):
    run = finish_run(tmp_path, header(), [request()], [], reports=False)
    document = json.loads((tmp_path / "run.json").read_text())
    for metrics in (*document["routers"].values(), *(each["metrics"] for each in document["repeats"])):
        del metrics["group_completion_ms"], metrics["tail_idle_replica_s"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    again = read_run(tmp_path)
    assert list(again.routers["a"]) == list(run.routers["a"]) == list(METRICS)
    assert again.routers["a"]["tail_idle_replica_s"] is None
    render_reports(again)
