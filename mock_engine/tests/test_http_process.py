"""A replica as a process: how it starts, serves the openai client, treats clients that leave or dawdle, and ends."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mock_engine import generated_token_ids
from mock_engine.tests.replica_process import Replica, free_ports, replica, start
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()
USER = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Replica]:
    with replica("--served-model-name", "m", "--enable-prompt-tokens-details", "--mock-speedup", "4") as found:
        yield found


def test_the_openai_client_completes_and_chats(running: Replica) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m"]
        done = client.completions.create(model="m", prompt="hello", max_tokens=4, seed=9)
        assert done.choices[0].text == WORDS.decode(generated_token_ids(9, 0, 4))
        assert done.usage is not None
        assert done.usage.completion_tokens == 4
        chat = client.chat.completions.create(model="m", messages=USER, max_tokens=3, seed=9)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == WORDS.decode(generated_token_ids(9, 0, 3))
        assert chat.choices[0].finish_reason == "length"


def test_the_openai_client_streams(running: Replica) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.completions.create(model="m", prompt="hello", max_tokens=5, seed=9, stream=True))
        assert [chunk.choices[0].text for chunk in chunks] == [
            WORDS.decode([one]) for one in generated_token_ids(9, 0, 5)
        ]
        options: Any = {"include_usage": True}
        stream = client.chat.completions.create(
            model="m",
            messages=USER,
            max_tokens=3,
            stream=True,
            stream_options=options,  # type: ignore[arg-type]
        )
        *_, last = stream
        assert last.usage is not None
        assert last.usage.completion_tokens == 3


async def test_the_async_openai_client_works_too(running: Replica) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        done = await client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=2)
        assert done.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(model="m", messages=USER, max_tokens=3, stream=True)  # type: ignore[call-overload]
        assert len([chunk async for chunk in stream]) == 4


def test_the_openai_client_sees_errors_as_its_own_kinds(running: Replica) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="m", prompt="x", max_tokens=0)


def head(size: int, version: str = "1.1") -> bytes:
    lines = (
        f"POST /v1/completions HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {size}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def send(running: Replica, body: dict[str, Any]) -> socket.socket:
    """A raw request whose answer is left to read."""
    text = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", running.port), timeout=20)
    sock.sendall(head(len(text)) + text)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_blocks_at_once(running: Replica, stream: bool) -> None:
    sock = send(running, {"prompt": [9] * 100, "max_tokens": 20_000, "stream": stream})
    running.wait(lambda state: state["used_blocks"] >= 7, "the request runs")
    sock.close()
    running.wait(lambda state: state["running"] == 0 and state["used_blocks"] == 0, "the blocks are free")


def test_the_headers_of_a_stream_come_before_its_first_token(running: Replica) -> None:
    sock = send(running, {"prompt": [1000 + at for at in range(30_000)], "max_tokens": 1, "stream": True})
    first = sock.recv(4096)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data:" not in first
    assert b"text/event-stream; charset=utf-8" in first
    sock.close()


def test_one_connection_carries_streams_and_whole_answers_in_turn(running: Replica) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    for stream in (True, False, True):
        body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200
        assert text.endswith(b"data: [DONE]\n\n") is stream
    connection.close()


def test_an_http_1_0_client_gets_its_stream_without_chunks(running: Replica) -> None:
    text = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as sock:
        sock.sendall(head(len(text), "1.0") + text)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    body = answer.partition(b"\r\n\r\n")[2]
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_reader_that_dawdles_does_not_hold_up_the_others(running: Replica) -> None:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", running.port))
    body = json.dumps(
        {"prompt": "x", "max_tokens": 4000, "stream": True, "seed": 3, "return_token_ids": True, "n": 8}
    ).encode()
    slow.sendall(head(len(body)) + body)
    running.wait(lambda state: state["running"] == 8, "the slow one runs")
    for _ in range(3):
        done = running.post("/v1/completions", {"prompt": "y", "max_tokens": 20})
        assert done["usage"]["completion_tokens"] == 20
    slow.close()
    running.wait(lambda state: state["running"] == 0, "the slow one is gone")


def test_parallel_streams_each_get_their_own_answer(running: Replica) -> None:
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        body = json.dumps({"prompt": "x" * seed, "max_tokens": 30, "stream": True, "seed": seed}).encode()
        request = urllib.request.Request(f"{running.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            events = [line[6:] for line in answer.read().decode().split("\n\n") if line.startswith("data: {")]
        found[seed] = "".join(json.loads(event)["choices"][0]["text"] for event in events)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: WORDS.decode(generated_token_ids(seed, 0, 30)) for seed in range(1, 17)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_code_0_even_with_requests_in_flight(number: int) -> None:
    port = free_ports()[0]
    process = start("--host", "127.0.0.1", "--port", str(port))
    found = Replica(process, port)
    assert process.stdout is not None
    assert "serves mock-model" in process.stdout.readline()
    sock = send(found, {"prompt": "x", "max_tokens": 20_000, "stream": True})
    found.wait(lambda state: state["running"] == 1, "the request runs")
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
    assert b'"finish_reason":"abort"' in _read_all(sock)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def _read_all(sock: socket.socket) -> bytes:
    data = b""
    with sock:
        while piece := sock.recv(65536):
            data += piece
    return data


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--port", "0"), "--port"),
        (("--nonsense",), "--nonsense"),
        (("--mock-preset", "gpu-9000"), "llama-3.1-8b-h100"),
        (("--kv-events-config", "{"), "--kv-events-config"),
        (("--kv-events-config", '{"endpont": "tcp://*:1"}'), "endpont"),
        (("--block-size", "0"), "block"),
        (("--tokenizer", "/nothing.json"), "--tokenizer"),
        (("--chat-template", "/nothing.jinja"), "--chat-template"),
        (("--ssl-certfile", "x"), "--ssl-keyfile"),
        (("--lora-modules", "ad1"), "NAME=PATH"),
        (("--prefix-caching-hash-algo", "md5"), "sha256"),
        (("--mock-speedup", "nan"), "from 0.001 to 1000000"),
        (("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:99999"}'), "no port up to"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line_and_exit_code_2(flags: tuple[str, ...], named: str) -> None:
    process = start(*flags)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert not out
    assert errors.count("\n") == 1
    assert errors.startswith("python -m mock_engine: error: ")
    assert named in errors


@pytest.mark.parametrize("what", ["http", "events"])
def test_a_port_in_use_is_one_line_and_exit_code_2(what: str) -> None:
    taken, other = socket.create_server(("", 0)), free_ports()[0]
    port = taken.getsockname()[1]
    events = json.dumps(
        {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port if what == 'events' else free_ports()[0]}"}
    )
    process = start("--port", str(port if what == "http" else other), "--kv-events-config", events)
    _, errors = process.communicate(timeout=20)
    taken.close()
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert str(port) in errors


def test_help_names_every_group_and_the_presets() -> None:
    process = start("--help")
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    for word in (
        "server:", "engine:", "KV events:", "mock only:", "--max-num-seqs", "llama-3.1-8b-h100", "event_wrong_parent",
        "limits: Steps are scheduled in lockstep",
    ):  # fmt: skip
        assert word in out


def test_several_replicas_live_in_one_process_on_consecutive_ports() -> None:
    port, _, events, *_ = free_ports(6)
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"}
    process = start(
        "--host", "127.0.0.1", "--port", str(port), "--replicas-per-process", "2", "--mock-speedup", "50",
        "--data-parallel-size", "2", "--kv-events-config", json.dumps(config), "--mock-name", "r",
    )  # fmt: skip
    assert process.stdout is not None
    names = [process.stdout.readline().partition(":")[0] for _ in range(2)]
    assert names == ["r0", "r1"]
    Replica(process, port + 1).post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert Replica(process, port).state()["steps"] == 0
    assert Replica(process, port + 1).state()["steps"] == 1
    for at in (0, 1):  # each replica's ranks have event ports of their own
        sources = Replica(process, port + at).get("/kv_event_sources")
        assert [sources[rank]["endpoint"] for rank in ("0", "1")] == [
            f"tcp://*:{events + 2 * at}", f"tcp://*:{events + 2 * at + 1}"
        ]  # fmt: skip
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0


def trusting_only(cert: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(cert))
    context.check_hostname = False
    return context


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl command to make a certificate with")
    return cert, key


def test_tls_is_served_with_a_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = free_ports()[0]
    process = start("--host", "127.0.0.1", "--port", str(port), "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    assert process.stdout is not None
    assert "https://" in process.stdout.readline()
    trusting = trusting_only(cert)
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, context=trusting, timeout=20) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_tls_may_ask_clients_for_a_certificate_and_read_the_key_from_the_certificates_file(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    port = free_ports()[0]
    flags = ("--ssl-certfile", str(both), "--ssl-ca-certs", str(cert), "--ssl-cert-reqs", "2", "--api-key", "k")
    process = start("--host", "127.0.0.1", "--port", str(port), *flags)
    try:
        assert process.stdout is not None
        assert "https://" in process.stdout.readline()
        known = trusting_only(cert)
        known.load_cert_chain(str(cert), str(key))
        models = urllib.request.Request(f"https://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer k"})
        with urllib.request.urlopen(models, context=known, timeout=20) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "mock-model"
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on when TLS notices
            urllib.request.urlopen(models, context=trusting_only(cert), timeout=20)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 0


def test_asynchronous_scheduling_is_accepted_with_a_sentence_on_what_it_does_not_do() -> None:
    port = free_ports()[0]
    process = start("--host", "127.0.0.1", "--port", str(port), "--async-scheduling")
    assert process.stdout is not None
    assert "serves mock-model" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert errors.count("\n") == 1
    assert "schedules in lockstep" in errors


def test_an_idle_connection_can_be_used_again_a_second_later(running: Replica) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.request("GET", "/health")
    connection.getresponse().read()
    time.sleep(1.0)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b""
    connection.close()


def test_importing_the_package_opens_nothing_and_loads_no_server() -> None:
    shell = ("aiohttp", "zmq", "asyncio", "prometheus_client")
    code = f"import sys, mock_engine; print([name for name in {shell} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
