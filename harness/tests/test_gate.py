"""`gate`, `baseline` and `report` on the command line: exit codes, files, and the jobs that docs/ci describes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from harness.cli import run_cli
from harness.report_cli import DIRECTORY
from reports import BASELINE_FOLDER, EXPORTS, HealthFacts, finish_run, read_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "workload.sessions=24", "--set", "load.concurrency=8", "--quiet"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, the same run again, a run of another load, and a baseline of the first."""
    folder = tmp_path_factory.mktemp("gate")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name, more in (("base", []), ("again", []), ("other", ["--set", "load.concurrency=4"])):
            assert run_cli(["run", "quickstart", "--mode", "sim", "--out", name, *SMALL, *more]) == 0
        assert run_cli(["baseline", "save", "base", "--name", "main"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def test_the_same_simulation_passes_and_leaves_its_verdict_in_the_folder(capsys):
    assert run_cli(["gate", "--baseline", "main", "--current", "again"]) == 0
    said = capsys.readouterr()
    assert "gate PASS" in said.out
    assert "relative ttft_ms:p99:+10%" in said.out
    assert said.err == ""
    assert json.loads(Path("again/gate.json").read_text())["outcome"] == "pass"
    assert Xml.parse("again/junit.xml").getroot().get("failures") == "0"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--baseline", "main", "--current", "other"], 3, "other-load"),
        (["--baseline", "main", "--current", "again", "--rules", "strict.toml"], 1, "ttft_ms: p(99)<1"),
        (["--current", "again", "--rules", "strict.toml"], 1, "regression"),
        (["--baseline", "nope", "--current", "again"], 2, "baseline list"),
        (["--baseline", "main", "--current", "nope"], 2, "no run folder"),
        (["--baseline", "main"], 2, "--current"),
        (["--current", "again"], 2, "needs a baseline"),
        (["--baseline", "main", "--current", "again", "--rules", "wrong.toml"], 2, "did you mean ttft_ms"),
        (["--baseline", "main", "--current", "again", "--rules", "none.toml"], 2, "cannot be read"),
        (["--baseline", "main", "--current", "again", "--junit", "no/where.xml"], 2, "cannot be written"),
    ],
)
def test_every_other_verdict_is_an_exit_code_and_one_line(capsys, arguments, code, told):
    Path("strict.toml").write_text('[bounds]\nttft_ms = ["p(99)<1"]\n')
    Path("wrong.toml").write_text('[bounds]\nttft_m = ["p(99)<1"]\n')
    assert run_cli(["gate", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert told in lines[0]


def test_the_verdict_is_json_when_asked(capsys):
    assert run_cli(["gate", "--baseline", "main", "--current", "other", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 3
    assert document["complaints"][0]["code"] == "other-load"
    assert run_cli(["gate", "--baseline", "main", "--current", "other", "--json", "--force"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["complaints"][0]["forced"]


def failing(one_in):
    """The rows of a run, one in so many an error."""
    rows = read_run(Path("again")).requests
    bad = rows.index % one_in == 0
    return rows.assign(status=rows["status"].mask(bad, "error"), error_class=rows["error_class"].mask(bad, "http_500"))


@pytest.mark.parametrize(
    ("rows", "code", "told"),
    [
        (lambda: failing(3), "errors-above-bound", "round-robin: 26 of 78 requests did not complete (26 errors)"),
        (lambda: failing(1), "nothing-completed", "no request of round-robin completed"),
        (lambda: read_run(Path("again")).requests[:-30], "missing-records", "are accounted for where"),
    ],
)
def test_failures_and_lost_records_are_refused_in_one_line_with_a_code_of_their_own(capsys, tmp_path, rows, code, told):
    run = read_run(Path("again"))
    header = {"status": "complete", "scenario": run.scenario, "mode": run.mode, "seed": run.seed, "environment": {}}
    facts = HealthFacts(asked_requests=len(run.requests))
    assert finish_run(tmp_path, header, rows(), run.fleet, facts=facts, reports=False).health["verdict"] == "invalid"
    assert run_cli(["gate", "--baseline", "main", "--current", str(tmp_path), "--json"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith(f"gate: {code}: ")
    assert said.err.count("\n") == 1
    document = json.loads(said.out)
    assert (document["exit_code"], document["code"]) == (3, code)
    assert json.loads((tmp_path / "gate.json").read_text()) == document
    assert told in said.err


def test_a_worse_policy_is_caught_by_the_real_simulation(capsys, tmp_path):
    """Sessions forget their replica: the ring's hits are gone, which the gate must see without being told where."""
    out = tmp_path / "worse"
    scenario = tmp_path / "worse.toml"
    assert run_cli(["scenarios", "--copy", "quickstart", str(scenario)]) == 0
    text = scenario.read_text().replace('"session-ring"', '{ name = "session-ring", policy = "random" }')
    scenario.write_text(text)
    assert run_cli(["run", str(scenario), "--mode", "sim", "--out", str(out), *SMALL]) == 0
    assert run_cli(["gate", "--baseline", "main", "--current", str(out)]) == 1
    failed = [line for line in json.loads((out / "gate.json").read_text())["lines"] if line["outcome"] == "regression"]
    assert {line["router"] for line in failed} == {"session-ring"}
    assert "hit_rate" in {line["address"] for line in failed}


def test_the_order_of_arms_changes_neither_figures_nor_verdict(tmp_path):
    names = ["dynamo-kv", "session-ring"]
    for name, order in (("ab", names), ("ba", names[::-1])):
        routers = [part for router in order for part in ("--router", router)]
        out = str(tmp_path / name)
        assert run_cli(["run", "quickstart", "--mode", "sim", "--out", out, *SMALL, "--repeats", "2", *routers]) == 0
    one, two = read_run(tmp_path / "ab"), read_run(tmp_path / "ba")
    assert {name: one.routers[name] for name in names} == {name: two.routers[name] for name in names}
    winners = [{key: value["winner"] for key, value in run.verdict["winners"].items()} for run in (one, two)]
    assert winners[0] == winners[1]
    assert run_cli(["gate", "--baseline", str(tmp_path / "ab"), "--current", str(tmp_path / "ba")]) == 0
    assert run_cli(["gate", "--baseline", str(tmp_path / "ba"), "--current", str(tmp_path / "ab")]) == 0


def test_the_example_rules_can_be_read_and_hold_for_the_quickstart(capsys):
    """All of them but the one about a router that nobody has; that one only allows and so never fails."""
    assert (
        run_cli(["gate", "--baseline", "main", "--current", "again", "--rules", str(ROOT / "docs/ci/gate.toml")]) == 0
    )
    assert "exact" not in capsys.readouterr().err


def test_the_self_test_needs_nothing_and_takes_a_baseline_too(capsys):
    assert run_cli(["gate", "--self-test"]) == 0
    assert run_cli(["gate", "--self-test", "--baseline", "main"]) == 0
    Path("blind.toml").write_text('[bounds]\nttft_ms = ["p(99)>=0"]\n')
    assert run_cli(["gate", "--self-test", "--baseline", "main", "--rules", "blind.toml"]) == 0
    assert "as expected" in capsys.readouterr().out


def test_baselines_are_saved_listed_and_shown(capsys):
    assert Path(BASELINE_FOLDER) == DIRECTORY
    assert run_cli(["baseline", "save", "base"]) == 0
    assert Path("baselines/quickstart-sim.json").exists()
    assert run_cli(["baseline", "save", "base"]) == 2
    assert "--replace" in capsys.readouterr().err
    assert run_cli(["baseline", "save", "base", "--replace"]) == 0
    assert run_cli(["baseline", "list"]) == 0
    listed = capsys.readouterr().out
    assert "main" in listed
    assert "quickstart-sim" in listed
    assert run_cli(["baseline", "show", "main"]) == 0
    assert "TTFT p99" in capsys.readouterr().out
    assert run_cli(["baseline", "show", "nope"]) == 2
    assert run_cli(["baseline", "list", "--dir", "empty"]) == 0


def test_a_run_is_rendered_again_to_the_same_page():
    before = Path("base/report.md").read_bytes()
    Path("base/report.md").unlink()
    assert run_cli(["report", "base"]) == 0
    assert Path("base/report.md").read_bytes() == before


def test_several_runs_make_one_comparison(capsys):
    assert run_cli(["report", "base", "other", "--out", "both"]) == 0
    merged = read_run("both")
    assert "session-ring@other" in merged.routers
    assert merged.health["verdict"] == "degraded"
    assert Path("both/report.html").exists()
    assert run_cli(["report", "base", "base", "--out", "twice"]) == 2
    assert run_cli(["report", "base", "other", "--out", "both"]) == 2
    assert run_cli(["report", "nope"]) == 2


@pytest.mark.parametrize("name", EXPORTS)
def test_a_run_is_exported(capsys, tmp_path, name):
    assert run_cli(["report", "base", "--export", name, "--out", str(tmp_path)]) == 0
    written = [Path(line.removeprefix("wrote ")) for line in capsys.readouterr().out.splitlines()]
    assert written
    assert all(path.stat().st_size for path in written)


def test_an_unknown_format_names_the_known(capsys):
    assert run_cli(["report", "base", "--export", "excel"]) == 2
    assert "vllm" in capsys.readouterr().err


def commands(path: Path) -> tuple[list[str], list[str]]:
    """What a CI file says to do once, and in every job, as plain commands; installation is the README test's."""
    lines = path.read_text().splitlines()
    once = [line.removeprefix("#").strip() for line in lines if re.match(r"#\s+routebench ", line)]
    job = [match[1] for line in lines if (match := re.match(r"\s*(?:run:|-) (routebench .*)", line))]
    return once, job


@pytest.mark.parametrize("name", ["docs/ci/github.yml", "docs/ci/gitlab.yml", "action.yml"])
def test_the_jobs_of_the_ci_files_are_plain_commands_that_work(tmp_path, name):
    once, job = commands(ROOT / name)
    once = once or commands(ROOT / "docs/ci/github.yml")[0]
    assert len(once) == 2
    assert len(job) >= 2
    shim = tmp_path / "bin" / "routebench"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m harness "$@"\n')
    shim.chmod(0o755)
    inputs = {"BASELINE": "quickstart-sim", "SCENARIO": "quickstart", "MODE": "sim", "OUT": "results/ci"}
    environment = {
        **os.environ,
        **inputs,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    script = "\n".join(["set -e", *once, *job])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert Xml.parse(tmp_path / "results/ci/junit.xml").getroot().get("failures") == "0"
    if "gitlab" not in name:
        assert (tmp_path / "summary.md").read_text().startswith("## Gate: pass")
