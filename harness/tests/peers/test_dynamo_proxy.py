"""The proxy for Dynamo's selection service, against a scripted service: what is told to it, and when."""

import http.client
import json
import os
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.dynamo_select import OPTIONS, environment_of
from harness.errors import UsageError
from harness.json_lines import read_json_lines
from harness.processes import Children, free_ports, wait_ready
from harness.tests.sse_server import DONE, END, HEAD, completion, event, http_chunk, serve
from routers import POLICIES

ROOT = Path(__file__).resolve().parents[3]

SCRIPTED_SERVICE = '''
"""Answers as the service does, chooses workers in turn, and writes down every call."""
import argparse, asyncio, itertools, json, os
from aiohttp import web

calls = open(os.environ["CALLS"], "a", buffering=1)
turn = itertools.count()

async def answer(request):
    body = await request.json() if request.can_read_body else None
    calls.write(json.dumps([request.method, request.path, body]) + "\\n")
    if request.path == "/select_and_reserve":
        if os.environ.get("REFUSE"):
            return web.json_response({"error": "no worker"}, status=503)
        await asyncio.sleep(float(os.environ.get("HOLD_S", 0)))
        worker = next(turn) % 2
        overlap = {"gpu": 32, "longest_matched": 32}
        return web.json_response({"selection_id": body["selection_id"], "worker_id": worker,
                                  "effective_prefill_tokens": len(body["token_ids"]) - 32, "overlap": overlap})
    return web.json_response([] if request.path == "/loads" else {"status": "ok"})

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
app = web.Application()
app.router.add_route("*", "/{path:.*}", answer)
web.run_app(app, host="127.0.0.1", port=parser.parse_args().port, print=None)
'''


class World:
    def __init__(self, url, folder):
        self.url, self.folder = url, folder

    def calls(self):
        return read_json_lines([self.folder / "calls.jsonl"])

    def told(self):
        """Calls about requests, without the ids."""
        paths = [path for _, path, _ in self.calls() if path.startswith(("/select", "/reservations"))]
        return ["free" if path.count("/") == 2 else path.rpartition("/")[2] for path in paths]

    def rows(self, count=1):
        return until(lambda: rows if len(rows := read_json_lines([self.folder / "peer.jsonl"])) >= count else None)

    def open(self, prompt, wishes=None, timeout=10, **fields):
        body = json.dumps({"model": "m", "prompt": prompt, "stream": True, **fields}).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": "q1", "X-Session-ID": "s1"}
        if wishes is not None:
            headers["X-Dynamo-Select"] = json.dumps(wishes)
        request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        return urllib.request.urlopen(request, timeout=timeout)


def until(found):
    deadline = time.monotonic() + 5
    while not (value := found()):
        assert time.monotonic() < deadline, "not within 5 s"
        time.sleep(0.02)
    return value


@contextmanager
def proxied(tmp_path, monkeypatch, script, **environment):
    package = tmp_path / "packages" / "dynamo" / "select_service"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "__main__.py").write_text(textwrap.dedent(SCRIPTED_SERVICE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), str(ROOT)]))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.jsonl"))
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    port = free_ports(1)[0]
    with serve(script) as server, Children(tmp_path) as children:
        command = [sys.executable, "-P", "-m", "harness.dynamo_proxy", "--port", str(port), "--block-size", "16"]
        command += ["--model", "m", "--log-file", str(tmp_path / "peer.jsonl")]
        command += ["--replica", f"r0={server.url},events=tcp://127.0.0.1:1", "--replica", f"r1={server.url}"]
        child = children.start("peer", command)
        url = f"http://127.0.0.1:{port}"
        wait_ready(child, f"{url}/router/health", 30)
        yield World(url, tmp_path)
        child.stop()
        assert child.exit_code == 0, child.tail()


def slow_stream(request):
    yield HEAD
    yield http_chunk(event(completion(" a")))
    yield 300
    yield http_chunk(event(completion(" b", finish_reason="length")))
    yield http_chunk(DONE) + END


def endless(request):
    yield HEAD
    while True:
        yield http_chunk(event(completion(" a")))
        yield 20


def breaks_off(request):
    yield HEAD
    yield http_chunk(event(completion(" a")))
    yield None


def test_a_request_is_booked_until_its_end_and_its_prefill_until_its_first_piece(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, slow_stream) as world:
        with world.open(list(range(1000, 1040))) as answer:
            assert answer.readline().startswith(b"data: {")
            until(lambda: world.told() == ["select_and_reserve", "prefill_complete"])
            assert answer.read().endswith(DONE)
        until(lambda: world.told() == ["select_and_reserve", "prefill_complete", "free"])
        body = next(body for _, path, body in world.calls() if path == "/select_and_reserve")
        assert body["token_ids"] == list(range(1000, 1040))
        (row,) = world.rows()
        assert (row["request_id"], row["session_id"], row["replica"], row["rule"]) == (
            "q1",
            "s1",
            "r0",
            "dynamo-select",
        )
        assert (row["believed_hit_tokens"], row["prompt_tokens"], row["status"]) == (32, 40, 200)
        instants = [row[key] for key in ("received_us", "routed_us", "sent_us", "first_byte_us", "ended_us")]
        assert instants == sorted(instants)


def test_replicas_are_registered_once_with_their_events(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, slow_stream) as world:
        records = [body for method, path, body in world.calls() if (method, path) == ("POST", "/workers")]
    assert [record["worker_id"] for record in records] == [0, 1]
    assert [record.get("kv_events_endpoint") for record in records] == ["tcp://127.0.0.1:1", None]
    assert {record["block_size"] for record in records} == {16}


def test_a_client_that_leaves_frees_its_reservation(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, endless) as world:
        with world.open(list(range(1000, 1040))) as answer:
            assert answer.readline()
        until(lambda: world.told()[-1] == "free")
        (row,) = world.rows()
        assert row["status"] == 499


def test_a_replica_that_breaks_off_leaves_a_broken_answer_and_no_reservation(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, breaks_off) as world:
        with world.open(list(range(1000, 1040))) as answer, pytest.raises(http.client.IncompleteRead):
            answer.read()
        until(lambda: world.told()[-1] == "free")
        (row,) = world.rows()
        assert "broke off" in row["error"]


def test_what_a_request_asks_of_its_routing_reaches_the_service_by_its_numbers(tmp_path, monkeypatch):
    wishes = {
        "pinned_worker": "r1",
        "allowed_worker_ids": ["r1", "r0"],
        "strict_priority": 2,
        "router_config_override": {"router_temperature": 0.5},
    }
    with proxied(tmp_path, monkeypatch, slow_stream) as world:
        with world.open(list(range(1000, 1040)), wishes) as answer:
            answer.read()
        body = next(body for _, path, body in world.calls() if path == "/select_and_reserve")
    assert {key: body.get(key) for key in wishes} == {
        "pinned_worker": {"worker_id": 1, "dp_rank": 0},
        "allowed_worker_ids": [1, 0],
        "strict_priority": 2,
        "router_config_override": {"router_temperature": 0.5},
    }
    assert "priority_jump" not in body


@pytest.mark.parametrize("wishes", [{"pinned_worker": "r9"}, {"taste": 1}, []])
def test_a_wish_that_cannot_be_followed_is_a_400(tmp_path, monkeypatch, wishes):
    with proxied(tmp_path, monkeypatch, slow_stream) as world:
        with pytest.raises(urllib.error.HTTPError) as refused:
            world.open(list(range(1000, 1040)), wishes)
        refused.value.close()
        assert refused.value.code == 400
        assert world.told() == []


def test_a_client_that_leaves_while_the_service_holds_it_leaves_no_reservation(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, endless, HOLD_S="1") as world:
        with pytest.raises(TimeoutError):
            world.open(list(range(1000, 1040)), timeout=0.3)
        until(lambda: world.told() == ["select_and_reserve", "free"])
        (row,) = world.rows()
        assert row["status"] == 499


def test_without_tokens_the_service_is_not_asked(tmp_path, monkeypatch):
    """The scripted replica has no /tokenize that gives tokens, and an empty list must never reach the service."""
    with proxied(tmp_path, monkeypatch, slow_stream) as world:
        for prompt in ("text that nobody can tokenise", []):
            with world.open(prompt) as answer:
                answer.read()
        rows = world.rows(2)
        assert world.told() == []
        assert {row["rule"] for row in rows} == {"no-tokens"}


def test_a_service_that_cannot_choose_is_an_error_of_the_router(tmp_path, monkeypatch):
    with proxied(tmp_path, monkeypatch, slow_stream, REFUSE="1") as world:
        with pytest.raises(urllib.error.HTTPError) as refused:
            world.open(list(range(1000, 1040)))
        refused.value.close()
        assert refused.value.code == 503
        (row,) = world.rows()
        assert (row["status"], row["replica"]) == (503, None)


def test_a_service_that_ends_at_once_is_a_start_error(tmp_path, monkeypatch):
    package = tmp_path / "dynamo" / "select_service"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("raise SystemExit('no such thing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.dynamo_proxy", "--port", "1", "--replica", "r0=http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "ended with exit code 1 before it was ready" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_have_the_names_of_our_policy_and_no_other():
    shared = set(POLICIES["dynamo-kv"].Options.__struct_fields__)
    assert set(OPTIONS) <= shared
    told = environment_of({"temperature": 0.5, "use_kv_events": False})
    assert told == {"DYN_ROUTER_TEMPERATURE": "0.5", "DYN_USE_KV_EVENTS": "false"}
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        environment_of({"temperatur": 1})
