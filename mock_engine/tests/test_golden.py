"""Golden traces: what vLLM 0.33.0's own scheduler did, step by step, against ours.

`ROUTEBENCH_GOLDEN` names another folder of recordings of the same form. Each trace is compared completely, three times:
by the scheduler alone, by an engine that steps, and by an engine that jumps over identical decode steps. A folder
without a trace fails, and so does a trace with a config key that we do not understand.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mock_engine import (
    AllBlocksCleared,
    BlockHasher,
    BlockStored,
    Engine,
    EngineConfig,
    KvEvent,
    Request,
    Run,
    Step,
    StepCost,
    TokenSequence,
)
from mock_engine.scheduler import RequestState, Scheduler

FOLDER = Path(os.environ.get("ROUTEBENCH_GOLDEN") or Path(__file__).parent / "golden")
TRACES = sorted(FOLDER.glob("*.json"))

STEP_US = 1000  # of the engine's clock; a trace knows step numbers only

REQUEST_KEYS = {"id", "arrival_step", "prompt_token_ids", "output_token_ids", "cache_salt", "priority"}


def engine_config(options: dict[str, Any]) -> EngineConfig:
    options = dict(options)
    options["prefix_caching_hash_algo"] = options.pop("hash_algo")
    return EngineConfig.from_mapping(options)


class Trace:
    def __init__(self, path: Path) -> None:
        self.data = json.loads(path.read_text(encoding="utf-8"))
        self.config = engine_config(self.data["config"])
        self.steps = self.data["steps"]
        self.resets = set(self.data["reset_prefix_cache_at"])
        assert [step["step"] for step in self.steps] == list(range(len(self.steps)))
        hasher = BlockHasher(self.config.prefix_caching_hash_algo, seed=None, rng=Random(0))
        self.arrivals: dict[int, list[Request]] = {}
        for entry in self.data["requests"]:
            assert set(entry) <= REQUEST_KEYS, f"{path.name}: unknown request keys {set(entry) - REQUEST_KEYS}"
            outputs = entry["output_token_ids"]
            sequence = TokenSequence(
                entry["prompt_token_ids"],
                hasher=hasher,
                output=outputs.__getitem__,
                cache_salt=entry.get("cache_salt"),
                block_size=self.config.block_size,
            )
            request = Request(
                request_id=entry["id"],
                sequence=sequence,
                max_tokens=len(outputs),
                priority=entry.get("priority", 0),
            )
            self.arrivals.setdefault(entry["arrival_step"], []).append(request)


@pytest.fixture(params=TRACES, ids=lambda path: path.stem)
def trace(request: pytest.FixtureRequest) -> Trace:
    return Trace(request.param)


def as_recorded(event: KvEvent) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [digest.hex() for digest in event.block_hashes]
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if parent is None else parent.hex(),
            "num_token_ids": len(event.token_ids),
            "block_size": event.block_size,
            "medium": event.medium,
            "lora_name": event.lora_name,
            "extra_keys": [None if keys is None else list(keys) for keys in event.extra_keys],
        }
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}


def recorded(step: dict[str, Any], events_before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {**step, "scheduled": list(step["scheduled"].items()), "events": [*events_before, *step["events"]]}


def test_the_folder_holds_traces() -> None:
    assert TRACES, f"no *.json in {FOLDER}: point ROUTEBENCH_GOLDEN at a folder of recordings, or unset it"


def test_an_option_that_we_do_not_understand_fails() -> None:
    with pytest.raises(ValueError, match="num_lookahead_slots"):
        engine_config({"hash_algo": "sha256", "block_size": 16, "num_lookahead_slots": 2})


def test_the_scheduler_does_what_vllm_did(trace: Trace) -> None:
    scheduler = Scheduler(trace.config)
    admissions: dict[str, list[int]] = {}
    order = 0
    for number, expected in enumerate(trace.steps):
        for request in trace.arrivals.get(number, ()):
            known_max = request.sequence.prompt_tokens + request.max_tokens
            scheduler.waiting.add(RequestState(request, known_max, order))
            order += 1
        if number in trace.resets:
            scheduler.pool.reset()
        plan = scheduler.schedule()
        outcome = scheduler.commit(plan)
        for state, cached in plan.admitted:
            admissions.setdefault(state.request_id, []).append(cached)
        found = {
            "step": number,
            "scheduled": [(entry.state.request_id, entry.tokens) for entry in plan.scheduled],
            "preempted": [state.request_id for state in plan.preempted],
            "finished": [state.request_id for state, _ in outcome.finished],
            "events": [as_recorded(event) for event in scheduler.pool.take_events()],
            "running": [state.request_id for state in scheduler.running],
            "waiting": len(scheduler.waiting),
            "free_blocks": scheduler.pool.free,
        }
        assert found == recorded(expected)
    assert admissions == trace.data["num_cached_tokens_at_admission"]


@pytest.mark.parametrize("jumping", [False, True], ids=["stepping", "jumping"])
def test_the_engine_does_what_vllm_did(trace: Trace, jumping: bool) -> None:
    """An engine that has nothing to do takes no step, so idle steps are not compared and a clear waits for the next."""
    engine = Engine(trace.config, cost=StepCost(step_fixed_us=STEP_US), rng=Random(0))
    admissions: dict[str, list[int]] = {}
    done: dict[int, dict[str, Any]] = {}
    for number in range(len(trace.steps)):
        for request in trace.arrivals.get(number, ()):
            engine.submit(request, number * STEP_US)
        if number in trace.resets:
            engine.reset_prefix_cache()
        if not jumping:
            step = engine.step(number * STEP_US)
            pieces: list[Step | Run] = [] if step is None else [step]
        elif number + 1 in trace.arrivals or number + 1 in trace.resets or number + 1 == len(trace.steps):
            pieces = engine.run_until((number + 1) * STEP_US)
        else:
            continue
        for piece in pieces:
            for entry in expand(piece):
                done[entry["step"]] = entry
            if isinstance(piece, Step):
                for admission in piece.admitted:
                    admissions.setdefault(admission.request_id, []).append(admission.cached_tokens)
    pending: list[dict[str, Any]] = []
    for number, expected in enumerate(trace.steps):
        if number not in done:
            assert not expected["scheduled"]
            assert not expected["preempted"]
            pending += expected["events"]
            continue
        entry = done[number]
        wanted = recorded(expected, pending)
        pending = []
        if "free_blocks" not in entry:  # inside a jump
            del wanted["free_blocks"]
        assert entry == wanted
    assert admissions == trace.data["num_cached_tokens_at_admission"]
    assert all(event["type"] == "AllBlocksCleared" for event in pending)


def expand(piece: Step | Run) -> list[dict[str, Any]]:
    """A step, or every step of a run, as a trace records it."""
    if isinstance(piece, Step):
        return [
            {
                "step": piece.starts_us // STEP_US,
                "scheduled": list(piece.scheduled),
                "preempted": list(piece.preempted),
                "finished": [finish.request_id for finish in piece.finished],
                "events": [as_recorded(event) for event in piece.kv_events],
                "running": list(piece.running),
                "waiting": piece.waiting,
                "free_blocks": piece.free_blocks,
            }
        ]
    events = {j: [as_recorded(event) for event in found] for j, _, found in piece.kv_events}
    steps = [
        {
            "step": piece.token_us(j) // STEP_US - 1,
            "scheduled": [(name, 1) for name in piece.outputs],
            "preempted": [],
            "finished": [],
            "events": events.get(j, []),
            "running": list(piece.outputs),
            "waiting": piece.waiting,
        }
        for j in range(piece.steps)
    ]
    steps[-1]["free_blocks"] = piece.free_blocks
    return steps
