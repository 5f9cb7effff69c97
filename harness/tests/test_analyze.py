"""`analyze` and `convert`: from a trace to a verdict and to native rows, as a user would ask."""

import json
import re
from pathlib import Path

import pytest

from harness.cli import run_cli

TRACES = Path(__file__).resolve().parents[2] / "workloads" / "tests" / "data"


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv", "burstgpt-old.csv", "sharegpt.json", "weka.json"])
def test_a_trace_is_analysed_by_its_content(capsys, name):
    assert run_cli(["analyze", str(TRACES / name)]) == 0
    said = capsys.readouterr().out
    assert "verdict:" in said
    assert "hit rate of one endless cache" in said


def test_a_scenario_is_analysed_with_its_own_fleet_and_preset(capsys):
    assert run_cli(["analyze", "quickstart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["analysis"]["requests"] == 265
    assert 0.3 < found["prefill_fraction"] < 0.9
    assert found["verdict"]["worth_it"]


def test_traffic_with_nothing_to_reuse_is_not_worth_it(capsys):
    assert run_cli(["analyze", "uniform-unique", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["verdict"]["worth_it"]


def test_a_foreign_trace_becomes_native_rows_with_a_sidecar(capsys, tmp_path):
    out = tmp_path / "native.jsonl"
    assert run_cli(["convert", str(TRACES / "qwen-bailian.jsonl"), str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
    assert all("hash_ids" in row for row in rows)
    assert (tmp_path / "native.jsonl.meta.json").exists()
    capsys.readouterr()
    assert run_cli(["analyze", str(out)]) == 0
    assert run_cli(["convert", str(TRACES / "mooncake.jsonl"), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_broken_trace_names_file_and_line(capsys, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((TRACES / "mooncake.jsonl").read_text() + "{not json\n")
    assert run_cli(["analyze", str(broken)]) == 2
    assert "broken.jsonl:3" in capsys.readouterr().err


def figures_of(page):
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return {figure["id"]: figure for figure in json.loads(found.group(1))}


def test_the_page_shows_the_curve_the_lengths_and_the_dilution_of_the_analysis(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run_cli(["analyze", "quickstart", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    text = page.read_text("utf-8")
    assert "worth it" in text
    assert "Worth it: about" in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)  # nothing is fetched
    drawn = figures_of(text)
    by_size = drawn["hit-rate-by-size"]["data"][0]
    assert by_size["x"] == [16 * blocks for blocks in found["analysis"]["cache_blocks"]]
    assert by_size["y"] == [round(100 * rate, 2) for rate in found["analysis"]["cache_hit_rates"]]
    bars = [count for trace in drawn["shared-lengths"]["data"] for *_, count in trace["customdata"]]
    assert sum(bars) == found["analysis"]["requests"]
    random = drawn["dilution"]["data"][1]
    assert random["x"] == [row["replicas"] for row in found["analysis"]["dilution"]]
    assert random["y"] == [round(100 * row["hit_rate"], 2) for row in found["analysis"]["dilution"]]


def test_a_page_of_traffic_with_nothing_in_common_can_be_drawn(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run_cli(["analyze", "uniform-unique", "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out.replace("\n", "")
    assert "not worth it" in page.read_text("utf-8")
    assert run_cli(["analyze", "uniform-unique", "--html", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_line(capsys, tmp_path):
    assert run_cli(["analyze", "uniform-unique", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_part_of_a_trace_is_analysed_and_converted_with_the_keys_of_its_workload(capsys, tmp_path):
    whole = tmp_path / "whole.jsonl"
    rows = [{"timestamp": 1000 * n, "input_length": 600, "output_length": 9, "hash_ids": [0, n + 1]} for n in range(40)]
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_cli(["analyze", str(whole), "--json", "--set", "sample=0.5"]) == 0
    taken = json.loads(capsys.readouterr().out)["analysis"]["requests"]
    assert 8 < taken < 32
    out = tmp_path / "part.jsonl"
    assert run_cli(["convert", str(whole), str(out), "--set", "sample=0.5", "--set", "speedup=2"]) == 0
    found = [json.loads(line)["timestamp"] for line in out.read_text().splitlines()]
    assert len(found) == taken
    assert all(at % 500 == 0 for at in found)
    assert max(found) <= 39_000 / 2


def test_a_folder_of_traces_is_one_trace(capsys, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text((TRACES / "mooncake.jsonl").read_text())
    assert run_cli(["analyze", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["analysis"]["requests"] == 4


@pytest.mark.parametrize("what", ["quickstart", "multi-turn", str(TRACES / "mooncake.jsonl")])
def test_a_key_that_the_workload_does_not_have_is_named(capsys, what):
    assert run_cli(["analyze", what, "--set", "sampel=0.5"]) == 2
    assert "unknown key 'sampel'" in capsys.readouterr().err


def test_session_affinity_is_advised_only_where_a_session_has_a_second_turn(capsys, tmp_path):
    def verdict(what):
        assert run_cli(["analyze", what, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["verdict"]["text"]

    ids = [[i % 5 * 4, i % 5 * 4 + 1, i % 5 * 4 + 2, 100 + i] for i in range(60)]
    rows = ({"timestamp": 10 * i, "input_length": 2048, "output_length": 4, "hash_ids": ids[i]} for i in range(60))
    trace = tmp_path / "moon.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert "Try session affinity first" in verdict("quickstart")
    assert "Session affinity has nothing to hold on to, because no session has a second turn" in verdict(str(trace))


def test_the_kind_trace_without_its_file_says_what_to_give(capsys):
    assert run_cli(["analyze", "trace"]) == 2
    assert "a trace is named by its file" in capsys.readouterr().err
