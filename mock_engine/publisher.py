"""Publishes KV events over ZeroMQ exactly as a vLLM rank does: topic, sequence number, payload.

Sequence numbers start at 0 with the process and advance without subscribers too. The odd thing is vLLM's own: the
socket binds only to an endpoint with `*` or `::` (or ipc, inproc); any other endpoint is connected to. Past batches
are kept for the replay socket, which is always bound. Sending never waits: a slow subscriber loses messages.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

import zmq

from mock_engine.errors import ConfigError
from mock_engine.options import KvEventsConfig

END_OF_REPLAY = b"\xff" * 8  # the sequence frame that ends a replay
PORT_MAX = 65_535
REPLAY_POLL_S = 0.05
LINGER_MS = 200  # how long closing waits for batches that are still in the send queue
REBIND_PAUSE_S = 0.005
REBIND_S_MAX = 2.0  # an endpoint that was ours a moment ago is free again within milliseconds


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of data-parallel rank `rank`: a TCP port moves up by it (0 stays), inproc gets a suffix."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and not (port.isdecimal() and int(port) + (port != "0") * rank <= PORT_MAX):
        raise ConfigError(f"KV event endpoint {endpoint} has no port up to {PORT_MAX} for rank {rank}: name another")
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ConfigError(
            f"KV event endpoint {endpoint} cannot be shared by data-parallel ranks: give a tcp:// endpoint, whose port "
            f"moves up by the rank"
        )
    return endpoint if port == "0" else f"{address}:{int(port) + rank}"


def binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """One rank's event stream. Call `poll` now and then to answer replay requests."""

    def __init__(
        self, config: KvEventsConfig, rank: int = 0, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max(1, config.buffer_steps))
        self._next_seq = 0
        self.endpoint = self._local = rank_endpoint(config.endpoint, rank)  # as others reach it, and as we open it
        self.replay_endpoint = self._local_replay = (
            None if config.replay_endpoint is None else rank_endpoint(config.replay_endpoint, rank)
        )
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        if self._own_context:
            self._context.set(zmq.BLOCKY, 0)  # what nobody closed never holds up the end of a process
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._open()
        except BaseException:
            self.close(linger_ms=0)
            raise

    def _open(self, patience_s: float = 0.0) -> None:
        self._pub = self._socket(zmq.PUB, self._config.hwm)
        _attach(self._pub, self._local, binds(self._local), patience_s)
        if self._local.startswith("tcp://") and self._local.endswith(":0"):
            self._local, self.endpoint = _found(self._pub)
        self._replay: zmq.Socket[bytes] | None = None
        if self._local_replay is not None:
            self._replay = self._socket(zmq.ROUTER, 0)  # a replay is sent whole
            _attach(self._replay, self._local_replay, True, patience_s)
            if self._local_replay.startswith("tcp://") and self._local_replay.endswith(":0"):
                self._local_replay, self.replay_endpoint = _found(self._replay)

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._sockets.append(made)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        made.set_hwm(hwm)
        return made

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def publish(self, payload: bytes) -> int:
        """Sends one batch; returns its sequence number."""
        seq = self.keep(payload)
        self.send(seq, payload)
        return seq

    def keep(self, payload: bytes) -> int:
        """Gives a batch its number and keeps it for replays, without sending it."""
        seq = self._next_seq
        self._next_seq += 1
        self._kept.append((seq, payload))
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), flags=zmq.NOBLOCK)
        self.poll()

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

    def restart(self) -> None:
        """As a new process at the same address: connections are lost, so is what was not sent, the sequence begins at 0
        and there is nothing to replay."""
        self._shut(linger_ms=0)
        self._kept.clear()
        self._next_seq = 0
        self._open(patience_s=REBIND_S_MAX)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Whatever has happened before: no socket and no context of ours outlives this."""
        self._shut(linger_ms)
        if self._own_context:
            self._context.destroy(linger=linger_ms)

    def _shut(self, linger_ms: int) -> None:
        for sock in self._sockets:
            if not sock.closed:
                sock.close(linger=linger_ms)
        self._sockets.clear()


def _attach(sock: zmq.Socket[bytes], endpoint: str, bind: bool, patience_s: float) -> None:
    """Binds or connects. With patience, an endpoint that is in use is tried again."""
    act: Callable[[str], object] = sock.bind if bind else sock.connect
    give_up = time.monotonic() + patience_s
    while True:
        try:
            act(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and time.monotonic() < give_up:
                time.sleep(REBIND_PAUSE_S)
                continue
            verb = "bind" if bind else "connect to"
            raise ConfigError(
                f"cannot {verb} KV event endpoint {endpoint}: {error.strerror}; name a free port in --kv-events-config"
            ) from error


def _found(sock: zmq.Socket[bytes]) -> tuple[str, str]:
    """The free port that was bound: how to bind it again, and how others reach it."""
    port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://*:{port}", f"tcp://{_node_ip()}:{port}"


def _node_ip() -> str:
    """The address that other machines reach this one at; no packet is sent to find it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
