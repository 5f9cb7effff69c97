"""Closed loop beside open loop: how far two routers are apart in each, when runs of both kinds are compared.

A closed loop asks on only when an answer has come, so a slow router is asked less and looks better than it is. The open
loop is therefore the primary one, and a ratio that the two disagree about by more than half is told in the headline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.display import label, number, phrase
from reports.metrics_table import lookup
from reports.why import OUTCOMES, ROLLOUT_OUTCOMES, has_rollouts

if TYPE_CHECKING:
    from reports.run import RunResult

APART = 1.5
"""Factor between the ratios of the two loops from which the headline warns."""


def loop_of(scenario: Mapping[str, Any]) -> str:
    return "open" if (scenario.get("load") or {}).get("driver") == "rate" else "closed"


def compare_loops(runs: Sequence[RunResult], labels: Sequence[str]) -> dict[str, Any] | None:
    """Ratios of every router that both loops have to the first of them; None unless both kinds of loop are there."""
    first = {loop_of(run.scenario): (run, name) for run, name in reversed(list(zip(runs, labels, strict=True)))}
    if len(first) < 2:
        return None
    (opened, opened_name), (closed, closed_name) = first["open"], first["closed"]
    shared = [name for name in opened.routers if name in closed.routers]
    rows = list(_ratios(opened.routers, closed.routers, shared))
    return {"open": opened_name, "closed": closed_name, "reference": shared[0] if shared else None, "rows": rows}


def _ratios(opened: Mapping[str, Any], closed: Mapping[str, Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    outcomes = ROLLOUT_OUTCOMES if has_rollouts(opened) else OUTCOMES
    for address in outcomes:
        for name in names[1:]:
            ratios = []
            for routers in (opened, closed):
                value, base = lookup(routers[name], address), lookup(routers[names[0]], address)
                ratios.append(value / base if value and base else None)
            one, two = ratios
            if one is not None and two is not None:
                yield {
                    "address": address,
                    "router": name,
                    "open": one,
                    "closed": two,
                    "apart": max(one / two, two / one),
                }


def loop_sentences(found: Mapping[str, Any]) -> list[str]:
    """Which loop counts, after a warning where they disagree."""
    primary = (
        f"Both loops are here: {found['open']} is an open loop and counts, {found['closed']} is a closed one, which "
        "asks a slow router less."
    )
    if not found["rows"]:
        return [f"{primary} They have no two routers in common, so no ratio can be compared."]
    worst = max(found["rows"], key=lambda row: row["apart"])
    if worst["apart"] <= APART:
        return [f"{primary} Their ratios agree within {number(worst['apart'], 2)} times."]
    return [
        f"Beware: the loops disagree. At {phrase(worst['address'])}, {worst['router']} has {number(worst['open'], 2)} "
        f"times the value of {found['reference']} in the open loop and {number(worst['closed'], 2)} times in "
        "the closed one.",
        primary,
    ]


def loop_rows(found: Mapping[str, Any] | None) -> list[tuple[str, str, str, str, bool]]:
    """(figure, router, open, closed, whether they disagree), as texts for a table."""
    if not found:
        return []
    return [
        (
            label(row["address"]),
            f"{row['router']} / {found['reference']}",
            number(row["open"], 2),
            number(row["closed"], 2),
            row["apart"] > APART,
        )
        for row in found["rows"]
    ]
