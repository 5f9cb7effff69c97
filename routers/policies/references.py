"""Two references that nobody should run: `clairvoyant` as a ceiling, `lowest-completed-qps` as a bad example.

The first knows what no router can know and needs a simulation to tell it (`Oracle`). The second has been in real
routers: a replica that is stuck with long answers completes few requests, and so it looks idle.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from routers.config import Options, at_least
from routers.errors import OptionError
from routers.policies.base import BasePolicy
from routers.policies.load import LeastRequests
from routers.rates import WindowCounts
from routers.view import (
    Decision,
    Dispatched,
    Failed,
    Finished,
    FirstToken,
    FleetView,
    Observation,
    Oracle,
    ReplicaRemoved,
    Signal,
    TurnView,
)


class _Known(msgspec.Struct):
    """One request in flight as the oracle described it. `decoding_us`: when its first token came."""

    replica: str
    prefill_tokens: int
    prompt_tokens: int
    output_tokens: int
    decoding_us: int | None = None


class _Standing(msgspec.Struct):
    """A replica at one instant: what it still owes."""

    requests: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    final_tokens: int = 0
    outputs_left: list[int] = []


class ClairvoyantOptions(Options, frozen=True):
    """Ours; there is nothing to imitate.

    - `harm`: weight of the time that a placement adds to the requests which are there already, against the time of
      the request itself: 0 is selfish, 1 minimises the sum of all.
    """

    harm: float = 1.0

    def __post_init__(self) -> None:
        at_least(0, harm=self.harm)


class Clairvoyant(BasePolicy):
    """Greedy on the sum of end-to-end times: own prefill and decode, plus what the placement costs everybody there."""

    about = "ceiling: knows true output lengths and every cache, and adds the least time; simulation only"
    believes = (
        "Everything, and truly: cached tokens at this instant, true output lengths, the engine's own step times. "
        "It is greedy: it knows the present and the lengths, not the requests that will come."
    )
    source = "this project; a reference, not an imitation"
    fails = (
        "It runs in the simulation alone. It is no proven optimum: it decides one request at a time and moves none, "
        "so another policy may beat it where waiting, or keeping a replica free, would pay."
    )
    Options = ClairvoyantOptions
    needs = frozenset({Signal.ORACLE})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._by_load = LeastRequests(rng=rng, block_size=block_size)
        self._oracle: Oracle | None = None
        self._known: dict[str, _Known] = {}
        self._pending: tuple[str, dict[str, int], int, int] = ("", {}, 0, 0)

    def consult(self, oracle: Oracle) -> None:
        """Who knows. The simulation calls this before the first turn."""
        self._oracle = oracle

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        oracle = self._oracle
        if oracle is None:
            raise OptionError(
                "the clairvoyant policy has no oracle: it knows lengths and caches that only a simulation can tell; "
                "run it with --mode sim, or take a policy that a live router can have"
            )
        prompt_tokens = oracle.prompt_tokens(turn.request_id)
        output_tokens = oracle.output_tokens(turn.request_id)
        cached = {replica.name: oracle.cached_tokens(turn.request_id, replica.name) for replica in fleet}
        self._pending = (turn.request_id, cached, prompt_tokens, output_tokens)
        costs = {}
        for replica in fleet:
            name = replica.name
            standing = self._standing(name, fleet.now_us)
            costs[name] = self._added_us(
                oracle, name, standing, prompt_tokens, prompt_tokens - cached[name], output_tokens
            )
        low = min(costs.values())
        tied = [replica for replica in fleet if costs[replica.name] == low]
        name = (
            self._by_load.choose(turn, FleetView(tied, now_us=fleet.now_us)).replica if len(tied) > 1 else tied[0].name
        )
        reason = f"adds the least time: {low / 1e3:.1f} ms, {cached[name]} of {prompt_tokens} tokens cached"
        return Decision(name, reason, "added-time" if len(tied) == 1 else "tie", costs, cached[name])

    def observe(self, event: Observation) -> None:
        self._by_load.observe(event)
        if isinstance(event, Dispatched):
            request_id, cached, prompt_tokens, output_tokens = self._pending
            if request_id == event.request_id and event.counted:
                self._known[request_id] = _Known(
                    event.replica,
                    prompt_tokens - cached[event.replica],
                    prompt_tokens,
                    output_tokens,
                )
        elif isinstance(event, FirstToken):
            known = self._known.get(event.request_id)
            if known is not None:
                known.decoding_us = event.at_us
        elif isinstance(event, Finished | Failed):
            self._known.pop(event.request_id, None)

    def _standing(self, name: str, now_us: int) -> _Standing:
        found = _Standing(outputs_left=[])
        oracle = self._oracle
        assert oracle is not None
        mine = [known for known in self._known.values() if known.replica == name]
        found.requests = len(mine)
        context = sum(known.prompt_tokens for known in mine)
        pace_us = max(1.0, oracle.decode_us(name, len(mine), context)) if mine else 1.0
        for known in mine:
            done = 0
            if known.decoding_us is None:
                found.prefill_tokens += known.prefill_tokens
            else:
                done = min(known.output_tokens, 1 + int((now_us - known.decoding_us) / pace_us))
            found.outputs_left.append(known.output_tokens - done)
            found.context_tokens += known.prompt_tokens + done
            found.final_tokens += known.prompt_tokens + known.output_tokens
        return found

    def _added_us(
        self, oracle: Oracle, name: str, standing: _Standing, prompt_tokens: int, new_tokens: int, output_tokens: int
    ) -> float:
        """Time of the request there, plus (by `harm`) what it adds to the others: they wait while it is prefilled and
        decode in a larger batch as long as both are there. Context beyond the cache is prefilled once more."""
        before = oracle.decode_us(name, standing.requests, standing.context_tokens) if standing.requests else 0.0
        after = oracle.decode_us(name, standing.requests + 1, standing.context_tokens + prompt_tokens)
        prefill = oracle.prefill_us(name, new_tokens)
        own = oracle.prefill_us(name, standing.prefill_tokens) + prefill + output_tokens * after
        together = sum(min(left, output_tokens) for left in standing.outputs_left)
        others = standing.requests * prefill + together * (after - before)
        over = standing.final_tokens + prompt_tokens + output_tokens - oracle.cache_tokens(name)
        if over > 0:
            own += oracle.prefill_us(name, over) * (standing.requests + 1)
        return own + self.options.harm * others


class LowestCompletedQpsOptions(Options, frozen=True):
    """The window is production-stack's.

    - `window_s`: seconds over which completions are counted.
    - `sticky`: whether a session stays where it was placed first.
    """

    window_s: float = 60.0
    sticky: bool = True

    def __post_init__(self) -> None:
        at_least(0.001, window_s=self.window_s)


class LowestCompletedQps(BasePolicy):
    """Ties go to the first, and a session stays: both as in the report (field case BL-31)."""

    about = "bad example: a new session goes where the fewest requests were completed, that is to whoever is stuck"
    believes = "A replica that completed little lately has little to do."
    source = "vllm-project/production-stack issue 1073"
    fails = (
        "Always when output lengths differ: the replica with the longest answers completes the least, looks idle and "
        "gets every new session, while one that works fast is punished for it."
    )
    Options = LowestCompletedQpsOptions
    needs = frozenset({Signal.SESSION_ID})

    def __init__(self, options: Any = None, *, rng: random.Random, block_size: int = 16) -> None:
        super().__init__(options, rng=rng, block_size=block_size)
        self._completed = WindowCounts(self.options.window_s)
        self._pins: dict[str, str] = {}

    def choose(self, turn: TurnView, fleet: FleetView) -> Decision:
        pinned = self._pins.get(turn.session_id) if turn.session_id is not None and self.options.sticky else None
        if pinned is not None and pinned in fleet:
            return Decision(pinned, "the session is here already", "sticky")
        counts = {replica.name: self._completed.count(replica.name, fleet.now_us) or 0 for replica in fleet}
        best = min(fleet, key=lambda replica: counts[replica.name])
        scores = {name: number / self.options.window_s for name, number in counts.items()}
        reason = f"fewest completed in {self.options.window_s:g} s: {counts[best.name]}"
        return Decision(best.name, reason, "completed-qps", scores)

    def observe(self, event: Observation) -> None:
        if isinstance(event, Dispatched):
            if event.turn.session_id is not None and self.options.sticky:
                self._pins[event.turn.session_id] = event.replica
        elif isinstance(event, Finished):
            self._completed.add(event.replica, event.at_us)
        elif isinstance(event, ReplicaRemoved):
            self._completed.forget(event.replica)
            self._pins = {session: name for session, name in self._pins.items() if name != event.replica}
