"""Puts a rank's event batches on the wire, or spoils them there as the fault plan says: lost, late, twice, swapped.

Without a fault a batch goes straight to the publisher. Delayed ones leave in order, one timer for all; they are the
queue before vLLM's publisher, and once that is full the engine has to wait (`room`). A batch that is to be swapped is
held until the next one has left, or until it has waited long enough: swapped is not lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mock_engine.clock import Clock
from mock_engine.events import KvEvent
from mock_engine.faults import OFF, FaultPlan
from mock_engine.options import ServerOptions
from mock_engine.publisher import Publisher
from mock_engine.wire import encode_batch

Note = Callable[..., None]  # (fault, **what it hit)


class _Parcel(NamedTuple):
    due_us: int
    seq: int
    payload: bytes
    copies: int
    swap_us: int | None


class Outbox:
    """`started_us` is when the publisher began, or began again."""

    def __init__(
        self, publisher: Publisher, rank: int, options: ServerOptions, plan: FaultPlan, clock: Clock, note: Note
    ) -> None:
        self.publisher = publisher
        self.started_us = clock.now_us()
        self._rank = rank
        self._form = options.kv_event_format
        self._int_hashes = options.int_block_hashes
        self._plan = plan
        self._clock = clock
        self._note = note
        self._waiting: deque[_Parcel] = deque()
        self._waiting_max = options.kv_events.max_queue_size  # 0 or less: no limit
        self._engine: Callable[[], None] | None = None  # waits for room
        self._timer: asyncio.TimerHandle | None = None
        self._held: _Parcel | None = None
        self._held_timer: asyncio.TimerHandle | None = None

    def __call__(self, events: Sequence[KvEvent]) -> None:
        """Publishes one step's events."""
        if self._plan.faults is OFF and not self._waiting and self._held is None:
            self.publisher.publish(self._encode(events))
            return
        fault = self._plan.batch(self._rank, events, self._clock.now_us() - self.started_us)
        payload = self._encode(fault.events)
        seq = self.publisher.keep(payload)
        hit: dict[str, Any] = {"rank": self._rank, "seq": seq}
        if fault.wrong_parents:
            self._note("event_wrong_parent", **hit, events=fault.wrong_parents)
        if fault.lost is not None:
            self._note(fault.lost, **hit)
            return
        if fault.copies > 1:
            self._note("event_duplicate", **hit)
        if fault.delay_us:
            self._note("event_delay", **hit, delay_us=fault.delay_us)
        parcel = _Parcel(self._clock.now_us() + fault.delay_us, seq, payload, fault.copies, fault.swap_us)
        if fault.delay_us or self._waiting:  # nothing overtakes what is delayed
            self._waiting.append(parcel)
            self._arm()
        else:
            self._dispatch(parcel)

    def room(self, then: Callable[[], None]) -> bool:
        """Whether the queue takes another batch. If not, `then` is called as soon as it does."""
        if self._waiting_max <= 0 or len(self._waiting) < self._waiting_max:
            return True
        self._engine = then
        return False

    def _encode(self, events: Sequence[KvEvent]) -> bytes:
        return encode_batch(time.time(), events, self._rank, form=self._form, int_hashes=self._int_hashes)

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            at_s = self._clock.loop_time(self._waiting[0].due_us)
            self._timer = asyncio.get_running_loop().call_at(at_s, self._send_due)

    def _send_due(self) -> None:
        self._timer = None
        now_us = self._clock.now_us()
        while self._waiting and self._waiting[0].due_us <= now_us:
            self._dispatch(self._waiting.popleft())
        self._arm()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine()

    def _dispatch(self, parcel: _Parcel) -> None:
        if parcel.swap_us is not None and self._held is None:
            self._held = parcel
            alone_us = self._clock.now_us() + parcel.swap_us
            self._held_timer = asyncio.get_running_loop().call_at(self._clock.loop_time(alone_us), self._let_go)
            return
        for _ in range(parcel.copies):
            self.publisher.send(parcel.seq, parcel.payload)
        if self._held is not None:
            self._note("event_reorder", rank=self._rank, seq=self._held.seq, after=parcel.seq)
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        if held is not None:
            for _ in range(held.copies):
                self.publisher.send(held.seq, held.payload)

    def restart(self, starts_us: int) -> None:
        """What is still here goes down with the process; the sequence begins at 0."""
        self.close()
        self.publisher.restart()
        self.started_us = starts_us

    def close(self) -> None:
        for timer in (self._timer, self._held_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._held_timer = self._held = self._engine = None
        self._waiting.clear()
