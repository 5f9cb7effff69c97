"""A made-up run with the traits of a real one, for tests and for looking at reports: no claim about any router.

Sessions of several turns hold a slot each; a router is a hit share, a spread over replicas and a queue that grows with
the load of the replica it chose. Everything is drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

BIN_US = 500_000


@dataclass(frozen=True)
class Character:
    """How a made-up router behaves: share of repeated tokens that hit, pull towards r0, time to decide."""

    hit: float
    pull: float
    routing_us: int
    believed: float = 0.0


CHARACTERS = {
    "round-robin": Character(0.26, 0.0, 300),
    "session-ring": Character(0.86, 0.35, 350),
    "dynamo-kv": Character(0.91, 0.08, 900, 0.93),
    "pure-kv-affinity": Character(0.94, 0.72, 850, 0.97),
    "random": Character(0.25, 0.05, 280),
    "least-requests": Character(0.3, 0.0, 290),
}


def make_run(
    routers: Iterable[str],
    *,
    seed: int = 1,
    sessions: int = 60,
    turns: int = 6,
    slots: int = 16,
    replicas: int = 4,
    repeats: int = 1,
    rollouts_a_step: int | None = None,
    sim: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of requests and of fleet samples."""
    requests: list[dict[str, Any]] = []
    fleet: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for router in routers:
            arm = _Arm(
                router, repeat, Random(f"{seed}/{repeat}/sessions"), Random(f"{seed}/{repeat}/{router}"), replicas, sim
            )
            arm.run(sessions, turns, slots, rollouts_a_step)
            requests += arm.rows
            fleet += arm.samples()
    return requests, fleet


class _Arm:
    def __init__(self, router: str, repeat: int, lengths: Random, chance: Random, replicas: int, sim: bool) -> None:
        self.router, self.repeat, self.lengths, self.chance, self.sim = router, repeat, lengths, chance, sim
        self.character = CHARACTERS[router]
        self.names = [f"r{number}" for number in range(replicas)]
        self.rows: list[dict[str, Any]] = []
        self.turn_of_all = 0

    def run(self, sessions: int, turns: int, slots: int, rollouts_a_step: int | None) -> None:
        free_us = [slot * 1_000 for slot in range(slots)]
        for number in range(sessions):
            slot = min(range(slots), key=lambda place: free_us[place])
            now_us, context = free_us[slot], self.lengths.randrange(600, 2_400)
            home = self.chance.choice(self.names)
            for turn in range(turns):
                now_us = self._request(number, turn, now_us, context, home, rollouts_a_step)
                context += self.lengths.randrange(150, 500)
            free_us[slot] = now_us

    def _request(
        self, session: int, turn: int, at_us: int, context: int, home: str, rollouts_a_step: int | None
    ) -> int:
        output = self.lengths.randrange(40, 160) if not (rollouts_a_step and session % 4 == 0 and turn == 5) else 700
        replica = self._choose(home)
        busy = sum(1 for row in self.rows if row["replica"] == replica and row["sent_us"] <= at_us < row["end_us"])
        hit = (
            int(context * 0.8 * self.character.hit * (turn > 0)) // 16 * 16
            if replica == home or self.character.hit < 0.5
            else 0
        )
        lag_us = 0 if self.sim else int(self.chance.expovariate(1 / 400))
        routing_us = 0 if self.sim else self.character.routing_us + int(self.chance.expovariate(1 / 200))
        sent_us = at_us + lag_us
        queue_us = int(busy * 3_500 * self.chance.uniform(0.5, 1.5)) + (busy > 6) * busy * 9_000
        first_us = sent_us + routing_us + queue_us + 9_000 + (context - hit) * 62
        gap_us = int(12_000 + 650 * busy + self.chance.uniform(0, 400))
        gaps = [gap_us + self.chance.randrange(-300, 300) for _ in range(output - 1)]
        last_us = first_us + sum(gaps)
        self.rows.append(
            {
                "router": self.router,
                "repeat": self.repeat,
                "ingress": "0",
                "request_id": f"s{session}-{turn}",
                "session": f"s{session}",
                "turn": turn,
                "group": None,
                "rollout_step": None if rollouts_a_step is None else session // rollouts_a_step,
                "replica": replica,
                "reason": "made up",
                "scheduled_us": at_us,
                "sent_us": sent_us,
                "routed_us": None if self.sim else sent_us + routing_us,
                "admitted_us": sent_us + routing_us + queue_us,
                "first_token_us": first_us,
                "second_token_us": first_us + gaps[0],
                "last_token_us": last_us,
                "end_us": last_us + 300,
                "phase": "steady",
                "prompt_tokens": context,
                "output_tokens": output,
                "cached_tokens": hit,
                "token_source": "usage",
                "believed_hit_tokens": min(context, int(hit * 1.02) + 16) if self.character.believed else None,
                "chunk_gaps_us": None if self.sim else gaps,
                "status": "ok",
                "error_class": None,
                "error": None,
            }
        )
        return last_us + self.lengths.randrange(80_000, 400_000)

    def _choose(self, home: str) -> str:
        if self.chance.random() < self.character.pull:
            return self.names[0]
        if self.character.hit > 0.5:
            return home
        self.turn_of_all += 1
        return self.names[self.turn_of_all % len(self.names)]

    def samples(self) -> list[dict[str, Any]]:
        end_us = max(row["end_us"] for row in self.rows)
        found = []
        for replica in self.names:
            own = [row for row in self.rows if row["replica"] == replica]
            hits = queries = evicted = 0
            for t_us in range(BIN_US, end_us + BIN_US, BIN_US):
                for row in own:
                    if t_us - BIN_US <= row["admitted_us"] < t_us:
                        hits, queries = hits + row["cached_tokens"], queries + row["prompt_tokens"]
                        evicted += (row["prompt_tokens"] - row["cached_tokens"]) // 64
                running = [row for row in own if row["admitted_us"] <= t_us < row["end_us"]]
                decoding = sum((row["prompt_tokens"] + 60) // 16 for row in running if row["first_token_us"] <= t_us)
                found.append(
                    {
                        "router": self.router,
                        "repeat": self.repeat,
                        "t_us": t_us,
                        "replica": replica,
                        "running": len(running),
                        "waiting": sum(1 for row in own if row["sent_us"] <= t_us < row["admitted_us"]),
                        "used_blocks": sum((row["prompt_tokens"] + 60) // 16 for row in running),
                        "active_decode_blocks": decoding,
                        "hit_tokens": hits,
                        "query_tokens": queries,
                        "evicted_blocks": evicted,
                        "preemptions": 0,
                        "step_us_mean": None if not running else 12_000.0 + 650 * len(running),
                        "late_us_p99": None if self.sim else 350.0 + self.chance.uniform(0, 600),
                    }
                )
        return found


def ceilings(requests: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[int, int]]:
    """What one infinite cache would have hit, if all but 20 % of every later prompt were known already."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for row in requests:
        cached, prompt = found.get((row["router"], row["repeat"]), (0, 0))
        again = int(row["prompt_tokens"] * 0.8) // 16 * 16 if row["turn"] else 0
        found[row["router"], row["repeat"]] = (cached + again, prompt + row["prompt_tokens"])
    return found


def header(**changes: Any) -> dict[str, Any]:
    return {
        "status": "complete",
        "scenario": {"name": "quickstart", "about": "Multi-turn chat on four replicas", "slo": {"ttft_ms": 300}},
        "mode": "sim",
        "seed": 1,
        "environment": {"cores": 2, "python": "3.11"},
        "started_at": "2026-01-01T00:00:00Z",
        "wall_s": 12.5,
    } | changes
