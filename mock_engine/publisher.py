"""Publishes KV events over ZeroMQ exactly as a vLLM rank does: topic, sequence number, payload.

Sequence numbers start at 0 with the process and advance without subscribers too. The odd thing is vLLM's own: the
socket binds only to an endpoint with `*` or `::` (or ipc, inproc); any other endpoint is connected to. Past batches
are kept for the replay socket, which is always bound. Sending never waits: a slow subscriber loses messages.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

import zmq

from mock_engine.errors import ConfigError
from mock_engine.options import KvEventsConfig

END_OF_REPLAY = b"\xff" * 8  # the sequence frame that ends a replay
REPLAY_POLL_S = 0.05
LINGER_MS = 200  # how long closing waits for batches that are still in the send queue


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of data-parallel rank `rank`: a TCP port moves up by it (0 stays), inproc gets a suffix."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ConfigError(
            f"KV event endpoint {endpoint} cannot be shared by data-parallel ranks: give a tcp:// endpoint, whose port "
            f"moves up by the rank"
        )
    address, _, port = endpoint.rpartition(":")
    return endpoint if port == "0" else f"{address}:{int(port) + rank}"


def binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """One rank's event stream. Call `poll` now and then to answer replay requests."""

    def __init__(
        self, config: KvEventsConfig, rank: int = 0, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max(1, config.buffer_steps))
        self._next_seq = 0
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self.endpoint = rank_endpoint(config.endpoint, rank)
        self.replay_endpoint = None if config.replay_endpoint is None else rank_endpoint(config.replay_endpoint, rank)
        self._pub = self._context.socket(zmq.PUB)
        try:
            self._pub.set_hwm(config.hwm)
            self._pub.setsockopt(zmq.LINGER, LINGER_MS)
            self.endpoint = _open(self._pub, self.endpoint, binds(self.endpoint))
            if self.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(0)  # a replay is sent whole
                self._replay.setsockopt(zmq.LINGER, LINGER_MS)
                self.replay_endpoint = _open(self._replay, self.replay_endpoint, True)
        except ConfigError:
            self.close()
            raise

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def publish(self, payload: bytes) -> int:
        """Sends one batch; returns its sequence number."""
        seq = self._next_seq
        self._next_seq += 1
        self._kept.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), flags=zmq.NOBLOCK)
        self.poll()
        return seq

    def poll(self) -> None:
        """Answers every replay request that has arrived; one with the wrong number of frames gets no answer."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                self._answer(self._replay, frames[0], int.from_bytes(frames[2], "big"))

    def _answer(self, replay: zmq.Socket[bytes], client: bytes, start: int) -> None:
        for seq, payload in self._kept:
            if seq >= start:
                replay.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    @property
    def answers_replays(self) -> bool:
        return self._replay is not None

    def close(self) -> None:
        for sock in (self._pub, self._replay):
            if sock is not None and not sock.closed:
                sock.close()
        if self._own_context:
            self._context.term()


def _open(sock: zmq.Socket[bytes], endpoint: str, bind: bool) -> str:
    """Binds or connects; returns the endpoint as others reach it."""
    act: Callable[[str], object] = sock.bind if bind else sock.connect
    try:
        act(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise ConfigError(
            f"cannot {verb} KV event endpoint {endpoint}: {error.strerror}; name a free port in --kv-events-config"
        ) from error
    if not (bind and endpoint.startswith("tcp://") and endpoint.endswith(":0")):
        return endpoint
    bound = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"tcp://{_node_ip()}:{bound.rpartition(':')[2]}"


def _node_ip() -> str:
    """The address that other machines reach this one at; no packet is sent to find it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
