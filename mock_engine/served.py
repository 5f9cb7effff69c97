"""One replica under a closed loop in virtual time: what TTFT and TPOT a step cost gives, and what they are made of.

A number of clients each send a request, wait for its end and send the next one without a pause; prompts share nothing.
Beside the two means it returns, for each, the amounts that the cost's coefficients were multiplied by on the way
(a row), so a fit sees how a mean would move with every coefficient without serving again. What a request waits for
is a sum of whole steps and a part of the step that was under way when it arrived; the parts are held at their share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt

from mock_engine.config import EngineConfig
from mock_engine.cost_model import StepCost, prefill_pairs
from mock_engine.engine import Engine
from mock_engine.errors import ConfigError
from mock_engine.request import Request, RunSequence
from mock_engine.results import Run, Step

FloatArray = npt.NDArray[np.float64]

COLUMNS = ("step_fixed_us", "weight_read_us", "token_us", "prefill_attention_ns", "sequence_us", "kv_read_ns")
"""The coefficients of a step, in the order of every row of amounts."""

REQUEST = "request_fixed_us"
SERVED_COLUMNS = (*COLUMNS, REQUEST)

US_PER_UNIT = np.array([1.0, 1.0, 1.0, 1e-3, 1.0, 1e-3, 1.0])  # so that amounts times coefficients are microseconds

NOTHING: FloatArray = np.zeros(len(COLUMNS))

_FOREVER_US = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Lengths are drawn uniformly, both ends included; `requests` counts all clients' together."""

    concurrency: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    requests: int

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.requests < 1:
            raise ConfigError(
                f"concurrency={self.concurrency} with requests={self.requests} asks for nothing: give both at least 1"
            )
        for name in ("input_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} from {low} to {high} is no range of lengths: give 1 or more, smallest first")

    def lengths(self, rng: Random) -> list[tuple[int, int]]:
        """(prompt, answer) of every request in the order of sending."""
        return [(rng.randint(*self.input_tokens), rng.randint(*self.output_tokens)) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Served:
    """Means over all requests, the opening burst included. `tpot_us` is (last - first) / (tokens - 1), over answers of
    two tokens and more; nan if there is none. The rows are amounts of `SERVED_COLUMNS` that give the same means."""

    ttft_us: float
    tpot_us: float
    ttft_row: FloatArray
    tpot_row: FloatArray
    preemptions: int


class _Flight:
    """One request on its way."""

    __slots__ = ("answer", "arrived", "computed", "first", "first_us", "known", "prefilled", "prompt", "sent_us")

    def __init__(self, sent_us: int, prompt: int, answer: int) -> None:
        self.sent_us = sent_us
        self.prompt = prompt
        self.answer = answer
        self.known = prompt
        self.computed = 0
        self.prefilled = False
        self.first_us: int | None = None
        self.arrived = NOTHING  # amounts before the arrival, the step under way in its part
        self.first = NOTHING  # amounts up to the first token


class _Loop:
    def __init__(
        self, config: EngineConfig, cost: StepCost, lengths: Sequence[tuple[int, int]], spread: float, rng: Random
    ) -> None:
        self.engine = Engine(config, cost=cost, rng=rng)
        self.spread = spread
        self.rng = rng
        self.cost = cost
        self.block_size = config.block_size
        self.flights: dict[str, _Flight] = {}
        self.arrivals: list[tuple[int, int, _Flight]] = []
        self.left = iter(lengths)
        self.sent = 0
        self.total = NOTHING  # amounts of all steps so far
        self.last = (0, 0, NOTHING)  # the latest step: start, end, amounts
        self.ttfts: list[int] = []
        self.tpots: list[float] = []
        self.ttft_rows = np.zeros(len(COLUMNS))
        self.request_sum = 0.0
        self.tpot_rows = np.zeros(len(COLUMNS))

    def send(self, at_us: int) -> None:
        lengths = next(self.left, None)
        if lengths is not None:
            flight = _Flight(at_us, *lengths)
            share = 1 + self.spread * (2 * self.rng.random() - 1) if self.spread else 1.0
            self.request_sum += share
            heapq.heappush(self.arrivals, (at_us + round(share * self.cost.request_fixed_us), self.sent, flight))
            self.sent += 1

    def run(self) -> None:
        while True:
            arrival_us = self.arrivals[0][0] if self.arrivals else _FOREVER_US
            due_us = self.engine.next_us()
            if due_us is None and not self.arrivals:
                return
            for piece in self.engine.run_until(min(arrival_us, _FOREVER_US if due_us is None else due_us)):
                if isinstance(piece, Run):
                    self.decoded(piece)
                else:
                    self.stepped(piece)
            if self.arrivals and (self.engine.ready_us >= self.arrivals[0][0] or self.engine.next_us() is None):
                self.arrive()

    def arrive(self) -> None:
        at_us, serial, flight = heapq.heappop(self.arrivals)
        starts_us, ends_us, amounts = self.last
        left = max(0, ends_us - at_us) / (ends_us - starts_us) if ends_us > starts_us else 0.0
        flight.arrived = self.total - left * amounts
        name = str(serial)
        self.flights[name] = flight
        sequence = RunSequence(((2 * serial, flight.prompt),), 2 * serial + 1, block_size=self.block_size)
        self.engine.submit(Request(request_id=name, sequence=sequence, max_tokens=flight.answer), at_us)

    def linear(self, tokens: int) -> tuple[float, int]:
        """Amounts of weight_read and token in a step of so many tokens."""
        cost = self.cost
        if cost.experts:
            return 1 - (1 - cost.top_k / cost.experts) ** tokens, tokens
        return (1, 0) if cost.token_ps * tokens < cost.weight_read_ps else (0, tokens)

    def decoded(self, run: Run) -> None:
        n, size = run.steps, len(run.outputs)
        flights = [self.flights[name] for name in run.outputs]
        context = sum(flight.known for flight in flights)
        weight, token = self.linear(size)
        contexts = n * context + size * (n * (n - 1) // 2)
        self.total = self.total + np.array([n, n * weight, n * token, 0, n * size, contexts])
        starts_us = run.token_us(n - 2) if n > 1 else run.starts_us
        last = np.array([1.0, weight, token, 0, size, context + size * (n - 1)])
        self.last = (starts_us, run.ends_us, last)
        for flight in flights:
            flight.known += n
            flight.computed += n

    def stepped(self, step: Step) -> None:
        for name in step.preempted:
            self.flights[name].computed = 0
            self.flights[name].prefilled = False
        for admission in step.admitted:
            self.flights[admission.request_id].computed = admission.cached_tokens
        tokens = pairs = context = 0
        for name, new in step.scheduled:
            flight = self.flights[name]
            tokens += new
            if flight.prefilled:
                context += flight.known
            else:
                pairs += prefill_pairs(new, flight.computed)
            flight.computed += new
        weight, token = self.linear(tokens)
        amounts = np.array([1.0, weight, token, pairs, len(step.scheduled), context])
        self.total = self.total + amounts
        self.last = (step.starts_us, step.ends_us, amounts)
        for name in step.outputs:
            flight = self.flights[name]
            flight.prefilled = True
            flight.known += 1
            if flight.first_us is None:
                flight.first_us, flight.first = step.ends_us, self.total
                self.ttfts.append(step.ends_us - flight.sent_us)
                self.ttft_rows += self.total - flight.arrived
        for finish in step.finished:
            flight = self.flights.pop(finish.request_id)
            gaps = flight.known - flight.prompt - 1
            if gaps and flight.first_us is not None:
                self.tpots.append((step.ends_us - flight.first_us) / gaps)
                self.tpot_rows += (self.total - flight.first) / gaps
            self.send(step.ends_us)


def serve_closed_loop(
    config: EngineConfig, cost: StepCost, load: ClosedLoop, rng: Random, *, spread: float = 0.0
) -> Served:
    """Serves the load to its end, the prefix cache left off because nothing is shared. With `spread`, a request's fixed
    time is drawn from 1 - spread .. 1 + spread times as long. A request that can never fit raises RequestError."""
    longest = load.input_tokens[1] + load.output_tokens[1]
    needed = load.concurrency * (-(-longest // config.block_size) + 1) + 1  # more blocks than these are never touched
    config = msgspec.structs.replace(
        config, enable_prefix_caching=False, num_gpu_blocks=min(config.num_gpu_blocks, needed)
    )
    loop = _Loop(config, cost, load.lengths(rng), spread, rng)
    for _ in range(load.concurrency):
        loop.send(0)
    loop.run()
    requests, answers = len(loop.ttfts), len(loop.tpots)
    return Served(
        ttft_us=sum(loop.ttfts) / requests,
        tpot_us=sum(loop.tpots) / answers if answers else math.nan,
        ttft_row=np.append(loop.ttft_rows, loop.request_sum) / requests,
        tpot_row=np.append(loop.tpot_rows, 0.0) / max(answers, 1),
        preemptions=loop.engine.snapshot().preemptions,
    )


def mean_of(draws: Sequence[Served]) -> Served:
    """Of several draws of one load."""
    tpots = [draw for draw in draws if not math.isnan(draw.tpot_us)]
    return Served(
        ttft_us=sum(draw.ttft_us for draw in draws) / len(draws),
        tpot_us=sum(draw.tpot_us for draw in tpots) / len(tpots) if tpots else math.nan,
        ttft_row=np.mean([draw.ttft_row for draw in draws], axis=0),
        tpot_row=np.mean([draw.tpot_row for draw in tpots or draws], axis=0),
        preemptions=sum(draw.preemptions for draw in draws),
    )
