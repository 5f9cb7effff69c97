"""The router as a process: what it says, and how it ends."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

import routers
from routers.__main__ import build_parser, main, parse_replica, read_arguments
from routers.errors import OptionError, StartError
from routers.service import ReplicaAddress

ROOT = Path(routers.__file__).parents[1]
REPLICA = ["--replica", "r0=http://127.0.0.1:9"]


def test_a_replica_is_read_with_its_endpoints():
    assert parse_replica("r0=http://h:1/,events=tcp://h:2,replay=tcp://h:3") == ReplicaAddress(
        "r0", "http://h:1", "tcp://h:2", "tcp://h:3"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r0", "names no replica: write it as NAME=http"),
        ("=http://h:1", "names no replica"),
        ("r0=h:1", "names no replica"),
        ("r0=http://h:1,evnets=tcp://h:2", "'evnets=tcp://h:2' is not understood"),
        ("r0=http://h:1,events=h:2", "is not understood"),
        ("r0=http://h:1,replay=tcp://h:3", "add events="),
    ],
)
def test_a_malformed_replica_says_the_form(text, message):
    with pytest.raises(StartError, match=message):
        parse_replica(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no replica to route to"),
        ([*REPLICA, *REPLICA], "given twice"),
        ([*REPLICA, "--port", "70000"], "is no port"),
        ([*REPLICA, "--port", "x"], "invalid int value"),
        ([*REPLICA, "--metrics-interval-ms", "0"], "at least 1"),
        ([*REPLICA, "--nonsense"], "unrecognized arguments"),
        ([*REPLICA, "--prefix-interval-ms", "0"], "--prefix-interval-ms 0 cannot work"),
        ([*REPLICA, "--retries", "-1"], "--retries -1 cannot work"),
        ([*REPLICA, "--health-interval-ms", "-5"], "--health-interval-ms -5 cannot work"),
        ([*REPLICA, "--peer", "h:1"], "is no router's URL"),
        ([*REPLICA, "--peer", "http://[::1"], "is no router's URL"),
        ([*REPLICA, "--peer", "http://h:99999999"], "is no router's URL"),
        (["--replica", "r0=http://["], "names no replica"),
        ([*REPLICA, "--metrics-interval-ms", "9" * 400], "--metrics-interval-ms cannot work"),
        ([*REPLICA, "--prefix-interval-ms", "9" * 400], "--prefix-interval-ms cannot work"),
        ([*REPLICA, "--health-interval-ms", "9" * 400], "--health-interval-ms cannot work"),
        ([*REPLICA, "--peer", "http://h:1", "--peer-delay-ms", "1e308"], "--peer-delay-ms cannot work: give a time of"),
        ([*REPLICA, "--peer", "http://h:1", "--peer-delay-ms", "nan"], "--peer-delay-ms cannot work"),
        ([*REPLICA, "--block-size", "9" * 30], "--block-size cannot work"),
        ([*REPLICA, "--epoch-ns", "9" * 30], "--epoch-ns cannot work"),
        ([*REPLICA, "--host", "\0"], "--host has characters"),
        ([*REPLICA, "--host", "\ud800"], "--host has characters"),
        ([*REPLICA, "--log-file", "a\0"], "--log-file has characters"),
        ([*REPLICA, "--peer-delay-ms", "5"], "delays nothing"),
    ],
)
def test_arguments_that_cannot_work_say_what_to_change(arguments, message):
    with pytest.raises(StartError, match=message):
        read_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "no policy named 'best'"),
        (["--policy", "dynamo-kv", "--option", "temp=1"], "no option 'temp'"),
        (["--policy", "dynamo-kv", "--option", "temperature"], "key=value"),
        (["--block-size", "0"], "block_size=0"),
        (["--policy", "clairvoyant"], "run it with --mode sim"),
        (["--fault", "gremlins"], "no fault named 'gremlins'"),
        (["--ramp-s", "-1"], "ramp_s=-1"),
        (["--ramp-s", "1e308"], r"ramp_s=1e\+308 cannot work: give at most 1000000000"),
        (["--ramp-s", "nan"], "ramp_s=nan"),
        (["--peer", "http://h:1", "--peer-delay-ms", "-1"], "delay_us=-1000"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(OptionError, match=message):
        read_arguments([*REPLICA, *arguments])


def test_arguments_become_the_service_they_describe(tmp_path):
    config = read_arguments(
        [
            *REPLICA, "--policy", "dynamo-kv:decay", "--option", "temperature=0.5", "--seed", "7", "--retries", "0",
            "--session-header", "X-S", "--log-file", str(tmp_path / "l"), "--epoch-ns", "12",
            "--health-interval-ms", "0",
        ]
    )  # fmt: skip
    assert config.options == {"temperature": 0.5}
    assert (config.policy, config.seed, config.epoch_ns) == ("dynamo-kv:decay", 7, 12)
    assert (config.proxy.session_header, config.proxy.retries_max, config.health_interval_ms) == ("X-S", 0, 0)


def test_faults_ramp_and_peers_are_off_unless_asked_for():
    plain = read_arguments(REPLICA)
    assert (plain.ramp_s, plain.peers, plain.proxy.faults.names()) == (0.0, (), [])
    config = read_arguments(
        [
            *REPLICA, "--ramp-s", "300", "--peer", "http://h:1/", "--peer", "http://h:2", "--peer-delay-ms", "20",
            "--fault", "template-mismatch", "--fault", "body-truncate-bytes=4096", "--prefix-interval-ms", "250",
        ]
    )  # fmt: skip
    assert (config.ramp_s, config.peers, config.peer_delay_ms) == (300.0, ("http://h:1", "http://h:2"), 20.0)
    assert config.proxy.faults.names() == ["body-truncate-bytes=4096", "template-mismatch"]
    assert config.prefix_interval_ms == 250


def test_help_names_every_policy_and_an_example():
    text = build_parser().format_help()
    for name in routers.policy_names():
        assert f"  {name} " in text
    assert "--replica r0=http://127.0.0.1:8000,events=tcp://127.0.0.1:5557" in text


def test_a_taken_port_is_one_line_and_exit_code_two(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([*REPLICA, "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error == f"routers: 127.0.0.1:{port} is taken by another process: give another --port\n"


def test_a_host_that_is_not_ours_is_one_line_and_exit_code_two(capsys):
    assert main([*REPLICA, "--host", "203.0.113.7", "--port", "0"]) == 2
    assert "cannot listen on 203.0.113.7:0" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["..", "a" * 300])
def test_a_host_that_is_no_name_is_one_line_and_exit_code_two(capsys, host):
    assert main([*REPLICA, "--host", host, "--port", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"routers: cannot listen on {host!r}, which is no name of a host: give another --host"
    ]


def test_a_policy_file_that_exits_ends_the_router_with_two_and_says_where(capsys, tmp_path):
    (tmp_path / "leaver.py").write_text("import sys\nsys.exit(0)\n")
    assert main([*REPLICA, "--port", "0", "--policy", f"{tmp_path / 'leaver.py'}:P"]) == 2
    assert "fails when loaded: SystemExit: 0 (leaver.py, line 2)" in capsys.readouterr().err


def test_a_policy_that_exits_while_it_is_told_of_replicas_ends_the_router_with_two_and_says_where(capsys, tmp_path):
    (tmp_path / "leaver.py").write_text(
        "import sys\nfrom routers import POLICIES\n"
        "class P(POLICIES['round-robin']):\n    def observe(self, event):\n        sys.exit(0)\n"
    )
    assert main([*REPLICA, "--port", "0", "--policy", f"{tmp_path / 'leaver.py'}:P"]) == 2
    assert "SystemExit: 0 (leaver.py, line 5): its code must change" in capsys.readouterr().err


def test_an_event_endpoint_that_is_none_is_one_line_and_exit_code_two(capsys):
    replica = ["--replica", "r0=http://127.0.0.1:9,events=nope://x"]
    assert main([*replica, "--policy", "dynamo-kv", "--port", "0"]) == 2
    assert "cannot subscribe to 'nope://x'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_with_its_log_written(fleet, tmp_path, number):
    (replica,) = await fleet(1)
    log = tmp_path / "log.jsonl"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "routers", "--replica", f"r0={replica.url}", "--port", "0", "--log-file", str(log),
        "--policy", "dynamo-kv", cwd=ROOT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        ready = (await process.stderr.readline()).decode()
        warning = (await process.stderr.readline()).decode()
        assert ready.startswith("router dynamo-kv on http://127.0.0.1:")
        assert "hears none of r0: add events=" in warning
        url = ready.split()[3]
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json={}) as answer:
            assert answer.status == 200
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert (await process.stderr.read()) == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert log.read_bytes().count(b"\n") == 1
