"""The load generator's look at itself: its CPU share, how late its own loop wakes it, and whether its parent lives."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from typing import Any

import gevent

from harness.load_run import LoadRun

WATCH_S = 1.0
"""Spacing of the looks."""
CPU_WINDOW = 5
"""Looks over which a CPU share is averaged before it is called too high."""
CPU_SHARE_MAX = 0.9
"""Locust's own bound: one process runs on one core, and above this its clock readings come late."""


def end_with(parent: int) -> None:
    """A greenlet's work: ends this process, without a word, when `parent` is not its parent any more.

    What the kernel does on Linux to children of the harness it does not do to theirs, and elsewhere to nobody.
    """
    while os.getppid() == parent:
        gevent.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    """Looks from its making until `stop`."""

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self._late_us: list[int] = []
        self._shares: list[float] = []
        self._cpu_s = time.process_time()
        self._warned = False
        self._greenlet = gevent.spawn(self._look)

    def _look(self) -> None:
        while True:
            wall_ns, cpu_s = time.monotonic_ns(), time.process_time()
            gevent.sleep(WATCH_S)
            passed_s = (time.monotonic_ns() - wall_ns) / 1e9
            self._late_us.append(max(0, round((passed_s - WATCH_S) * 1e6)))
            self._shares.append((time.process_time() - cpu_s) / passed_s)
            recent = self._shares[-CPU_WINDOW:]
            if len(recent) == CPU_WINDOW and sum(recent) / CPU_WINDOW > CPU_SHARE_MAX and not self._warned:
                self._warned = True
                self._run.files.event(
                    "cpu_warning",
                    t_us=self._run.us(time.monotonic_ns()),
                    by="routebench",
                    cpu_percent=round(100 * sum(recent) / CPU_WINDOW, 1),
                )

    def stop(self) -> dict[str, Any]:
        """What the end line says of this process."""
        self._greenlet.kill()
        late = sorted(self._late_us)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return {
            "cpu_s": round(time.process_time() - self._cpu_s, 6),
            "cpu_share_max": round(max(self._shares), 4) if self._shares else None,
            "loop_late_us_p99": late[max(0, -(-99 * len(late) // 100) - 1)] if late else None,
            "loop_late_us_max": late[-1] if late else None,
            "rss_max_kib": rss // 1024 if sys.platform == "darwin" else rss,
        }
