"""The replica's clock: whole microseconds since an epoch that several processes can share.

It reads the same monotonic clock as asyncio, so an instant of the model can be waited for. With a speedup the
model's time runs that many times faster than the wall. It never runs backwards.
"""

from __future__ import annotations

import time


class Clock:
    def __init__(self, epoch_ns: int | None = None, speedup: float = 1.0) -> None:
        """`epoch_ns` is a value of time.monotonic_ns(): the instant 0. Without one, 0 is now."""
        self.epoch_ns = time.monotonic_ns() if epoch_ns is None else epoch_ns
        self.speedup = speedup

    def now_us(self) -> int:
        elapsed_ns = time.monotonic_ns() - self.epoch_ns
        if self.speedup == 1.0:
            return elapsed_ns // 1000
        return int(elapsed_ns * self.speedup) // 1000

    def loop_time(self, at_us: int) -> float:
        """The instant as asyncio's loop.call_at wants it: monotonic seconds."""
        return (self.epoch_ns + at_us * 1000 / self.speedup) / 1e9

    def wall_us(self, model_us: int) -> float:
        """A span of model time as it passes on the wall."""
        return model_us / self.speedup
