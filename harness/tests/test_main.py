"""The command as a process: what surrounds it never decides how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_our_signs_shows_others_and_loses_nothing(tmp_path, encoding):
    """A run that took an hour must not end as a fault because of a middle dot."""
    command = ["run", "quickstart", "--mode", "sim", "--quiet", "--out", str(tmp_path / "out")]
    small = ["--set", "workload.sessions=8", "--set", "load.concurrency=4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "harness", *command, *small], env=environment, capture_output=True, timeout=120
    )
    said = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert said.splitlines()[0].startswith("quickstart \u00b7 sim" if encoding != "ascii" else "quickstart ? sim")
