"""The command line's own complaints: one line each, with the mend, and nothing left behind."""

import pytest

from harness.cli import run_cli
from harness.peers import PEERS


def refused(capsys, *arguments):
    assert run_cli(list(arguments)) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "no command 'frobnicate': choose one of analyze, baseline"),
        (["gatee"], "gate"),
        (["run"], "--help"),
        (["run", "quickstart", "--nonsense"], "--help"),
        (["run", "quickstart", "--set", "concurrency=8"], "write load.concurrency"),
        (["check", "quickstart", "--set", "load.concurrency=[1]"], "is a list where a whole number"),
        (["doctor", "no-such-scenario"], "choose one of"),
    ],
)
def test_a_wrong_command_line_names_its_mend(capsys, arguments, says):
    assert says in refused(capsys, *arguments)


@pytest.mark.skipif(all(peer.installed for peer in PEERS.values()), reason="every real router is installed here")
def test_a_router_that_is_not_installed_is_refused_before_a_folder_is_made(capsys, tmp_path):
    absent = next(peer for peer in PEERS.values() if not peer.installed)
    api = absent.apis[0]
    arguments = ["--router", absent.name, "--set", f"load.api={api}", "--out", str(tmp_path / "out")]
    assert "is not installed" in refused(capsys, "run", "quickstart", *arguments)
    assert not (tmp_path / "out").exists()
