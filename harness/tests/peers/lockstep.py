"""A real router and a policy of ours, shown the same requests and the same replicas' answers, decision by decision.

Nothing is left to timing: one pure engine core a replica makes the cache and its events, a request's first token and
end happen when the sequence says so, and after every decision ours is told to follow the real router's choice, so
that one disagreement never causes the next. A choice of the real router that our scores call a tie is counted apart.
"""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import zmq

from mock_engine import BlockHasher, Engine, EngineConfig, Request, StepCost, TokenSequence, encode_batch
from routers import (
    Dispatched,
    Finished,
    FirstToken,
    FleetView,
    KvEvents,
    ReplicaAdded,
    ReplicaView,
    TokenPrompt,
    TurnView,
)
from routers.wire import Skipped, decode_batch, to_events

BLOCK = 16


@dataclass(frozen=True)
class Op:
    """`start` carries a request; `first` and `end` are its first token and its end."""

    kind: str
    request_id: str
    prompt: tuple[int, ...] = ()
    session: str = ""


def sequence(seed: int, *, requests: int, sessions: int = 9, in_flight: int = 6, shared: int = 200) -> list[Op]:
    """Sessions that grow turn by turn behind one of three shared beginnings; several requests are open at a time."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1000, 31000) for _ in range(shared)] for _ in range(3)]
    history = {f"s{k}": list(heads[k % 3]) for k in range(sessions)}
    idle, waiting, decoding, ops = list(history), {}, {}, []
    started = 0
    while started < requests or waiting or decoding:
        choices = ["start"] * 2 if started < requests and idle and len(waiting) + len(decoding) < in_flight else []
        choices += ["first"] * bool(waiting) + ["end"] * bool(decoding)
        kind = rng.choice(choices)
        if kind == "start":
            session = idle.pop(rng.randrange(len(idle)))
            if len(history[session]) > 1500:
                history[session] = list(heads[rng.randrange(3)])
            history[session] += [rng.randrange(1000, 31000) for _ in range(rng.randrange(5, 300))]
            request_id = f"q{started}"
            started += 1
            waiting[request_id] = session
            ops.append(Op("start", request_id, tuple(history[session]), session))
        elif kind == "first":
            request_id = rng.choice(list(waiting))
            decoding[request_id] = waiting.pop(request_id)
            ops.append(Op("first", request_id))
        else:
            request_id = rng.choice(list(decoding))
            idle.append(decoding.pop(request_id))
            ops.append(Op("end", request_id))
    return ops


class ReplicaCache:
    """The KV cache of one replica, and the socket on which it says what it holds."""

    def __init__(self, name: str, num_gpu_blocks: int, context: zmq.Context) -> None:
        self.name = name
        config = EngineConfig(block_size=BLOCK, num_gpu_blocks=num_gpu_blocks, max_model_len=4096)
        self.engine = Engine(config, cost=StepCost(step_fixed_us=1000), rng=random.Random(0))
        self._hasher = BlockHasher(seed="0")
        self._socket = context.socket(zmq.PUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.sequence_number = 0
        self._now_us = 0

    def prefill(self, request_id: str, prompt: Iterable[int]) -> bytes:
        """Computes a prompt whole and lets go of it; publishes and returns the events of it as one batch."""
        tokens = TokenSequence(prompt, hasher=self._hasher, output=0, block_size=BLOCK)
        self.engine.submit(Request(request_id=request_id, sequence=tokens, max_tokens=1), self._now_us)
        events = []
        while step := self.engine.step(self._now_us):
            self._now_us = step.ends_us
            events += step.kv_events
        payload = encode_batch(time.time(), events)
        self._socket.send_multipart([b"", self.sequence_number.to_bytes(8, "big"), payload])
        self.sequence_number += 1
        return payload

    def close(self) -> None:
        self._socket.close()


@dataclass
class Agreement:
    """What a comparison found, decision by decision."""

    title: str
    same: int = 0
    tied: int = 0
    different: list[str] = field(default_factory=list)
    scores: int = 0
    wrong_scores: list[str] = field(default_factory=list)

    @property
    def decisions(self) -> int:
        return self.same + self.tied + len(self.different)

    def line(self) -> str:
        percent = 100 * self.same / max(1, self.decisions)
        text = f"{self.title}: {self.same} of {self.decisions} placements alike ({percent:.1f} %)"
        if self.tied:
            text += f", {self.tied} ties that the real one drew otherwise"
        if self.different:
            text += f", {len(self.different)} different"
        if self.scores:
            text += f"; {self.scores - len(self.wrong_scores)} of {self.scores} scores equal"
        return text


class Ours:
    """A policy of ours driven by hand, so that it can be told to follow."""

    def __init__(self, policy, replicas, *, path="/v1/completions") -> None:
        self.policy = policy
        self.views = {name: ReplicaView(name=name, url=url) for name, url in replicas.items()}
        self.path = path
        self._placed: dict[str, str] = {}
        self._now_us = 0
        for name in replicas:
            policy.observe(ReplicaAdded(name, 0))

    def choose(self, request_id, prompt, session_id=None, headers=None):
        self._now_us += 1000
        turn = TurnView(
            request_id=request_id, session_id=session_id, prompt=prompt, headers=headers or {}, path=self.path
        )
        return turn, self.policy.choose(turn, FleetView(list(self.views.values()), now_us=self._now_us))

    def follow(self, turn, decision, replica: str) -> None:
        self._placed[turn.request_id] = replica
        self._load(replica, 1)
        placed = msgspec.structs.replace(decision, replica=replica)
        self.policy.observe(Dispatched(turn.request_id, replica, turn, placed, self._now_us))

    def first(self, request_id: str, payload: bytes | None = None) -> None:
        replica = self._placed[request_id]
        self.policy.observe(FirstToken(request_id, replica, self._now_us))
        if payload is not None:
            events = to_events(decode_batch(payload), BLOCK, Skipped())
            self.policy.observe(KvEvents(replica, events, self._now_us))

    def end(self, request_id: str) -> None:
        replica = self._placed.pop(request_id)
        self._load(replica, -1)
        self.policy.observe(Finished(request_id, replica, 1, self._now_us))

    def placed(self, request_id: str) -> str:
        return self._placed[request_id]

    def _load(self, replica: str, change: int) -> None:
        view = self.views[replica]
        self.views[replica] = msgspec.structs.replace(view, in_flight=view.in_flight + change)


def compare(found: Agreement, request_id: str, decision, real: str, *, lowest_wins: bool = True) -> None:
    """Counts one decision of ours against the real router's."""
    if decision.replica == real:
        found.same += 1
        return
    scores = decision.scores or {}
    best = (min if lowest_wins else max)(scores.values()) if scores else None
    if scores and scores.get(real) == best:
        found.tied += 1
    else:
        found.different.append(f"{request_id}: real {real}, ours {decision.replica} ({decision.reason}) {scores}")


def token_prompt(op: Op) -> TokenPrompt:
    return TokenPrompt(list(op.prompt))


class InOrder(random.Random):
    """Chance that draws ever greater numbers: whoever is added first comes first in an order that is drawn."""

    def __init__(self) -> None:
        super().__init__(0)
        self._next = 0.0

    def random(self) -> float:
        self._next += 1e-6
        return self._next
