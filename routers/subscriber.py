"""Subscriber: one replica's KV events over ZeroMQ, decoded, ordered and handed to the router.

Carries out what `EventStream` says, in order. The socket's monitor tells when the connection is lost, which is how a
replica that restarts is noticed before it says its first word. While a replay is fetched, live messages wait in the
socket, whose queue has no limit here: losing events silently is the one thing that a subscriber must not do.
Everything that goes wrong is counted, and what is wrong with a batch makes the belief in that replica void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from routers.errors import StartError, WireError
from routers.faults import NO_FAULTS, RouterFaults
from routers.router import Router
from routers.stream import Apply, Effect, EventStream, Invalidate
from routers.wire import Batch, Skipped, decode_batch, decode_sequence, to_events

REPLAY_TIMEOUT_S = 2.0
_REPLAY_END = b"\xff" * 8


class Subscriber:
    def __init__(
        self,
        router: Router,
        replica: str,
        endpoint: str,
        *,
        replay: str | None = None,
        block_size: int = 16,
        now_us: Callable[[], int],
        context: zmq.asyncio.Context,
        lora_names: set[str] | None = None,
        faults: RouterFaults = NO_FAULTS,
    ) -> None:
        self.replica = replica
        self.stream = EventStream(replay=replay is not None, heed=not faults.ignore_event_sequence)
        self.void_since_us: int | None = None
        self.void_us_max = 0
        self.skipped = Skipped()
        self.last_error: str | None = None
        self._router = router
        self._endpoint = endpoint
        self._replay = replay
        self._block_size = block_size
        self._now_us = now_us
        self._lora_names = lora_names if lora_names is not None else set()
        self._context = context
        self._ignore_extra_keys = faults.ignore_extra_keys
        self._in_turn = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        socket = self.connect()
        watching = asyncio.ensure_future(self._watch(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
        try:
            while True:
                frames = await socket.recv_multipart()
                async with self._in_turn:
                    await self._message(frames)
        finally:
            watching.cancel()
            socket.disable_monitor()
            socket.close()

    async def _watch(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        try:
            while True:
                await recv_monitor_message(monitor)
                while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # what came before it counts
                    await asyncio.sleep(0)
                async with self._in_turn:
                    await self._carry_out(self.stream.disconnected())
        finally:
            monitor.close()

    def connect(self) -> zmq.asyncio.Socket:
        """A subscribed socket, or StartError for an address that cannot be one; nothing is known of who listens."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise StartError(
                f"replica {self.replica}: cannot subscribe to {self._endpoint!r} ({error}): give events=tcp://HOST:PORT"
            ) from error
        return socket

    def report(self) -> dict[str, Any]:
        return {
            "endpoint": self._endpoint,
            "replay": self._replay,
            "last_sequence": self.stream.last,
            "catching_up": self.stream.catching_up,
            **msgspec.structs.asdict(self.stream.stats),
            "void_since_us": self.void_since_us,
            "void_us_max": self.void_us_max,
            "skipped": msgspec.structs.asdict(self.skipped),
            "last_error": self.last_error,
        }

    async def _message(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3:
                raise WireError(f"a message of {len(frames)} frames is no KV event message: vLLM sends 3")
            sequence = decode_sequence(frames[1])
        except WireError as error:
            self.stream.stats.undecodable += 1
            self.last_error = str(error)
            return
        await self._carry_out(self.stream.receive(sequence, self._decode(frames[2])))

    async def _carry_out(self, effects: list[Effect]) -> None:
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Apply):
                events = to_events(
                    effect.batch, self._block_size, self.skipped, ignore_extra_keys=self._ignore_extra_keys
                )
                self._lora_names.update(name for event in events if (name := getattr(event, "lora_name", None)))
                if events:
                    self._believe_again()
                    self._router.kv_events(self.replica, events, self._now_us())
            elif isinstance(effect, Invalidate):
                self.void_since_us = self._now_us()
                self._router.event_gap(self.replica, self._now_us())
            else:
                todo.extend(self.stream.replayed(await self._fetch(effect.start)))

    def _believe_again(self) -> None:
        if self.void_since_us is not None:
            self.void_us_max = max(self.void_us_max, self._now_us() - self.void_since_us)
            self.void_since_us = None

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except WireError as error:
            self.last_error = str(error)
            return None

    async def _fetch(self, start: int) -> list[tuple[int, Batch | None]]:
        """Past batches from `start` on, as far as they come before the timeout."""
        assert self._replay is not None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        found: list[tuple[int, Batch | None]] = []
        try:
            socket.connect(self._replay)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    # ["", topic, sequence, payload]; older versions left out the topic.
                    if len(frames) < 3 or len(frames[-2]) != 8:
                        raise WireError(f"a replay message of {len(frames)} frames is not vLLM's: it sends 4")
                    if frames[-2] == _REPLAY_END:
                        return found
                    found.append((int.from_bytes(frames[-2], "big"), self._decode(frames[-1])))
        except TimeoutError:
            self.last_error = f"no (complete) replay from {self._replay} within {REPLAY_TIMEOUT_S:g} s"
        except (zmq.ZMQError, WireError) as error:
            self.last_error = f"replay from {self._replay} failed: {error}"
        finally:
            socket.close()
        return found
