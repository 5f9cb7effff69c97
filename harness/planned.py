"""Which sessions a load starts, at which instants, and which process of several sends them.

Pure. Every process draws the whole plan and keeps its share, so nothing is sent twice or forgotten. Sessions
that wait for each other stay together: a session goes where the first thing that it waits for is. Law: planning ends,
whatever a scenario says; what is too much for one arm is refused where it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from harness.arrivals import arrivals_us
from harness.drive import Drive
from harness.errors import UsageError
from workloads import SESSIONS_MAX, Session, Streams, Turn, WorkloadTable, prompt_tokens

ARRIVALS = "harness.arrivals"
REQUESTS_MAX = 1_000_000
"""Of one arm, which keeps a row of each until it ends."""
SPANS_MAX = 20_000_000
"""Pieces of text of one arm: half a minute's drawing."""
FLEET_ROWS_MAX = 1_000_000
"""A replica leaves one each half second of model time, whether anything happens or not."""
FLEET_ROWS_PER_S = 2


class Planned(NamedTuple):
    """One session of the load."""

    number: int
    """Its place in the workload, over all processes."""
    session: Session
    arrival_us: int | None
    """When an open loop starts it, counted from the start of the load; None: the session itself says, or a slot."""


def planned(workload: WorkloadTable, drive: Drive, streams: Streams) -> Iterator[Planned]:
    """The sessions that will start, in the workload's order. Raises UsageError for one that cannot be started."""
    clock = drive.open_loop and drive.arrival != "trace"
    arrivals = arrivals_us(drive, streams[ARRIVALS]) if clock else iter(())
    for number, session in enumerate(_bounded(workload, streams)):
        if drive.open_loop:
            _check(workload, drive, session)
        arrival = None
        if clock and session.waits_for_a_slot:
            arrival = next(arrivals, None)
            if arrival is None:
                return
        yield Planned(number, session, arrival)


def _bounded(workload: WorkloadTable, streams: Streams) -> Iterator[Session]:
    requests = spans = 0
    for session in workload.sessions(streams):
        requests += len(session.turns)
        spans += sum(len(turn.input) for turn in session.turns)
        if requests > REQUESTS_MAX or spans > SPANS_MAX:
            most, what = (REQUESTS_MAX, "requests") if requests > REQUESTS_MAX else (SPANS_MAX, "pieces of text")
            fewer = "give sample or max_sessions" if workload.kind == "trace" else "ask for fewer sessions or turns"
            raise UsageError(
                f"the workload {workload.kind!r} has more than {most:,} {what}, the most that one arm can hold: {fewer}"
            )
        yield session


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a plan is, as far as one can know before any answer."""

    sessions: int
    waiting_for_slots: int
    """Those that no instant of their own starts."""
    timed: int
    """Those that start at one."""
    longest_tokens: int
    """Of a prompt with its answer."""
    shortest_us: int
    """Model time that instants and pauses take by themselves, if all answers took none."""


def extent_of(plan: Iterable[Planned], slots: int | None) -> Extent:
    """Reads a plan to its end. `slots`: of a driver that holds one through a session's pauses."""
    sessions = waiting = timed = longest = last_us = held_us = 0
    for _, session, arrival_us in plan:
        sessions += 1
        at_us = session.start_us or arrival_us or 0
        pauses_us = sum(turn.think_us for turn in session.turns)
        timed += session.start_us is not None
        last_us = max(last_us, at_us + pauses_us, *(turn.start_us or 0 for turn in session.turns))
        if session.waits_for_a_slot:
            waiting += 1
            held_us += pauses_us
        longest = max(longest, _longest(session.turns))
    return Extent(sessions, waiting, timed, longest, max(last_us, held_us // slots if slots else 0))


def require_slots_in_use(extent: Extent) -> None:
    """Slots that no session would ever wait for are refused: the load would be another than it says. Raises
    UsageError."""
    if extent.timed and not extent.waiting_for_slots:
        raise UsageError(
            "every session has an instant of its own at which it starts, so none would wait for a slot: leave driver, "
            "concurrency and ramp_s out of [load] (or write driver = 'rate' and arrival = 'trace', whose concurrency "
            "caps the requests in flight); a trace also takes arrivals = 'slots' in [workload], to be sent by slots"
        )


def _longest(turns: Iterable[Turn]) -> int:
    longest = context = 0
    for turn in turns:
        context = (0 if turn.restart else context) + prompt_tokens(turn.input) + turn.output[1]
        longest = max(longest, context + (turn.front[1] if turn.front else 0))
    return longest


def require_an_end(extent: Extent, replicas: int) -> None:
    """A plan whose pauses alone fill the memory with rows of an idle fleet is refused. Raises UsageError."""
    most_s = FLEET_ROWS_MAX // (FLEET_ROWS_PER_S * replicas)
    if extent.shortest_us > most_s * 1_000_000:
        raise UsageError(
            f"instants and pauses of the load alone take {extent.shortest_us / 1e6:,.0f} s, and a run of {replicas} "
            f"replicas can follow at most {most_s:,} s, because each leaves a row every half second: shorten the "
            "pauses, raise the rate (or a trace's speedup), or ask for fewer sessions"
        )


def share_of(plan: Iterator[Planned], rank: int, of: int) -> Iterator[Planned]:
    """The part that one of several processes sends. Raises UsageError if sessions wait across shares."""
    if of == 1:
        yield from plan
        return
    homes: dict[str, int] = {}
    roots = 0
    for entry in plan:
        session = entry.session
        if session.after:
            found = {homes.get(name) for name in session.after}
            home = found.pop()
            if found or home is None:
                raise UsageError(
                    f"session {session.session_id!r} waits for sessions that other load processes send: use one "
                    "process for this workload"
                )
        else:
            home = roots % of
            roots += 1
        for name in (session.session_id, *(turn.name for turn in session.turns)):
            if name is not None:
                homes[name] = home
        if home == rank:
            yield entry


def check_together(workload: WorkloadTable, drive: Drive, of: int = 1) -> None:
    """What neither the workload nor the driver can know alone. Raises UsageError."""
    syncs = bool(getattr(workload, "weight_sync_every_steps", 0))
    if workload.barrier and drive.open_loop:
        raise UsageError(
            f"the workload {workload.kind!r} has barrier = true, so steps start when others end, and driver = 'rate' "
            "starts sessions by the clock: write driver = 'sessions', or barrier = false"
        )
    if syncs and drive.open_loop and drive.weight_sync == "wait":
        raise UsageError(
            f"the workload {workload.kind!r} waits for new weights between steps, and driver = 'rate' starts sessions "
            "by the clock: write driver = 'sessions', or weight_sync = 'at-once'"
        )
    if of > 1 and (workload.barrier or syncs):
        key = "barrier = true" if workload.barrier else "weight_sync_every_steps"
        raise UsageError(
            f"the workload {workload.kind!r} has {key} and {of} load processes share it: only one process can see "
            "when a step has ended; use one process, or switch it off"
        )


def require_enough(drive: Drive, started: int, streams: Streams) -> None:
    """Stages need as many sessions as they start. Raises UsageError."""
    if not drive.stages:
        return
    needed = sum(1 for _ in islice(arrivals_us(drive, streams[ARRIVALS]), SESSIONS_MAX + 1))
    if started < needed:
        more = "" if needed <= SESSIONS_MAX else "more than "
        raise UsageError(
            f"the stages start {more}{min(needed, SESSIONS_MAX)} sessions and the workload has {started}: give it more "
            "sessions, or make the stages shorter or slower"
        )


def _check(workload: WorkloadTable, drive: Drive, session: Session) -> None:
    """An open loop starts a session by one clock only."""
    if drive.arrival == "trace" and session.waits_for_a_slot:
        raise UsageError(
            f"arrival = 'trace' needs sessions with an instant of their own, and {session.session_id!r} of workload "
            f"{workload.kind!r} has none: write arrival = 'poisson' with rate_per_s, or driver = 'sessions'"
        )
    if drive.arrival != "trace" and session.start_us is not None:
        raise UsageError(
            f"session {session.session_id!r} of the workload {workload.kind!r} has an instant of its own, which "
            f"arrival = {drive.arrival!r} would pass over: write arrival = 'trace', or driver = 'sessions'"
        )
