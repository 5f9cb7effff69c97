"""Whether a policy is still at one decision: a thread that looks where the thread that routes is, and says so.

A policy that never returns stops everything behind it, and nothing in the thread that waits for it could tell. Law: the
watch only looks, so that no decision and no row depends on it; a call is the same call as long as its frame is the same
object, so that many short decisions are never taken for a long one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from routers.router import Router

PATIENCE_S = 10.0
"""Of one decision; it is said again when twice as much has passed."""
LOOK_S = 1.0
_CALLER = Router.route.__code__.co_filename
_CORE = os.path.dirname(_CALLER)


class PolicyWatch:
    """While entered, calls `say` from a thread of its own when a policy has not returned to this thread for long."""

    def __init__(self, say: Callable[[str], None], *, patience_s: float = PATIENCE_S, look_s: float = LOOK_S) -> None:
        self.stuck = ""
        """What was said of the call that goes on now; empty where none is long."""
        self._say = say
        self._patience_s = patience_s
        self._look_s = look_s
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="policy-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        call: FrameType | None = None
        since_s = next_s = 0.0
        while not self._over.wait(self._look_s):
            innermost = sys._current_frames().get(self._watched)
            now_s, found = time.monotonic(), policy_call(innermost)
            if found is None or found is not call:
                call, self.stuck = found, ""
                since_s, next_s = now_s, self._patience_s
            elif now_s - since_s >= next_s:
                next_s = 2 * (now_s - since_s)
                self.stuck = f"its policy has been deciding for {now_s - since_s:.0f} s ({place_of(found, innermost)})"
                self._say(self.stuck)
            del innermost


def policy_call(innermost: FrameType | None) -> FrameType | None:
    """The frame by which the router entered a policy's code; None while it is elsewhere."""
    found = None
    frame = innermost
    while frame is not None and frame.f_back is not None:
        called = os.path.dirname(frame.f_code.co_filename)
        if frame.f_back.f_code.co_filename == _CALLER and called != _CORE:  # ours stand in a folder of their own
            found = frame
        frame = frame.f_back
    return found


def place_of(call: FrameType, innermost: FrameType | None) -> str:
    """Where the policy's own file is at now, however deep in a library that is."""
    frame = innermost
    while frame is not None and frame.f_code.co_filename != call.f_code.co_filename:
        frame = frame.f_back
    at = frame or call
    return f"{os.path.basename(at.f_code.co_filename)}, line {at.f_lineno}"
