"""Where sessions live, for policies that keep them in place: Dynamo's session affinity, and vllm-router's.

A session's home is where it was dispatched last, which is where it was first unless that replica left. Memory is
bounded: sessions are kept in the order of their last use, and each dispatch drops those that are past their time or
beyond the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from routers.view import Dispatched, TurnView


class SessionHomes:
    """`headers`: those that name a session before `TurnView.session_id` does, the first one first. `rebinds` false: a
    turn that went elsewhere, as a retry does, moves no session that has a home."""

    def __init__(
        self, ttl_s: float, headers: Sequence[str] = (), *, capacity: int | None = None, rebinds: bool = True
    ) -> None:
        self._ttl_us = round(1e6 * ttl_s)
        self._headers = tuple(headers)
        self._capacity = capacity
        self._rebinds = rebinds
        self._homes: OrderedDict[str, tuple[str, int]] = OrderedDict()  # session -> replica, last use; oldest first
        self._sessions: dict[str, str] = {}  # request in flight -> session

    def of(self, turn: TurnView, now_us: int) -> str | None:
        """Its home, until it was idle for longer than its time."""
        replica, used_us = self._homes.get(self._session(turn) or "", (None, 0))
        return replica if now_us - used_us <= self._ttl_us else None

    def dispatched(self, event: Dispatched) -> None:
        session = self._session(event.turn)
        if session is None:
            return
        home = self.of(event.turn, event.at_us)
        self._homes[session] = (event.replica if self._rebinds or home is None else home, event.at_us)
        self._homes.move_to_end(session)
        if event.counted:  # else nobody will tell of its end
            self._sessions[event.request_id] = session
        while self._homes and event.at_us - next(iter(self._homes.values()))[1] > self._ttl_us:
            self._homes.popitem(last=False)
        if self._capacity is not None and len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def ended(self, request_id: str, *, failed: bool) -> None:
        """`failed`: the session has no home any more."""
        session = self._sessions.pop(request_id, None)
        if failed and session is not None:
            self._homes.pop(session, None)

    def forget(self, replica: str) -> None:
        for session in [session for session, (home, _) in self._homes.items() if home == replica]:
            del self._homes[session]

    def _session(self, turn: TurnView) -> str | None:
        given = turn.headers or {}
        return next((given[name] for name in self._headers if given.get(name)), None) or turn.session_id
