import pytest

from reports import ReportError, finish_run, merge_runs, read_run
from reports.tests.synthetic import ceilings, header, make_run

SCENARIO = {"name": "quickstart", "workload": {"kind": "multi-turn"}, "load": {"concurrency": 16}}


def made(folder, names, *, seed=1, scenario=SCENARIO, **changes):
    rows, samples = make_run(names, seed=seed, sessions=16, turns=4)
    head = header(scenario=scenario, seed=seed, **changes)
    return finish_run(folder, head, rows, samples, routers=names, ceilings=ceilings(rows), reports=False)


def test_two_runs_are_the_comparison_that_one_run_would_have_been(tmp_path):
    names = ["round-robin", "dynamo-kv"]
    whole = made(tmp_path / "whole", names)
    parts = [made(tmp_path / name, [name]) for name in names]
    merged = merge_runs([read_run(part.folder) for part in parts], tmp_path / "merged")
    assert list(merged.routers) == names
    assert merged.health["verdict"] == "ok"
    found, expected = (read_run(one.folder).verdict["winners"] for one in (merged, whole))
    for key in ("winner", "best", "contenders", "basis"):
        assert {address: one[key] for address, one in found.items()} == {a: one[key] for a, one in expected.items()}
    assert read_run(merged.folder).routers == read_run(whole.folder).routers
    assert (merged.folder / "report.html").exists()


def test_the_order_of_runs_changes_no_winner(tmp_path):
    parts = [made(tmp_path / name, [name]) for name in ("round-robin", "session-ring", "dynamo-kv")]
    one = merge_runs(parts, tmp_path / "one", reports=False).verdict["winners"]
    two = merge_runs(parts[::-1], tmp_path / "two", reports=False).verdict["winners"]
    assert {key: value["winner"] for key, value in one.items()} == {key: value["winner"] for key, value in two.items()}


def test_a_name_in_two_runs_gets_its_folder(tmp_path):
    runs = [made(tmp_path / "old" / "run", ["dynamo-kv"]), made(tmp_path / "new" / "run", ["dynamo-kv", "random"])]
    merged = merge_runs(runs, tmp_path / "merged", reports=False)
    assert list(merged.routers) == ["dynamo-kv@old/run", "dynamo-kv@new/run", "random"]
    assert set(merged.requests["router"].unique()) == set(merged.routers)
    assert merged.verdict["winners"]["ttft_ms.p50"]["winner"] in (None, "random")


def test_other_sessions_are_kept_apart_and_the_difference_is_told(tmp_path):
    other = {**SCENARIO, "load": {"concurrency": 4}}
    runs = [made(tmp_path / "a", ["dynamo-kv"]), made(tmp_path / "b", ["random"], scenario=other)]
    merged = merge_runs(runs, tmp_path / "merged", reports=False)
    assert merged.health["verdict"] == "degraded"
    assert "load.concurrency 16 there, 4 here" in merged.health["reasons"][0]
    one, two = (set(merged.requests[merged.requests["router"] == name]["session"]) for name in merged.routers)
    assert one
    assert one.isdisjoint(two)


def test_the_worst_health_is_the_comparisons(tmp_path):
    bad = made(tmp_path / "bad", ["random"])
    bad.health["verdict"], bad.health["reasons"] = "invalid", ["a process was lost"]
    merged = merge_runs([made(tmp_path / "good", ["dynamo-kv"]), bad], tmp_path / "merged", reports=False)
    assert merged.health == {"verdict": "invalid", "reasons": ["bad: a process was lost"]}


def test_one_run_is_no_comparison(tmp_path):
    run = made(tmp_path / "a", ["random"])
    with pytest.raises(ReportError, match="at least two"):
        merge_runs([run], tmp_path / "merged")
    with pytest.raises(ReportError, match="named twice"):
        merge_runs([run, run], tmp_path / "merged")
