"""Runs in virtual time and the command line around them: same bytes for the same seed, and errors of one line."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.cli import run_cli
from reports import read_run
from routers.deciding import PolicyWatch

ROOT = Path(__file__).resolve().parents[2]
VARIES = ("environment", "started_at", "wall_s")
"""All of run.json that may differ between two runs of one seed."""
SHORT = ["--set", "workload.sessions=10", "--set", "load.concurrency=5", "--quiet"]


def sim(out: Path, *more: str, hash_seed: str = "0") -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    subprocess.run(
        [sys.executable, "-m", "harness", "run", "quickstart", "--mode", "sim", "--out", str(out), *SHORT, *more],
        check=True,
        capture_output=True,
        env=environment,
    )


def repeatable(out: Path) -> dict:
    document = json.loads((out / "run.json").read_text())
    for key in VARIES:
        del document[key]
    return document


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(tmp_path):
    for name, hash_seed in (("a", "1"), ("b", "2")):
        sim(tmp_path / name, hash_seed=hash_seed)
    a, b = tmp_path / "a", tmp_path / "b"
    assert json.dumps(repeatable(a)) == json.dumps(repeatable(b))
    for name in ("report.md", "report.html"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    for name in ("requests.parquet", "fleet.parquet"):
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (a, b)}
        assert len(digests) == 1, name


def test_another_seed_gives_other_rows(tmp_path):
    sim(tmp_path / "a")
    sim(tmp_path / "b", "--seed", "43")
    assert repeatable(tmp_path / "a")["routers"] != repeatable(tmp_path / "b")["routers"]


def test_a_simulation_leaves_the_files_of_a_live_run(tmp_path):
    sim(tmp_path / "a", "--repeats", "2")
    run = read_run(tmp_path / "a")
    assert run.status == "complete"
    assert run.health["verdict"] == "ok"
    assert list(run.routers) == ["round-robin", "session-ring", "dynamo-kv"]
    assert {(r["router"], r["repeat"]) for r in run.repeats} == {(n, i) for n in run.routers for i in (0, 1)}
    assert run.scenario["engine"]["block_size"] == 16
    for name in ("report.md", "report.html"):
        assert (tmp_path / "a" / name).stat().st_size > 200


def error(capsys, *arguments: str, code: int = 2) -> str:
    """Runs a command that must fail and returns its one line."""
    assert run_cli(list(arguments)) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_wrong_usage_is_one_line_that_names_the_mend(capsys, tmp_path):
    assert "did you mean 'quickstart'" in error(capsys, "run", "quikstart")
    assert "choose one of" in error(capsys, "run", "quickstart", "--router", "nope")
    assert "live, sim, both" in error(capsys, "run", "quickstart", "--mode", "dream")
    assert "No such file" in error(capsys, "run", str(tmp_path / "x.toml"))
    assert "no such option" in error(capsys, "run", "quickstart", "--nonsense").lower()
    assert "repeats = 0: give a whole number from 1 to 1000" in error(capsys, "run", "quickstart", "--repeats", "0")
    assert "choose one of" in error(capsys, "routers", "nope")


def test_a_folder_that_is_not_empty_is_never_written_over(capsys, tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    assert "not an empty folder" in error(capsys, "run", "quickstart", "--mode", "sim", "--out", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]


def test_a_disk_that_is_full_before_the_first_file_is_one_line(tmp_path):
    out = tmp_path / "o"
    code = (
        "import resource, sys; from harness.cli import run_cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sys.exit(run_cli(['run', 'quickstart', '--mode', 'sim', '--quiet', '--out', sys.argv[1]]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: the results could not be written to {out}: File too large; make room")
    assert done.stderr.count("\n") == 1


def test_what_virtual_time_cannot_contain_is_refused(capsys, tmp_path):
    scenario = tmp_path / "mine.toml"
    scenario.write_text(
        'name = "mine"\nrouters = [{ name = "mine", url = "http://127.0.0.1:9" }]\n'
        '[workload]\nkind = "multi-turn"\nsessions = 2\n'
    )
    assert "--mode live" in error(capsys, "run", str(scenario), "--mode", "sim", "--out", str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()


def test_what_answers_without_speaking_http_is_a_start_failure(capsys, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def garble() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(1000)
                    client.sendall(b"so what?\r\n\r\n")

        threading.Thread(target=garble, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        scenario = tmp_path / "mine.toml"
        scenario.write_text(
            f'name = "mine"\nrouters = ["random"]\n[workload]\nkind = "multi-turn"\n[fleet]\nurls = ["{url}"]\n'
        )
        said = error(capsys, "run", str(scenario), "--out", str(tmp_path / "o"), "--quiet")
        server.shutdown(socket.SHUT_RDWR)
    assert "does not speak HTTP" in said


def test_a_fault_of_ours_never_looks_like_a_verdict(capsys, monkeypatch):
    def broken(*_: object, **__: object) -> int:
        raise KeyError("gone")

    monkeypatch.setattr("harness.run.run_command", broken)
    assert "a fault of routebench itself: KeyError" in error(capsys, "run", "quickstart", code=70)


def test_what_a_live_router_cannot_know_is_refused(capsys, tmp_path):
    out = ["--out", str(tmp_path / "o")]
    assert "--mode sim" in error(capsys, "run", "quickstart", "--router", "clairvoyant", *out)
    assert "load.api=completions-text" in error(capsys, "run", "quickstart", "--router", "sglang-cache-aware", *out)
    assert not (tmp_path / "o").exists()


def test_a_dead_router_or_engine_of_the_users_is_a_start_failure(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    scenario = tmp_path / "mine.toml"
    text = '[workload]\nkind = "multi-turn"\nsessions = 2\n[fleet]\nreplicas = 1\n'
    scenario.write_text(f'name = "mine"\nrouters = [{{ name = "mine", url = "{dead}" }}]\n{text}')
    said = error(capsys, "run", str(scenario), "--out", str(tmp_path / "a"), "--quiet")
    assert dead in said
    assert "start" in said
    scenario.write_text(f'name = "mine"\nrouters = ["random"]\n{text}urls = ["{dead}"]\n')
    said = error(capsys, "run", str(scenario), "--out", str(tmp_path / "b"), "--quiet")
    assert dead in said
    assert json.loads((tmp_path / "b" / "run.json").read_text())["status"] == "partial"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return Decision('nowhere', 'x', 'x')", "not routable now"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_policy_that_breaks_down_is_one_line_with_its_place(capsys, tmp_path, body, said):
    policy = tmp_path / "broken.py"
    policy.write_text(
        "from routers import BasePolicy, Decision\n\n\nclass Broken(BasePolicy):\n"
        f"    def choose(self, turn, fleet):\n        {body}\n"
    )
    found = error(
        capsys,
        "run",
        "quickstart",
        "--mode",
        "sim",
        "--router",
        f"{policy}:Broken",
        "--out",
        str(tmp_path / "o"),
        *SHORT,
    )
    assert said in found
    assert ".py, line" in found
    assert json.loads((tmp_path / "o" / "run.json").read_text())["status"] == "partial"


def test_a_policy_that_never_decides_is_named_while_it_does_and_when_the_run_is_interrupted(
    capfd, tmp_path, monkeypatch
):
    policy = tmp_path / "endless.py"
    policy.write_text(
        "import time\nfrom routers import BasePolicy\n\n\nclass Endless(BasePolicy):\n"
        "    def choose(self, turn, fleet):\n        while True:\n            time.sleep(0.001)\n"
    )

    def impatient(say):
        def say_and_interrupt(said):
            say(said)
            os.kill(os.getpid(), signal.SIGINT)

        return PolicyWatch(say_and_interrupt, patience_s=0.02, look_s=0.01)

    monkeypatch.setattr("harness.run.PolicyWatch", impatient)
    shorter = [word for word in SHORT if word != "--quiet"]
    out = tmp_path / "o"
    router = f"{policy}:Endless"
    assert run_cli(["run", "quickstart", "--mode", "sim", "--router", router, "--out", str(out), *shorter]) == 130
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("its policy has been deciding for 0 s (endless.py, line 8)") == 2
    assert said.endswith(f"interrupted: what was measured is kept in {out}")
    assert json.loads((out / "run.json").read_text())["status"] == "partial"


def test_a_run_that_measured_nothing_is_invalid(capsys, tmp_path):
    arguments = ["--set", "load.warmup_s=9999", "--out", str(tmp_path / "o"), *SHORT]
    assert run_cli(["run", "quickstart", "--mode", "sim", *arguments]) == 3
    assert "nothing was measured" in capsys.readouterr().out


def test_a_taken_port_is_refused_before_anything_starts(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = error(capsys, "serve", "quickstart", "--port", str(port))
    assert str(port) in said
    assert "--port" in said


def test_every_command_is_there(capsys):
    assert run_cli(["--help"]) == 0
    said = capsys.readouterr().out
    for name in (
        "run",
        "serve",
        "check",
        "scenarios",
        "routers",
        "analyze",
        "convert",
        "report",
        "gate",
        "baseline",
        "calibrate",
    ):
        assert f" {name} " in said, name


def test_lists_have_a_line_each(capsys):
    assert run_cli(["scenarios"]) == 0
    assert "rl-rollout-stragglers" in capsys.readouterr().out
    assert run_cli(["routers"]) == 0
    said = capsys.readouterr().out
    for name in (
        "random",
        "round-robin",
        "least-requests",
        "power-of-two",
        "session-ring",
        "pure-kv-affinity",
        "dynamo-kv",
    ):
        assert any(line.startswith(name) for line in said.splitlines())


def test_a_built_in_scenario_can_be_copied_checked_and_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli(["scenarios", "--copy", "quickstart", "mine.toml"]) == 0
    assert run_cli(["check", "mine.toml"]) == 0
    assert "quickstart: ok" in capsys.readouterr().out
    assert "exists already" in error(capsys, "scenarios", "--copy", "quickstart", "mine.toml")
    assert run_cli(["run", "./mine.toml", "--mode", "sim", "--out", "out", *SHORT]) == 0


def test_json_prints_run_json_alone(capsys, tmp_path):
    out = tmp_path / "o"
    assert run_cli(["run", "quickstart", "--mode", "sim", "--json", "--out", str(out), *SHORT]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "run.json").read_text())


@pytest.mark.parametrize("mode", ["sim"])
def test_a_policy_from_a_users_file_runs_beside_ours(tmp_path, monkeypatch, mode):
    """The text of the README, as it stands there."""
    readme = (ROOT / "README.md").read_text()
    code = readme.split("<!-- policy-example -->")[1].split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) < 20
    monkeypatch.chdir(tmp_path)
    Path("my_router.py").write_text(code)
    arguments = ["--router", "my_router.py:MyPolicy", "--router", "round-robin", "--out", "out", *SHORT]
    assert run_cli(["run", "quickstart", "--mode", mode, *arguments]) == 0
    assert set(read_run("out").routers) == {"my_router.py:MyPolicy", "round-robin"}
