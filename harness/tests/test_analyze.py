"""`analyze` and `convert`: from a trace to a verdict and to native rows, as a user would ask."""

import json
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
