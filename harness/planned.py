"""Which sessions a load starts, at which instants, and which process of several sends them.

Pure. Every process draws the whole plan and keeps its share, so nothing is sent twice or forgotten. Sessions
that wait for each other stay together: a session goes where the first thing that it waits for is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.arrivals import arrivals_us
from harness.drive import Drive
from harness.errors import UsageError
from workloads import Session, Streams, WorkloadTable

ARRIVALS = "harness.arrivals"


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
    for number, session in enumerate(workload.sessions(streams)):
        if drive.open_loop:
            _check(workload, drive, session)
        arrival = None
        if clock and session.waits_for_a_slot:
            arrival = next(arrivals, None)
            if arrival is None:
                return
        yield Planned(number, session, arrival)


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
    needed = sum(1 for _ in arrivals_us(drive, streams[ARRIVALS]))
    if started < needed:
        raise UsageError(
            f"the stages start {needed} sessions and the workload has {started}: give it more sessions, or make the "
            "stages shorter or slower"
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
