"""Joins what the processes of a live arm wrote: the load generator's rows with the router's and the engines' logs.

The request id is the key. Where a foreign router drops `X-Request-Id`, the id in the engine's answer, which the
load generator saw, identifies the engine's line instead. Instants are rebased so that zero is the start of the
load, a whole sampling bin, and what nobody measured stays null.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.arm import Arm, ArmRows, row_order
from harness.ceiling import ceiling_of
from harness.churn import absences
from harness.json_lines import read_json_lines
from harness.router_samples import watched
from harness.spread import ingress_name

BIN_US = 500_000
"""Spacing of fleet samples; rebasing by whole bins keeps them on the grid."""
_FROM_LOAD = (
    "request_id",
    "session",
    "turn",
    "group",
    "rollout_step",
    "ready_us",
    "scheduled_us",
    "sent_us",
    "first_token_us",
    "second_token_us",
    "first_content_us",
    "last_token_us",
    "end_us",
    "phase",
    "prompt_tokens",
    "output_tokens",
    "first_chunk_tokens",
    "cached_tokens",
    "token_source",
    "chunk_gaps_us",
    "status",
    "error_class",
    "error",
)
_FROM_FLEET = (
    "t_us",
    "replica",
    "running",
    "waiting",
    "used_blocks",
    "active_decode_blocks",
    "hit_tokens",
    "query_tokens",
    "evicted_blocks",
    "preemptions",
    "step_us_mean",
    "late_us_p99",
)
_REQUEST_INSTANTS = (
    "ready_us",
    "scheduled_us",
    "sent_us",
    "routed_us",
    "admitted_us",
    "first_token_us",
    "second_token_us",
    "first_content_us",
    "last_token_us",
    "end_us",
)


def load_start_us(events: Iterable[dict[str, Any]]) -> int | None:
    """The instant that rows call 0: the sampling bin in which the load began; None if no process of it says so."""
    began = [event["starts_us"] for event in events if event.get("event") == "start" and "starts_us" in event]
    return min(began) // BIN_US * BIN_US if began else None


def merge_rows(arm: Arm, folder: Path, facts: dict[str, Any]) -> ArmRows:
    """The rows of one arm from the files in its folder; `facts` gains what the load generator said of itself."""
    load = read_json_lines(p for p in folder.glob("locust-*.jsonl") if not p.name.endswith(".events.jsonl"))
    engine = read_json_lines(folder.glob("engine-*.requests.jsonl"))
    router = {line["request_id"]: line for line in read_json_lines(folder.glob("router*.jsonl"))}
    fleet = read_json_lines(folder.glob("engine-*.fleet.jsonl"))
    facts["load_events"] = read_json_lines(folder.glob("locust-*.events.jsonl"))
    by_request = {line["request_id"]: line for line in engine}
    by_answer = {line["response_id"]: line for line in engine if line.get("response_id")}

    rows: list[dict[str, Any]] = []
    for line in load:
        routed = router.get(line["request_id"], {})
        served = by_request.get(line["request_id"]) or by_answer.get(line.get("response_id") or "", {})
        rows.append(
            {
                "router": arm.router.name,
                "repeat": arm.repeat,
                "ingress": line.get("ingress") or ingress_name(0),
                **{key: line.get(key) for key in _FROM_LOAD},
                "replica": served.get("replica") or routed.get("replica"),
                "reason": routed.get("reason"),
                "routed_us": routed.get("routed_us"),
                "believed_hit_tokens": routed.get("believed_hit_tokens"),
                "admitted_us": served.get("admitted_us"),
            }
        )
    start = load_start_us(facts["load_events"])
    if start is None:
        start = min((row["sent_us"] for row in rows if row["sent_us"] is not None), default=0) // BIN_US * BIN_US
    for row in rows:
        for key in _REQUEST_INSTANTS:
            if row.get(key) is not None:
                row[key] -= start
    rows.sort(key=row_order)
    gone = absences(facts.get("churn", ()), arm.scenario.fleet.names)
    samples: list[dict[str, Any]] = [
        {
            "router": arm.router.name,
            "repeat": arm.repeat,
            **{key: line.get(key) for key in _FROM_FLEET},
            "t_us": line["t_us"] - start,
        }
        for line in fleet
        if line["t_us"] >= start and not any(a <= line["t_us"] < b for a, b in gone.get(line["replica"], ()))
    ]
    samples.sort(key=lambda sample: (sample["t_us"], sample["replica"]))
    routers = [
        {"router": arm.router.name, "repeat": arm.repeat, **line, "t_us": line["t_us"] - start}
        for line in watched(folder)
        if line["t_us"] >= start
    ]
    facts["churn"] = [_rebased(line, start) for line in facts.get("churn", ())]
    syncs = [event for event in facts["load_events"] if event.get("event") == "weight_sync"]
    facts["weight_syncs"] = {result: sum(e[result] for e in syncs) for result in ("done", "refused", "failed")}
    starts, ends = ([e for e in facts["load_events"] if e.get("event") == which] for which in ("start", "end"))
    whole = len(starts) == len(ends) > 0
    facts["held_us"] = sum(end["held_us"] for end in ends) if whole else None
    facts["answers_wrong"] = sum(1 for line in load if line.get("answer_ok") is False)
    facts["answers_checked"] = sum(1 for line in load if line.get("answer_ok") is not None)
    return ArmRows(rows, samples, routers, *ceiling_of(arm, rows), facts)


def _rebased(line: dict[str, Any], start_us: int) -> dict[str, Any]:
    """A line of what happened to replicas, on the rows' axis."""
    done_us = line["done_us"]
    said = {"error": line["error"]} if "error" in line else {}
    done_at_s = None if done_us is None else round((done_us - start_us) / 1e6, 3)
    return {"at_s": line["at_s"], "do": line["do"], "replica": line["replica"], "done_at_s": done_at_s, **said}
