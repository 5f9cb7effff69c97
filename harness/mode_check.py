"""What a mode cannot carry, found before anything starts: processes outside virtual time, all-knowing routers live."""

from __future__ import annotations

import random

from harness.errors import UsageError
from harness.peers import find_peer, require_installed
from harness.scenario import Scenario
from routers import RoutersError, Signal, refuse_oracle

TOLD_TO_ROUTERS = {"add", "drain", "remove"}
"""What happens to a replica through its routers; a crash and a restart they find out."""

LIVE_SLOTS_MAX = 25_000
"""About as many connections as one address has ports for, and a gigabyte of sessions in the load process."""


def refusals(scenario: Scenario) -> dict[str, str]:
    """Why a mode cannot run it, for each that cannot."""
    found = {}
    for mode, require in (("sim", require_simulable), ("live", require_live)):
        try:
            require(scenario)
        except UsageError as error:
            found[mode] = str(error)
    return found


def require_simulable(scenario: Scenario) -> None:
    """Raises UsageError for a scenario that names processes outside ours."""
    if scenario.fleet.urls:
        raise UsageError(
            "fleet.urls names engines that run outside, which virtual time cannot contain: "
            "remove urls, or use --mode live"
        )
    scenario.faults.require_simulable()
    for entry in scenario.routers:
        if entry.foreign:
            raise UsageError(
                f"router {entry.name!r} is a process of its own, which virtual time cannot contain: "
                "leave it out, or use --mode live"
            )


def require_live(scenario: Scenario) -> None:
    """Raises UsageError for a policy that cannot know live what it needs, or a fault that nobody would commit."""
    if scenario.faults and scenario.fleet.urls:
        raise UsageError("faults happen to replicas and routers that routebench starts: remove fleet.urls or [faults]")
    if (scenario.load.concurrency or 0) > LIVE_SLOTS_MAX:
        raise UsageError(
            f"load.concurrency = {scenario.load.concurrency}: at most {LIVE_SLOTS_MAX:,} connections fit between two "
            "live processes: lower it, or use --mode sim"
        )
    if (
        any(scenario.router_faults(entry).template_mismatch for entry in scenario.routers)
        and scenario.load.api != "chat"
    ):
        raise UsageError(
            f"faults.router_template_mismatch is about a chat's template, and load.api = {scenario.load.api!r} sends "
            "no chat: use --set load.api=chat, or --mode sim"
        )
    _require_live_churn(scenario)
    for entry in scenario.routers:
        if entry.peer:
            require_installed(find_peer(entry.peer.partition(":")[0]))
        if entry.foreign:
            continue
        policy = entry.build(random.Random(0), scenario.engine.block_size)
        try:
            refuse_oracle(policy, entry.name)
        except RoutersError as error:
            raise UsageError(str(error)) from error
        if Signal.TEXT in policy.needs and scenario.load.api == "completions-ids":
            raise UsageError(
                f"router {entry.name!r} reads the text of prompts and load.api = 'completions-ids' sends none: "
                "use --set load.api=completions-text (or chat), or --mode sim"
            )


def _require_live_churn(scenario: Scenario) -> None:
    """Raises UsageError for replicas that come and go where processes cannot, or nobody can tell the router."""
    if not scenario.churn:
        return
    if scenario.fleet.urls:
        raise UsageError("churn happens to replicas that routebench starts: remove fleet.urls or [[churn]]")
    if getattr(scenario.make_workload(), "weight_sync_every_steps", 0):
        raise UsageError(
            "new weights go to the replicas of the start, so live weight_sync_every_steps and [[churn]] exclude each "
            "other: remove one, or use --mode sim"
        )
    told = sorted({event.do for event in scenario.churn} & TOLD_TO_ROUTERS)
    for entry in scenario.routers:
        if entry.url:
            raise UsageError(
                f"router {entry.name!r} runs already, in front of replicas of its own: leave it out, or drop [[churn]]"
            )
        if entry.foreign and told:
            raise UsageError(
                f"router {entry.name!r} is not ours and is told of no change of its fleet, so nobody would {told[0]} a "
                "replica for it: leave it out, or keep to crash and restart"
            )
