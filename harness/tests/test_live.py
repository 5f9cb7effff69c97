"""A live run, small: real replicas, a real router and Locust, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.run import run_mode
from harness.tests.arms import small
from reports import read_run

ROOT = Path(__file__).resolve().parents[2]
TINY = """
name = "tiny"
about = "A few short conversations"
routers = ["round-robin", "dynamo-kv"]
seed = 7
[fleet]
replicas = 2
[engine]
preset = "llama-3.1-8b-h100"
num_gpu_blocks = 600
[workload]
kind = "multi-turn"
sessions = {sessions}
turns = 2
shared_system_prompts = 1
system_prompt_tokens = 64
first_input_tokens = 100
input_tokens = 40
output_tokens = {output}
[load]
concurrency = 4
"""
WAIT_S = 60.0
"""Loose: starting a dozen Python processes on a loaded machine takes its time."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", *arguments]


def ours(folder: Path) -> list[psutil.Process]:
    """Processes started for a run in this folder; each names it in its command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


def scenario(folder: Path, sessions: int = 6, output: int = 12) -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY.replace("{sessions}", str(sessions)).replace("{output}", str(output)))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One whole run, live and sim side by side, that several tests look at."""
    folder = tmp_path_factory.mktemp("live")
    out = folder / "out"
    done = subprocess.run(
        command("run", str(scenario(folder)), "--mode", "both", "--out", str(out)),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
        timeout=150,
    )
    return out, done


def test_a_live_run_ends_well_and_leaves_its_files(tiny):
    out, done = tiny
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("run.json", "requests.parquet", "fleet.parquet", "report.md", "report.html"):
        assert (out / "live" / name).stat().st_size > 0
        assert (out / "sim" / name).stat().st_size > 0
    document = json.loads((out / "live" / "run.json").read_text())
    assert document["status"] == "complete"
    assert set(document["routers"]) == {"round-robin", "dynamo-kv"}
    assert document["health"]["verdict"] in ("ok", "degraded")  # a busy machine may be late, never wrong


def test_a_live_run_leaves_no_process(tiny):
    out, _ = tiny
    assert ours(out) == []


def test_every_request_has_one_row_with_engine_and_router_facts(tiny):
    out, _ = tiny
    rows = read_run(out / "live").requests
    assert len(rows) == 2 * 6 * 2
    assert (rows["status"] == "ok").all()
    for column in ("replica", "reason", "routed_us", "admitted_us", "first_token_us", "last_token_us", "cached_tokens"):
        assert rows[column].notna().all(), column
    assert (rows["output_tokens"] == 12).all()
    assert (rows["sent_us"] <= rows["routed_us"]).all()
    assert (rows["routed_us"] <= rows["admitted_us"]).all()
    assert (rows["admitted_us"] < rows["first_token_us"]).all()


def test_live_and_sim_ask_the_same_and_round_robin_hits_the_same(tiny):
    out, _ = tiny
    live, sim = read_run(out / "live").requests, read_run(out / "sim").requests
    keys = ["router", "session", "turn", "prompt_tokens", "output_tokens"]

    def asked(rows):
        return sorted(map(tuple, rows[keys].itertuples(index=False)))

    assert asked(live) == asked(sim)


def test_the_kv_aware_router_heard_the_engines(tiny):
    """Its belief comes from KV events over ZeroMQ and from the token ids in the request."""
    out, _ = tiny
    rows = read_run(out / "live").requests
    heard = rows[rows["router"] == "dynamo-kv"]
    assert heard["believed_hit_tokens"].notna().all()
    assert (heard.loc[heard["turn"] == 1, "believed_hit_tokens"] > 0).any()


def test_fleet_samples_come_from_every_replica(tiny):
    out, _ = tiny
    fleet = read_run(out / "live").fleet
    assert set(fleet["replica"]) == {"r0", "r1"}
    assert (fleet["t_us"] % 500_000 == 0).all()


def test_both_prints_the_difference_in_percent(tiny):
    _, done = tiny
    assert "%" in done.stdout
    assert "live" in done.stdout
    assert "sim" in done.stdout


def start(folder: Path, out: Path, **shape: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("run", str(scenario(folder, **shape)), "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=folder,
    )


def wait_for_rows(out: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if any(p.stat().st_size for p in out.glob("logs/*/locust-*.jsonl") if "events" not in p.name):
            return
        time.sleep(0.1)
    raise AssertionError("no request ended in time")


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing_running(tmp_path):
    out = tmp_path / "out"
    run = start(tmp_path, out, sessions=400, output=60)
    wait_for_rows(out)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, said
    assert "interrupted" in said
    document = json.loads((out / "run.json").read_text())
    assert document["status"] == "partial"
    assert len(read_run(out).requests) > 0
    assert ours(out) == []


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_impatient_second_signal_loses_nothing(tmp_path, again):
    out = tmp_path / "out"
    run = start(tmp_path, out, sessions=400, output=60)
    wait_for_rows(out)
    run.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.send_signal(again)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, said
    written = sum(p.read_bytes().count(b"\n") for p in out.glob("logs/*/locust-*.jsonl") if "events" not in p.name)
    assert len(read_run(out).requests) == written > 0
    assert ours(out) == []


def test_a_load_generator_that_breaks_down_is_named_and_the_run_is_partial(tmp_path, monkeypatch):
    broken = [sys.executable, "-c", "raise OSError('no place to meet')"]
    monkeypatch.setattr("harness.live.locust_command", lambda *_: broken)
    outcome = run_mode(small(fleet={"replicas": 1}), "live", tmp_path)
    (lost,) = outcome.lost
    assert lost.startswith("locust ended with exit code 1: OSError: no place to meet")
    assert outcome.result.status == "partial"
    assert outcome.result.health["verdict"] == "invalid"


def test_a_load_process_without_a_last_word_is_a_lost_one(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.live.locust_command", lambda *_: [sys.executable, "-c", "print('bye')"])
    outcome = run_mode(small(fleet={"replicas": 1}), "live", tmp_path)
    (lost,) = outcome.lost
    assert "1 of 1 load processes ended without their last word" in lost
    assert outcome.result.status == "partial"


def test_a_replica_that_dies_is_named_and_makes_the_run_invalid(tmp_path):
    out = tmp_path / "out"
    run = start(tmp_path, out, sessions=400, output=60)
    wait_for_rows(out)
    victim = next(p for p in ours(out) if "mock_engine" in p.cmdline() and "r1" in p.cmdline())
    victim.kill()
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 3, said
    document = json.loads((out / "run.json").read_text())
    assert document["health"]["verdict"] == "invalid"
    assert any("replica-r1" in reason for reason in document["health"]["reasons"])
    assert document["status"] == "partial"
    assert ours(out) == []
