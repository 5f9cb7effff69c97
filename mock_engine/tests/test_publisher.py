"""Events on the wire: frames, sequence numbers, bind or connect, ranks, replay. Loopback and inproc only."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from mock_engine import AllBlocksCleared, ConfigError, encode_batch
from mock_engine.options import KvEventsConfig
from mock_engine.publisher import END_OF_REPLAY, Publisher, binds, rank_endpoint
from mock_engine.tests.replica_process import free_ports

CLEARED = encode_batch(1.0, (AllBlocksCleared(),))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    made.set(zmq.BLOCKY, 0)
    try:
        yield made
    finally:
        made.destroy(linger=0)  # whatever failed, no socket outlives the test


def subscriber(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str = "") -> zmq.Socket[bytes]:
    sock = context.socket(zmq.SUB)
    sock.setsockopt(zmq.RCVTIMEO, 5000)
    sock.setsockopt_string(zmq.SUBSCRIBE, topic)
    sock.connect(endpoint.replace("*", "127.0.0.1"))
    return sock


def warm_up(publisher: Publisher, sock: zmq.Socket[bytes]) -> None:
    """Publishes until the subscription has arrived, then forgets what came."""
    for _ in range(500):
        publisher.publish(b"warm-up")
        if sock.poll(10):
            break
    while sock.poll(50):
        sock.recv_multipart()


@pytest.mark.parametrize(
    ("endpoint", "does"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://127.0.0.1:5557", False),
    ],
)
def test_only_wildcard_and_local_endpoints_are_bound(endpoint: str, does: bool) -> None:
    assert binds(endpoint) is does


@pytest.mark.parametrize(
    ("endpoint", "of_rank_2"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://*:0", "tcp://*:0"),
        ("inproc://events", "inproc://events_dp2"),
    ],
)
def test_a_rank_moves_the_port(endpoint: str, of_rank_2: str) -> None:
    assert rank_endpoint(endpoint, 2) == of_rank_2
    assert rank_endpoint(endpoint, 0) == endpoint


def test_ranks_cannot_share_an_ipc_endpoint() -> None:
    with pytest.raises(ConfigError, match="give a tcp"):
        rank_endpoint("ipc:///tmp/x", 1)


def test_a_batch_is_topic_sequence_payload_and_the_sequence_starts_at_0(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    port = free_ports()[0]
    publisher = Publisher(KvEventsConfig(endpoint=f"tcp://*:{port}", topic="kv@me"), context=context)
    assert publisher.next_seq == 0
    sock = subscriber(context, f"tcp://127.0.0.1:{port}", "kv@")
    warm_up(publisher, sock)
    expected = publisher.next_seq
    assert publisher.publish(CLEARED) == expected
    topic, seq, payload = sock.recv_multipart()
    assert (topic, int.from_bytes(seq, "big"), len(seq)) == (b"kv@me", expected, 8)
    assert msgspec.msgpack.decode(payload) == [1.0, [{"type": "AllBlocksCleared"}], 0]
    publisher.close()


def test_the_sequence_advances_without_a_subscriber(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = Publisher(KvEventsConfig(endpoint="inproc://nobody"), context=context)
    assert [publisher.publish(CLEARED) for _ in range(3)] == [0, 1, 2]
    publisher.close()


def test_an_endpoint_without_a_wildcard_connects_to_a_bound_subscriber(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    sock = context.socket(zmq.SUB)
    sock.setsockopt_string(zmq.SUBSCRIBE, "")
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"), context=context)
    warm_up(publisher, sock)
    publisher.publish(CLEARED)
    assert sock.poll(5000)
    publisher.close()


def test_port_0_is_replaced_by_the_port_that_was_found(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = Publisher(KvEventsConfig(endpoint="tcp://*:0"), context=context)
    assert publisher.endpoint.startswith("tcp://")
    assert "*" not in publisher.endpoint
    assert not publisher.endpoint.endswith(":0")
    publisher.close()


def test_a_port_in_use_is_an_error_that_says_what_to_change(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = free_ports()[0]
    first = Publisher(KvEventsConfig(endpoint=f"tcp://*:{port}"), context=context)
    with pytest.raises(ConfigError, match="name a free port"):
        Publisher(KvEventsConfig(endpoint=f"tcp://*:{port}"), context=context)
    first.close()


def replay(publisher: Publisher, sock: zmq.Socket[bytes], *frames: bytes) -> list[list[bytes]]:
    """The answers to one request, up to the end mark or until nothing more comes."""
    sock.send_multipart(frames)
    answers: list[list[bytes]] = []
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        publisher.poll()
        while sock.poll(5):
            answers.append(sock.recv_multipart())
            if END_OF_REPLAY in answers[-1]:
                return answers
    return answers


@pytest.fixture
def replayed(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[tuple[Publisher, zmq.Socket[bytes]]]:
    config = KvEventsConfig(endpoint="inproc://live", replay_endpoint="inproc://replay", buffer_steps=3, topic="t")
    publisher = Publisher(config, context=context)
    for at in range(5):
        publisher.publish(b"%d" % at)
    sock = context.socket(zmq.DEALER)
    sock.connect("inproc://replay")
    yield publisher, sock
    publisher.close()


def _start(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def test_a_replay_gives_each_kept_batch_from_the_start_on_and_the_end_mark(
    replayed: tuple[Publisher, zmq.Socket[bytes]],
) -> None:
    assert replay(*replayed, b"", _start(3)) == [
        [b"", b"t", _start(3), b"3"],
        [b"", b"t", _start(4), b"4"],
        [b"", b"", END_OF_REPLAY, b""],
    ]


def test_a_start_that_is_too_old_begins_at_the_oldest_kept_batch(replayed: tuple[Publisher, zmq.Socket[bytes]]) -> None:
    assert [answer[3] for answer in replay(*replayed, b"", _start(0))] == [b"2", b"3", b"4", b""]


def test_a_start_in_the_future_gives_the_end_mark_alone(replayed: tuple[Publisher, zmq.Socket[bytes]]) -> None:
    assert replay(*replayed, b"", _start(99)) == [[b"", b"", END_OF_REPLAY, b""]]


def test_a_request_with_the_wrong_number_of_frames_gets_no_answer(
    replayed: tuple[Publisher, zmq.Socket[bytes]],
) -> None:
    assert replay(*replayed, _start(0)) == []


def test_a_req_socket_receives_the_first_answer(
    replayed: tuple[Publisher, zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher, _ = replayed
    sock = context.socket(zmq.REQ)
    sock.connect("inproc://replay")
    sock.send(_start(4))
    for _ in range(100):
        publisher.poll()
        if sock.poll(10):
            break
    assert sock.recv_multipart() == [b"t", _start(4), b"4"]


def test_a_restart_keeps_the_address_and_begins_the_sequence_anew_with_nothing_to_replay(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    publisher = Publisher(KvEventsConfig(endpoint="tcp://*:0", replay_endpoint="tcp://127.0.0.1:0"))
    try:
        endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
        sock = subscriber(context, f"tcp://127.0.0.1:{endpoint.rpartition(':')[2]}")
        warm_up(publisher, sock)
        assert publisher.next_seq > 0
        publisher.restart()
        assert (publisher.endpoint, publisher.replay_endpoint, publisher.next_seq) == (endpoint, replay_endpoint, 0)
        asked = context.socket(zmq.DEALER)
        assert replay_endpoint is not None
        asked.connect(f"tcp://127.0.0.1:{replay_endpoint.rpartition(':')[2]}")
        assert replay(publisher, asked, b"", _start(0)) == [[b"", b"", END_OF_REPLAY, b""]]
        warm_up(publisher, sock)  # the subscriber finds the way back by itself
        expected = publisher.publish(CLEARED)
        assert int.from_bytes(sock.recv_multipart()[1], "big") == expected
    finally:
        publisher.close()


def test_a_publisher_that_could_not_open_leaves_nothing_open() -> None:
    port = free_ports()[0]
    first = Publisher(KvEventsConfig(endpoint=f"tcp://*:{port}"))
    try:
        with pytest.raises(ConfigError):
            Publisher(KvEventsConfig(endpoint="tcp://*:0", replay_endpoint=f"tcp://*:{port}"))
        with pytest.raises(ConfigError):
            Publisher(KvEventsConfig(endpoint="nonsense://x*"))
    finally:
        first.close()
    Publisher(KvEventsConfig(endpoint=f"tcp://*:{port}")).close()


def test_a_publisher_that_nobody_closes_does_not_hold_up_its_process() -> None:
    """With batches that nobody will ever fetch, and an exception on the way out."""
    code = (
        "from mock_engine.publisher import Publisher\n"
        "from mock_engine.options import KvEventsConfig\n"
        f"one = Publisher(KvEventsConfig(endpoint='tcp://127.0.0.1:{free_ports()[0]}'))\n"
        "for _ in range(100): one.publish(b'x' * 1000)\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 3
