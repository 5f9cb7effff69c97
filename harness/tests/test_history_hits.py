"""History that is sent again as text, or as chat messages, hits as history that is sent again as token ids does.

Live, through a router and against one replica: the answers of the earlier turns are what the engine streamed, and the
engine's own usage says how much of the next prompt it still had.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.chat_form import templated
from reports import read_run
from workloads import InfiniteCache, Streams, make_workload, prompt_tokens

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = """
name = "history"
routers = ["round-robin"]
seed = 7
[fleet]
replicas = 1
[engine]
preset = "llama-3.1-8b-h100"
num_gpu_blocks = 2000
[workload]
kind = "multi-turn"
sessions = 3
turns = 4
first_input_tokens = 200
input_tokens = { dist = "uniform", low = 20, high = 60 }
output_tokens = { dist = "uniform", low = 10, high = 50 }
[load]
concurrency = 3
"""
SAID = tomllib.loads(SCENARIO)
BLOCK = 16
APIS = ("completions-ids", "completions-text", "chat")
WAIT_S = 120
"""Loose: it bounds a hang, on a machine as busy as it may be."""


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    """What engines said of every request, by API: {(session, turn): (prompt tokens, cached tokens, output tokens)}."""
    folder = tmp_path_factory.mktemp("history")
    (folder / "history.toml").write_text(SCENARIO)
    found = {}
    for api in APIS:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "harness",
                "run",
                "history.toml",
                "--quiet",
                "--out",
                api,
                "--set",
                f"load.api={api}",
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            timeout=WAIT_S,
        )
        # 3 is a machine too busy for times; tokens are right all the same
        assert done.returncode in (0, 3), done.stdout + done.stderr
        rows = read_run(folder / api).requests.to_dict("records")
        assert all(row["status"] == "ok" for row in rows)
        found[api] = {
            (row["session"], row["turn"]): (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"])
            for row in rows
        }
    return found


def sessions():
    return list(make_workload(SAID["workload"]).sessions(Streams(SAID["seed"])))


@pytest.mark.parametrize("api", APIS)
def test_a_later_turn_hits_all_of_the_history_but_its_last_token(usage, api):
    """Whole blocks of the prompt before and its answer, whose last token no engine ever computes."""
    for session in sessions():
        for turn in range(1, SAID["workload"]["turns"]):
            prompt, _, output = usage[api][session.session_id, turn - 1]
            _, cached, _ = usage[api][session.session_id, turn]
            assert cached == (prompt + output - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("api", APIS)
def test_hits_are_those_of_the_sessions_own_text_in_one_endless_cache(usage, api):
    for session in sessions():
        cache = InfiniteCache(BLOCK)
        for turn in session.turns:
            prompt = templated(session, turn.index) if api == "chat" else session.prompt(turn.index)
            assert usage[api][session.session_id, turn.index] == (
                prompt_tokens(prompt),
                cache.lookup(prompt),
                turn.output[1],
            )
            cache.store_answer(prompt, turn.output)


def test_text_hits_as_ids_do(usage):
    assert usage["completions-text"] == usage["completions-ids"]


def test_chat_hits_as_ids_do_but_for_the_tokens_of_the_template(usage):
    """Two a message and one that opens the answer; the history of turn t has 2 t messages."""
    for (session, turn), (prompt, cached, _) in usage["completions-ids"].items():
        chat_prompt, chat_cached, _ = usage["chat"][session, turn]
        assert chat_prompt == prompt + 2 * (2 * turn + 1) + 1
        assert 0 <= chat_cached - cached <= 2 * 2 * turn + BLOCK
