"""A folder of a run that never began may be used again; whatever holds a request or a stranger's file may not."""

import sys

import msgspec
import pytest

from harness.cli import run_cli
from harness.unmeasured import holds_no_measurement

BROKEN = [sys.executable, "-c", "raise SystemExit('no such option: --backends')", "{port}", "{worker_urls}"]
ROUTERS = f"routers=[{{name='mine', command={msgspec.json.encode(BROKEN).decode()}}}]"


def never_began(folder, mode=""):
    place = folder / mode
    (place / "logs").mkdir(parents=True)
    (place / "run.json").write_text('{"status": "partial", "routers": {"mine": {"requests": 0}}}', "utf-8")
    return folder


def test_a_router_that_does_not_start_shows_its_command_and_leaves_a_folder_that_can_be_used_again(capsys, tmp_path):
    out = tmp_path / "out"
    small = ["--set", "workload.sessions=2", "--out", str(out), "--quiet"]
    assert run_cli(["run", "quickstart", "--set", ROUTERS, "--set", "fleet.replicas=1", *small]) == 2
    error = capsys.readouterr().err
    assert "no such option: --backends" in error
    assert "it was started as `" in error
    assert "http://127.0.0.1:" in error
    assert holds_no_measurement(out)
    assert run_cli(["run", "quickstart", "--router", "random", "--mode", "sim", *small]) == 0
    assert run_cli(["run", "quickstart", "--router", "random", "--mode", "sim", *small]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_folders_of_both_modes_are_looked_at_together(tmp_path):
    assert holds_no_measurement(never_began(tmp_path / "one", "live"))
    both = never_began(never_began(tmp_path / "both", "live"), "sim")
    assert holds_no_measurement(both)
    (both / "mine.txt").touch()
    assert not holds_no_measurement(both)


@pytest.mark.parametrize(
    "run",
    [
        '{"status": "partial", "routers": {"mine": {"requests": 0}, "other": {"requests": 1}}}',
        '{"status": "running", "routers": {}}',
        '{"status": "complete", "routers": {"mine": {"requests": 0}}}',
        "[" * 100,
        '{"status": "partial"}',
    ],
)
def test_a_run_that_may_have_measured_something_stays(tmp_path, run):
    folder = never_began(tmp_path / "run")
    (folder / "run.json").write_text(run, "utf-8")
    assert not holds_no_measurement(folder)


def test_a_strangers_file_or_no_run_at_all_stays(tmp_path):
    folder = never_began(tmp_path / "run")
    (folder / "notes.md").touch()
    assert not holds_no_measurement(folder)
    assert not holds_no_measurement(tmp_path)
    assert not holds_no_measurement(folder / "logs")
