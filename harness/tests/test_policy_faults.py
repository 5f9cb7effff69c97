"""A policy of a user's that breaks down in the middle of a simulation: who is named, how it ends, what is kept."""

import json

import pyarrow.parquet as pq
import pytest

from harness.cli import run_cli

SMALL = ["--set", "workload.sessions=2", "--set", "workload.turns=2", "--set", "fleet.replicas=2"]
BREAKS = """\
import sys
from routers import POLICIES, Decision

class P(POLICIES["round-robin"]):
    def choose(self, turn, fleet):
        {line}

class Q(POLICIES["round-robin"]):
    def observe(self, event):
        {line}
"""


@pytest.mark.parametrize("name", ["P", "Q"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise KeyError('zz')", "KeyError: 'zz' (mine.py, line {at})"),
        ("raise BaseException('zz')", "BaseException: zz (mine.py, line {at})"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (mine.py, line {at})"),
        ("sys.exit(0)", "SystemExit: 0 (mine.py, line {at})"),
    ],
)
def test_whatever_a_policy_raises_is_a_named_fault_of_the_policy(tmp_path, capsys, name, line, said):
    (tmp_path / "mine.py").write_text(BREAKS.format(line=line))
    router = f"{tmp_path / 'mine.py'}:{name}"
    out = tmp_path / "out"
    arguments = ["--mode", "sim", "--quiet", "--router", "round-robin", "--router", router, "--out", str(out)]
    assert run_cli(["run", "quickstart", *SMALL, *arguments]) == 2
    at = 6 if name == "P" else 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"error: router {router!r}: {said.format(at=at)}: its policy's code must change"
    assert json.loads((out / "run.json").read_text())["status"] == "partial"
    kept = pq.read_table(out / "requests.parquet").to_pylist()
    assert [row["router"] for row in kept] == ["round-robin"] * 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return None", "P.choose (mine.py, line 5) returned None: return a Decision"),
        ("return Decision('r0', '\\ud800', 'y')", "P.choose (mine.py, line 5) gave a reason with half a character"),
        ("return Decision('r0', 'x', 'y', None, float('nan'))", "(mine.py, line 5) gave believed_hit_tokens=nan"),
        ("return Decision('r9', 'x', 'y')", "the policy chose 'r9', which is not routable now (r0, r1 are)"),
    ],
)
def test_an_answer_that_is_no_decision_is_a_named_fault_of_the_policy(tmp_path, capsys, line, said):
    (tmp_path / "mine.py").write_text(BREAKS.format(line=line))
    out = tmp_path / "out"
    arguments = ["--mode", "sim", "--quiet", "--router", f"{tmp_path / 'mine.py'}:P", "--out", str(out)]
    assert run_cli(["run", "quickstart", *SMALL, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert json.loads((out / "run.json").read_text())["status"] == "partial"


def test_a_policy_file_that_exits_when_loaded_is_no_run_that_passed(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    assert run_cli(["run", "quickstart", "--mode", "sim", "--router", f"{tmp_path / 'mine.py'}:P"]) == 2
    assert "fails when loaded: SystemExit: 0 (mine.py, line 2)" in capsys.readouterr().err
