"""Do router and engines speak of the same blocks? One prompt, sent until some replica has had it before, tells.

A router that hashes prompts otherwise than the engines (another block size, template, salt) finds nothing and says
nothing. Before a live run each router that holds beliefs is started beside two fresh replicas, or beside the engines
that already run, and what it believed of a prompt is held against what the replica then served. These processes end
before the first arm starts cold, so no arm meets a warm cache or a policy that has seen a turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from harness.arm import ROUTER_SEED_STREAM, Arm
from harness.event_sources import ReplicaAddress
from harness.faults import FaultTable
from harness.fleet import clear_caches, start_replicas, start_router
from harness.json_lines import read_json_lines
from harness.load_plan import PATHS
from harness.processes import Children, get_json
from harness.router_entry import RouterEntry
from harness.scenario import Fleet, Scenario
from routers import RoutersError, Signal, refuse_oracle
from workloads import Streams, span_text, token_ids

REPLICAS = 2
"""The fewest between which a choice can be made."""
PROBE_TOKENS = 512
"""At least so many in full blocks, since engines and routers think little of short prefixes; and half a block more,
since a whole prompt is never served from a cache."""
HEARD_S = 3.0
"""How long a router may take to hear of new blocks; some ask for them once a second."""
HEARD_FOREIGN_S = 1.0
"""Given to a router that cannot be asked what it heard."""
POLL_S = 0.05
ANSWER_S = 30.0
STREAM = "harness.parity"
SALT = "routebench-parity"
SESSIONS_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """One request and what became of it; None is unknown."""

    replica: str | None
    cached_tokens: int | None
    believed_tokens: int | None


@dataclass(frozen=True, slots=True)
class Parity:
    """What was found of one router. `agrees` is None where it does not say what it believes."""

    router: str
    agrees: bool | None
    probes: tuple[Probe, ...]
    said: str

    def to_json(self) -> dict[str, Any]:
        """As `run.json` carries it."""
        return {
            "router": self.router,
            "agrees": self.agrees,
            "choices": [probe.replica for probe in self.probes],
            "cached_tokens": [probe.cached_tokens for probe in self.probes],
            "believed_hit_tokens": [probe.believed_tokens for probe in self.probes],
            "said": self.said,
        }


def check_parity(scenario: Scenario, folder: Path, on_phase: Callable[[str], None] = lambda _: None) -> list[Parity]:
    """Probes every router of the scenario that holds beliefs of caches, in processes of their own under `folder`.

    A router that already runs is left alone: its state is not ours to change. Raises StartError.
    """
    entries = [entry for entry in scenario.routers if holds_beliefs(entry, scenario)]
    if not entries:
        return []
    on_phase("checking parity")
    fleet = scenario.fleet if scenario.fleet.urls else Fleet(replicas=REPLICAS)
    small = msgspec.structs.replace(scenario, fleet=fleet, faults=FaultTable(router=scenario.faults.router))
    folder = folder.resolve()
    epoch_ns = time.monotonic_ns()
    found = []
    with Children(folder) as children:
        seed_for = Arm(small, entries[0], 0).seed_for
        replicas = start_replicas(children, small, epoch_ns=epoch_ns, seed_for=seed_for, log_dir=folder)
        for number, entry in enumerate(entries):
            place = folder / Arm(scenario, entry, 0).label
            found.append(_Check(small, entry, replicas, folder, place, epoch_ns, number).run())
        clear_caches(replicas)
    return found


def holds_beliefs(entry: RouterEntry, scenario: Scenario) -> bool:
    """Whether it decides by what it takes to be in caches, as told by engines; of foreign ones nobody knows."""
    if entry.foreign:
        return not entry.url
    policy = entry.build(random.Random(0), scenario.engine.block_size)
    try:
        refuse_oracle(policy, entry.name)
    except RoutersError:
        return False
    return bool({Signal.KV_EVENTS, Signal.REPORTED_PREFIXES} & policy.needs)


class _Check:
    """One router and the probes that go through it."""

    def __init__(
        self,
        scenario: Scenario,
        entry: RouterEntry,
        replicas: list[ReplicaAddress],
        engines: Path,
        folder: Path,
        epoch_ns: int,
        number: int,
    ) -> None:
        self._scenario, self._entry, self._replicas = scenario, entry, replicas
        self._engines, self._folder, self._epoch_ns = engines, folder, epoch_ns
        self._name = f"parity-{number}"
        self._span = Streams(scenario.seed)[f"{STREAM}.{number}"].getrandbits(60)
        self._salts = _uses_salts(scenario)
        self._state: dict[str, Any] = {}

    def run(self) -> Parity:
        sent: list[dict[str, Any]] = []
        salted: dict[str, Any] | None = None
        with Children(self._folder) as children:
            url = start_router(
                children,
                self._entry,
                self._scenario,
                self._replicas,
                epoch_ns=self._epoch_ns,
                seed=Arm(self._scenario, self._entry, 0).seed_for(ROUTER_SEED_STREAM),
                log_file=self._folder / "router.jsonl",
            )
            try:
                before = self._heard(url)
                for turn in range(len(self._replicas) + 1):
                    sent.append(self._send(url, turn))
                    before = self._wait_heard(url, before)
                    if sent[-1]["cached_tokens"]:
                        break
                if not self._entry.foreign:
                    if self._salts:
                        salted = self._send(url, len(sent), salt=SALT)
                    self._state = self._heard_state(url)
            except (OSError, ValueError) as error:
                why = _why(error)
                return Parity(self._entry.name, None, (), f"{self._entry.name}: the parity probe failed: {why}")
        probes = self._probes([*sent, *([salted] if salted else [])])
        agrees, said = self._judge(probes[: len(sent)], probes[-1] if salted else None)
        return Parity(self._entry.name, agrees, tuple(probes[: len(sent)]), f"{self._entry.name}: {said}")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, url: str, turn: int, salt: str | None = None) -> dict[str, Any]:
        """What the answer said of itself. Raises OSError, ValueError."""
        load = self._scenario.load
        request_id = f"{self._name}-{turn}"
        body = {"model": load.model, "max_tokens": 1, "ignore_eos": True, "seed": turn, **self._prompt()}
        if salt is not None:
            body["cache_salt"] = salt
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            load.session_header: request_id,  # a session of its own each time, so that stickiness decides nothing
        }
        request = Request(f"{url}{PATHS[load.api]}", msgspec.json.encode(body), headers, method="POST")
        with urlopen(request, timeout=ANSWER_S) as answer:
            said = msgspec.json.decode(answer.read())
        if not isinstance(said, dict):
            raise ValueError("the answer is no completion")
        usage = said.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return {
            "request_id": request_id,
            "response_id": said.get("id"),
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
        }

    def _prompt(self) -> dict[str, Any]:
        block = self._scenario.engine.block_size
        span, tokens = self._span, -(-PROBE_TOKENS // block) * block + block // 2
        if self._scenario.load.api == "completions-ids":
            return {"prompt": token_ids(span, 0, tokens).tolist()}
        if self._scenario.load.api == "completions-text":
            return {"prompt": span_text(span, 0, tokens)}
        messages = [{"role": "system", "content": span_text(span, 0, block)}]
        return {"messages": [*messages, {"role": "user", "content": span_text(span, block, tokens - block)}]}

    # -- what the router heard -----------------------------------------------------------------------------------------

    def _heard_state(self, url: str) -> dict[str, Any]:
        state = get_json(f"{url}/router/state")
        return state if isinstance(state, dict) else {}

    def _heard(self, url: str) -> int:
        """Batches of events, or reports, that reached a router of ours."""
        if self._entry.foreign:
            return 0
        state = self._heard_state(url)
        polls = (state.get("prefix_poll") or {}).get("polls", 0)
        return int(polls // max(1, len(self._replicas)) + sum(_events(state, "batches").values()))

    def _wait_heard(self, url: str, before: int) -> int:
        if self._entry.foreign:
            time.sleep(HEARD_FOREIGN_S)
            return 0
        deadline = time.monotonic() + HEARD_S
        asks = self._heard_state(url).get("prefix_poll") is not None
        while time.monotonic() < deadline:
            now = self._heard(url)
            if now >= before + (2 if asks else 1):  # a poll that was under way may have been too early
                return now
            time.sleep(POLL_S)
        return before

    # -- what it means -------------------------------------------------------------------------------------------------

    def _probes(self, sent: list[dict[str, Any]]) -> list[Probe]:
        routed = {line["request_id"]: line for line in read_json_lines(self._folder.glob("router*.jsonl"))}
        lines = read_json_lines(self._engines.glob("engine-*.requests.jsonl"))
        served = {
            line[key]: line["replica"] for line in lines for key in ("request_id", "response_id") if line.get(key)
        }
        found = []
        for one in sent:
            line = routed.get(one["request_id"], {})
            replica = served.get(one["request_id"]) or served.get(one["response_id"]) or line.get("replica")
            found.append(Probe(replica, one["cached_tokens"], line.get("believed_hit_tokens")))
        return found

    def _judge(self, probes: list[Probe], salted: Probe | None) -> tuple[bool | None, str]:
        last = probes[-1]
        path = f"one prompt went to {', '.join(probe.replica or '?' for probe in probes)}"
        if last.cached_tokens is None:
            return None, f"{path}; the engine does not say what it served from its cache"
        served = f"{path}, which served {last.cached_tokens} tokens of it from its cache at last"
        if last.believed_tokens is None:
            return None, f"{served}; what the router believed it does not say"
        if not last.cached_tokens and not last.believed_tokens:
            return None, f"{served}: there is nothing to agree on"
        if last.believed_tokens != last.cached_tokens:
            cause = mismatch(self._state, self._scenario, last)
            return False, f"{served}, and the router believed {last.believed_tokens}: {cause}"
        if salted is not None and salted.believed_tokens and not salted.cached_tokens:
            return False, (
                f"salt: the router believed {salted.believed_tokens} tokens cached of a prompt under another "
                "cache_salt and the engine served none: it does not hash extra keys, so tenants look alike to it"
            )
        return True, f"{served}, as the router believed"


def mismatch(state: Mapping[str, Any], scenario: Scenario, last: Probe) -> str:
    """The likeliest cause, named, with what to change."""
    block = scenario.engine.block_size
    skipped = sum((one.get("skipped") or {}).get("block_size", 0) for one in _streams(state))
    tokens, poll = state.get("tokens") or {}, state.get("prefix_poll") or {}
    if skipped:
        return (
            f"block size: {skipped} events were hashed in blocks of another size than the router's {block}: set "
            "engine.block_size to the engines' own"
        )
    if sum(_events(state, "undecodable").values()):
        return "event format: the router cannot read the engines' events: look at events in its /router/state"
    if not _streams(state) and Signal.KV_EVENTS in state.get("needs", ()):
        return (
            "events: the router knows no address of them (the engines tell none on GET /kv_event_sources), so it never "
            "hears any"
        )
    if _streams(state) and not sum(_events(state, "batches").values()):
        return "events: none reached the router: check the engines' kv-events-config and the events= address"
    if poll.get("failed") or poll.get("absent"):
        return f"reports: {poll.get('last_error') or 'the engines report no prefixes (/prefix_cache_state)'}"
    if tokens.get("failed"):
        return "tokens: the replicas do not answer /tokenize, so the router cannot hash a prompt"
    if last.believed_tokens == 0 and scenario.load.api != "completions-ids":
        return (
            "template: events come in blocks of the right size and none matches, so the router tokenises prompts "
            "otherwise than the engines (chat template, special tokens, tokenizer)"
        )
    if last.believed_tokens == 0:
        return (
            "seed, salt or adapter: events come in blocks of the right size for these very tokens and none matches, so "
            "their hashes take in something that the router's do not"
        )
    assert last.cached_tokens is not None
    if (last.believed_tokens or 0) < last.cached_tokens:
        return "the router knows the beginning only: it reads prompts, or hears events, in part"
    return "the router counts blocks that the engine does not have: removals do not reach it"


def _uses_salts(scenario: Scenario) -> bool:
    """Whether the workload keeps anybody's blocks apart; one beginning of it tells."""
    sessions = scenario.make_workload().sessions(Streams(scenario.seed))
    return any(session.cache_salt is not None for session in islice(sessions, SESSIONS_LOOKED_AT))


def _streams(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((state.get("events") or {}).values())


def _events(state: Mapping[str, Any], key: str) -> dict[str, int]:
    return {name: int(one.get(key) or 0) for name, one in (state.get("events") or {}).items()}


def _why(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    return str(getattr(error, "reason", None) or error)
