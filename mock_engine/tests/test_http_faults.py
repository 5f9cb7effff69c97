"""Faults as clients and routers meet them: error statuses, stalled and cut answers, closed ports, crash, restart."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mock_engine.injection import CRASH_CODE
from mock_engine.tests.replica_process import Replica, free_ports, start
from mock_engine.tests.serving import SHORT, Client, listening, serving

LONG = {"prompt": [7] * 300, "max_tokens": 40, "stream": True}


async def read_until_silence(client: Client, body: dict[str, Any], expected: int) -> tuple[int, str]:
    """(events, how it went: end, silence or cut) of one stream; silence counts once the expected events have come."""
    count = 0
    try:
        async with client.session.post(client.base + "/v1/completions", json=body) as answer:
            while True:
                line = await asyncio.wait_for(answer.content.readline(), 10 if count < expected else 0.3)
                if not line:
                    return count, "end"
                count += line.startswith(b"data: ")
    except TimeoutError:
        return count, "silence"
    except aiohttp.ClientError:
        return count, "cut"


async def until(done: Any) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.005)


def lines(folder: Path, name: str = "r0") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"engine-{name}.faults.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "InternalServerError"), (503, "Service Unavailable"), (429, "Too Many Requests")]
)
async def test_a_share_of_requests_is_answered_with_an_error_status_in_vllms_shape(status: int, kind: str) -> None:
    async with serving("--mock-fault", f"http_{status}=0.5") as client:
        found = [await client.ask("POST", "/v1/completions", {**SHORT, "stream": at % 2 > 0}) for at in range(20)]
        statuses = [one[0] for one in found]
        assert set(statuses) == {200, status}
        error = next(body for got, body, _ in found if got == status)["error"]
        assert (error["type"], error["code"], error["param"]) == (kind, status, None)
        told = await client.get("/mock/faults")
        assert told["injected"] == {f"http_{status}": statuses.count(status)}
        assert (await client.ask("GET", "/health"))[0] == 200
        assert await client.post("/tokenize", {"prompt": "x"})


async def test_the_same_seed_hits_the_same_requests() -> None:
    found = []
    for seed in ("1", "1", "2"):
        async with serving("--mock-fault", "http_500=0.5", "--mock-seed", seed, "--mock-name", "r0") as client:
            found.append([(await client.ask("POST", "/v1/completions", SHORT))[0] for _ in range(16)])
    assert found[0] == found[1] != found[2]


async def test_a_stalled_stream_says_its_first_tokens_and_then_nothing_until_the_client_leaves(tmp_path: Path) -> None:
    flags = ("--mock-fault", "stall=1", "--mock-fault", "stall_after_tokens=3", "--mock-log-dir", str(tmp_path))
    async with serving(*flags, "--mock-name", "r0") as client:
        assert await read_until_silence(client, LONG, 3) == (3, "silence")
        await until(lambda: client.replica.in_flight == 0)
        assert client.replica.drivers[0].snapshot().used_blocks == 0
    (line,) = lines(tmp_path)
    assert (line["fault"], line["tokens"], line["replica"]) == ("stall", 3, "r0")
    assert line["t_us"] > 0


async def test_a_request_that_is_stalled_from_its_beginning_is_never_answered() -> None:
    async with serving("--mock-fault", "stall=1", "--mock-fault", "stall_after_tokens=0") as client:
        assert await read_until_silence(client, LONG, 0) == (0, "silence")
        whole = {**SHORT, "stream": False}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", whole), 0.3)
        await client.ask("DELETE", "/mock/faults")
        assert await client.post("/v1/completions", whole)


async def test_an_answer_shorter_than_the_stall_is_whole() -> None:
    async with serving("--mock-fault", "stall=1", "--mock-fault", "stall_after_tokens=5") as client:
        assert (await client.events({"prompt": "x", "max_tokens": 5}))[-1] == "[DONE]"
        assert (await client.get("/mock/faults"))["injected"] == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_cut_socket_ends_a_stream_without_its_end_and_frees_its_blocks(path: str) -> None:
    async with serving("--mock-fault", "cut=1", "--mock-fault", "cut_after_tokens=2") as client:
        body = {**LONG, "max_tokens": 2000, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(aiohttp.ClientError):
            await client.events(body, path)
        await until(lambda: client.replica.in_flight == 0)
        assert client.replica.drivers[0].snapshot().used_blocks == 0
        with pytest.raises(aiohttp.ClientError):
            await client.post("/v1/completions", SHORT)
        assert (await client.get("/mock/faults"))["injected"] == {"cut": 2}


async def test_a_port_refuses_for_a_while_and_then_serves_again() -> None:
    async with listening("--mock-speedup", "1") as client:
        before = time.monotonic()
        await client.post("/mock/faults", {"refuse_ms": 300, "refuse_after_requests": 0})
        async with aiohttp.ClientSession() as other:
            await refused(other, client.base)
            assert (await client.ask("GET", "/health"))[0] == 200  # the connection that was open lives on
            await served(other, client.base)
        assert time.monotonic() - before >= 0.3  # no sooner than asked; how much later is this machine's affair
        assert (await client.get("/mock/faults"))["injected"] == {"refuse": 1}


async def refused(session: aiohttp.ClientSession, base: str) -> None:
    async with asyncio.timeout(5):
        while True:
            try:
                async with session.get(base + "/health", headers={"Connection": "close"}) as answer:
                    await answer.read()
            except aiohttp.ClientConnectorError:
                return
            await asyncio.sleep(0.005)


async def served(session: aiohttp.ClientSession, base: str) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                async with session.get(base + "/health") as answer:
                    assert answer.status == 200
                return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)


async def test_a_restart_cuts_what_runs_forgets_the_cache_and_counts_from_0() -> None:
    async with listening("--enable-prompt-tokens-details") as client:
        ask = {"prompt": [9] * 64, "max_tokens": 1}
        await client.post("/v1/completions", ask)
        again = await client.post("/v1/completions", ask)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        running = await client.started({})
        async with aiohttp.ClientSession() as other, other.post(client.base + "/mock/restart") as answer:
            assert await answer.json() == {"status": "restarted", "restarts": 1}
        with pytest.raises(aiohttp.ClientError):
            await running
        await until(lambda: client.replica.in_flight == 0)
        state = await client.get("/mock/state")
        assert (state["restarts"], state["cached_blocks"], state["steps"], state["running"]) == (1, 0, 0, 0)
        assert await client.metric("vllm:prefix_cache_queries_total{") == 0
        cold = await client.post("/v1/completions", ask)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.post("/v1/completions", ask))["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


async def test_a_restart_may_come_with_a_request_and_take_it_along(tmp_path: Path) -> None:
    flags = ("--mock-fault", "restart-after-requests=2", "--mock-log-dir", str(tmp_path), "--mock-name", "r0")
    async with listening(*flags) as client:
        await client.post("/v1/completions", SHORT)
        async with aiohttp.ClientSession() as other:
            with pytest.raises(aiohttp.ClientError):
                await other.post(client.base + "/v1/completions", json=SHORT, headers={"X-Request-Id": "unlucky"})
        assert (await client.get("/mock/state"))["restarts"] == 1
        await client.post("/v1/completions", SHORT)
    (line,) = lines(tmp_path)
    assert (line["fault"], line["request_id"]) == ("restart", "unlucky")


async def test_a_slow_start_after_a_restart_keeps_the_port_closed() -> None:
    async with listening("--mock-speedup", "1") as client:
        await client.post("/mock/faults", {"slow_start_ms": 200})
        before = time.monotonic()
        await client.post("/mock/restart")
        async with aiohttp.ClientSession() as other:
            await refused(other, client.base)
            await served(other, client.base)
        assert time.monotonic() - before >= 0.2  # no sooner than asked
        assert (await client.get("/mock/faults"))["injected"] == {"restart": 1, "slow_start": 1}


async def test_faults_change_at_run_time_one_by_one() -> None:
    async with serving() as client:
        assert (await client.get("/mock/faults"))["faults"]["http_500"] == 0
        told = await client.post("/mock/faults", {"http_500": 1, "event_drop": 0.5})
        assert (told["faults"]["http_500"], told["faults"]["event_drop"]) == (1, 0.5)
        assert (await client.ask("POST", "/v1/completions", SHORT))[0] == 500
        told = await client.post("/mock/faults", {"http_500": None})
        assert (told["faults"]["http_500"], told["faults"]["event_drop"]) == (0, 0.5)
        assert await client.post("/v1/completions", SHORT)
        _, told, _ = await client.ask("DELETE", "/mock/faults")
        assert told["faults"]["event_drop"] == 0


@pytest.mark.parametrize(
    ("body", "said"), [({"htp_500": 1}, "choose from"), ({"stall": 2}, "from 0 to 1"), ([1], "Send an object")]
)
async def test_a_wrong_fault_is_a_bad_request_that_names_the_mend(body: Any, said: str) -> None:
    async with serving() as client:
        status, answer, _ = await client.ask("POST", "/mock/faults", body)
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        assert said in answer["error"]["message"]


def test_a_crash_ends_the_process_hard_after_so_many_requests(tmp_path: Path) -> None:
    port = free_ports()[0]
    flags = ("--mock-fault", "crash_after_requests=2", "--mock-log-dir", str(tmp_path), "--mock-name", "r0")
    process = start("--host", "127.0.0.1", "--port", str(port), "--mock-speedup", "50", *flags)
    replica = Replica(process, port)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        replica.post("/v1/completions", SHORT)
        with pytest.raises((ConnectionError, urllib.error.URLError)):
            replica.post("/v1/completions", SHORT, {"X-Request-Id": "last"})
        assert process.wait(timeout=10) == CRASH_CODE
    finally:
        process.kill()
        process.communicate()
    (line,) = lines(tmp_path)
    assert (line["fault"], line["request_id"]) == ("crash", "last")


def test_a_slow_start_refuses_connections_although_the_port_is_taken() -> None:
    port = free_ports()[0]
    process = start("--host", "127.0.0.1", "--port", str(port), "--mock-fault", "slow_start_ms=1500")
    replica = Replica(process, port)
    try:
        reasons = []
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                replica.get("/health")
                break
            except urllib.error.URLError as error:
                reasons.append(error.reason)
                time.sleep(0.02)
        assert reasons
        assert all(isinstance(reason, ConnectionRefusedError) for reason in reasons)
        assert replica.post("/v1/completions", SHORT)
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_an_unknown_fault_is_one_line_and_exit_code_2() -> None:
    process = start("--mock-fault", "gremlins=1")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "no fault named 'gremlins'" in errors
    assert errors.count("\n") == 1
