"""The selection service of ai-dynamo 1.4.2 as released, fed by our publishers and asked by our proxy."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.processes import get_json
from harness.tests.peers.live import BLOCK, MODEL, fleet, leading_blocks, token_ids

pytestmark = pytest.mark.peers


def test_the_overlap_it_counts_is_what_our_engine_serves(tmp_path):
    """A small cache evicts all the time, so removals count as much as stores."""
    with fleet(tmp_path, replicas=2, num_gpu_blocks=160, max_model_len=2048) as world:
        world.start_peer("dynamo-select")
        served = []
        for k in range(60):
            family, length = k * 7 % 5, 50 + k * 37 % 300
            prompt = [*token_ids(100 + family, 160), *token_ids(k // 3, length)]
            answer = world.ask(prompt, headers={"X-Request-Id": f"q{k}"})
            served.append(answer.cached_tokens)
            time.sleep(0.03)  # the events of the answer travel beside it
        rows = _rows(world, 60)
        # It counts the last full block of a prompt, whose last token an engine computes anew.
        believed = [min(row["believed_hit_tokens"], leading_blocks(row["prompt_tokens"])) for row in rows]
        assert [row["request_id"] for row in rows] == [f"q{k}" for k in range(60)]
        assert believed == served
        assert sum(served) > 10 * BLOCK
        assert sum(world.state(r.name)["evicted_blocks"] for r in world.replicas) > 0


def test_a_repeated_prompt_lands_on_the_warm_replica(tmp_path):
    with fleet(tmp_path) as world:
        world.start_peer("dynamo-select")
        prompt = token_ids(1, 400)
        for replica in ("r2", "r1"):
            url = next(r.url for r in world.replicas if r.name == replica)
            ids = prompt if replica == "r2" else token_ids(5, 300)
            world.ask(ids, url=url)
            time.sleep(0.1)
        again, other, chat = (
            world.ask([*prompt, 7, 8]),
            world.ask([*token_ids(5, 300), 9]),
            world.ask([{"role": "user", "content": "hello"}], path="/v1/chat/completions"),
        )
        assert [world.placed(again), world.placed(other)] == ["r2", "r1"]
        assert again.cached_tokens == 400
        rows = _rows(world, 3)
        assert [row["replica"] for row in rows] == ["r2", "r1", world.placed(chat)]
        assert all(row["rule"] == "dynamo-select" and row["status"] == 200 for row in rows)
        assert rows[2]["prompt_tokens"] == chat.prompt_tokens


def test_what_it_books_is_gone_when_requests_end_however_they_end(tmp_path):
    with fleet(tmp_path, replicas=2) as world:
        url = world.start_peer("dynamo-select")
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(_stream, url, token_ids(k, 320), 100) for k in range(2)]
            state = _until(url, lambda state: state["in_flight"] == 2 and not _owed(state, "potential_prefill_tokens"))
            assert _owed(state, "potential_decode_blocks") == 2 * 20
            assert sorted(r["in_flight"] for r in state["replicas"]) == [1, 1]
            assert all(future.result().endswith(b"data: [DONE]\n\n") for future in running)
        _until(url, lambda state: _idle(state))
        _leave_in_the_middle(url, token_ids(9, 100))
        state = _until(url, lambda state: sum(r["routed"] for r in state["replicas"]) == 3 and _idle(state))
        assert state["lost_calls"] == 0
        _until_engine_idle(world)


def test_an_empty_prompt_does_not_reach_the_service(tmp_path):
    """An empty token list would make its scheduler fail for every later request."""
    with fleet(tmp_path, replicas=1) as world:
        url = world.start_peer("dynamo-select")
        with pytest.raises(urllib.error.HTTPError) as refused:
            world.ask([])
        refused.value.close()
        assert refused.value.code == 400
        assert world.ask(token_ids(1, 40)).prompt_tokens == 40
        assert get_json(f"{url}/router/health")["status"] == "ok"


def _rows(world, count):
    deadline = time.monotonic() + 5
    while len(rows := world.decisions()) < count:
        assert time.monotonic() < deadline, f"the proxy logged {len(rows)} of {count} requests"
        time.sleep(0.05)
    return rows


def _owed(state, what):
    return sum(load[what] for load in state["loads"][0]["loads"])


def _idle(state):
    return state["in_flight"] == 0 and not _owed(state, "active_requests")


def _until(url, done):
    deadline = time.monotonic() + 10
    while not done(state := get_json(f"{url}/router/state")):
        assert time.monotonic() < deadline, f"not within 10 s: {state}"
        time.sleep(0.02)
    return state


def _until_engine_idle(world):
    deadline = time.monotonic() + 5
    while any(world.state(r.name)["running"] for r in world.replicas):
        assert time.monotonic() < deadline, "an engine still runs a request that nobody waits for"
        time.sleep(0.02)


def _streamed(url, prompt, max_tokens):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers))


def _stream(url, prompt, max_tokens):
    with _streamed(url, prompt, max_tokens) as answer:
        return answer.read()


def _leave_in_the_middle(url, prompt):
    """Reads the first event of a long stream and hangs up."""
    with _streamed(url, prompt, 5000) as answer:
        assert answer.readline().startswith(b"data: {")
