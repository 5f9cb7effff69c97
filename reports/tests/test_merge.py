import pytest

from reports import ReportError, finish_run, merge_runs, read_run
from reports.tests.rows_by_hand import MS, request
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
    assert "load.concurrency is 4 where a has 16" in merged.health["reasons"][0]
    assert merged.verdict["sentences"][0] == (
        "Beware: b is another experiment than a: this compares what was asked as much as who was asked."
    )
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


def loops(folder, *, closed):
    """The same two routers in an open loop and in a closed one; `closed` is the TTFT of the second in that one."""
    runs = []
    for name, driver, slow in (("open", "rate", 900), ("shut", "sessions", closed)):
        rows = [
            request(n, router=router, session=f"s{n}", sent_us=n * 1_000, first_token_us=n * 1_000 + ttft * MS)
            | {"last_token_us": n * 1_000 + ttft * MS + 200 * MS, "end_us": n * 1_000 + ttft * MS + 200 * MS}
            for router, ttft in (("fast", 100), ("slow", slow))
            for n in range(40)
        ]
        scenario = {"name": "loops", "load": {"driver": driver}}
        runs.append(finish_run(folder / name, header(scenario=scenario), rows, [], reports=False))
    return runs


def test_the_open_loop_leads_and_a_disagreement_with_the_closed_one_is_told_first(tmp_path):
    merged = merge_runs(loops(tmp_path, closed=200), tmp_path / "merged")
    first, primary, verdict, *_ = merged.verdict["sentences"]
    assert first == (
        "Beware: the loops disagree. At TTFT p99, slow has 9.00 times the value of fast in the open loop and 2.00 "
        "times in the closed one."
    )
    assert primary.startswith("Both loops are here: open is an open loop and counts, shut is a closed one")
    assert "fast@open" in verdict
    assert "shut" not in verdict
    text = (merged.folder / "report.md").read_text("utf-8")
    assert "| TTFT p99 | slow / fast | 9.00 | 2.00 **!** |" in text
    assert "open: rate driver (open loop)" in text
    assert "they disagree" in (merged.folder / "report.html").read_text("utf-8")


def test_loops_that_agree_are_named_without_a_warning(tmp_path):
    merged = merge_runs(loops(tmp_path, closed=1_000), tmp_path / "merged", reports=False)
    assert "agree within" in merged.verdict["sentences"][0]
    twice = [loops(tmp_path / name, closed=900)[0] for name in ("x", "y")]
    assert "loops" not in merge_runs(twice, tmp_path / "z", reports=False).verdict
