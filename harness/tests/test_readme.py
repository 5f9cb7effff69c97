"""The README is run, not believed: every command block that it marks as tested."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.scenario import BUILTIN, load_scenario

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"<!-- tested -->\n```sh\n(.*?)```", README, re.DOTALL)


def test_the_readme_marks_its_commands():
    assert len(BLOCKS) >= 4
    assert "<!-- test-command -->" in README


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[-1][:50] for block in BLOCKS])
def test_commands_of_the_readme_work_as_they_stand(block, tmp_path):
    (tmp_path / "my_router.py").write_text(
        README.split("<!-- policy-example -->")[1].split("```python\n")[1].split("```")[0]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "routebench"
        command = [sys.executable, "-m", "harness", *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_what_the_readme_adds_to_a_scenario_is_understood(tmp_path):
    added = README.split("<!-- part-of-a-scenario -->")[1].split("```toml\n")[1].split("```")[0]
    file = tmp_path / "troubled.toml"
    file.write_text((BUILTIN / "quickstart.toml").read_text("utf-8") + "\n" + added, "utf-8")
    scenario = load_scenario(str(file))
    assert (scenario.router.ingresses, len(scenario.churn)) == (2, 1)
    assert scenario.faults


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
