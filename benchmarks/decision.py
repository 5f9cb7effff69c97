"""Time of one KV-aware routing decision at 8,192 prompt blocks and 64 replicas, beside a brute-force count.

    python benchmarks/decision.py [--blocks 8192] [--replicas 64] [--decisions 300]

The fleet is warmed so that matches of every length occur: replica i holds the first i/replicas of the prompt. Hashing
the prompt's tokens is reported apart, because a router does it once whatever it then decides.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np

from routers import HashedPrompt, Router, Stored, TokenPrompt, TurnView, make_policy

BLOCK = 16


def percentile(samples: list[float], p: float) -> float:
    return float(np.percentile(samples, p))


def hash_prompt(ids: list[int]) -> None:
    TokenPrompt(ids).block_hashes(BLOCK)


def timed(action: Callable[[int], None], count: int) -> list[float]:
    samples = []
    for i in range(count):
        start = time.perf_counter()
        action(i)
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--decisions", type=int, default=300)
    args = parser.parse_args()

    rng = random.Random(1)
    names = [f"r{i}" for i in range(args.replicas)]
    contents = [rng.getrandbits(64) for _ in range(args.blocks)]
    hashes = tuple(range(1, args.blocks + 1))
    held = {}
    rows = []
    for policy in ("pure-kv-affinity", "dynamo-kv"):
        router = Router(make_policy(policy, {}, rng=random.Random(2), block_size=BLOCK), names)
        for i, name in enumerate(names):
            count = args.blocks * (i + 1) // args.replicas
            held[name] = set(contents[:count])
            router.kv_events(
                name, [Stored(hashes=hashes[:count], parent=None, content=tuple(contents[:count]), block_size=BLOCK)], 0
            )

        def decide(i: int, router: Router = router) -> None:
            request_id = f"q{i}"
            prompt = HashedPrompt(args.blocks * BLOCK, np.array(contents, dtype=np.uint64), BLOCK)
            router.route(TurnView(request_id=request_id, session_id="s", prompt=prompt), i)
            router.finished(request_id, 1, i)

        timed(decide, 20)
        rows.append((policy, timed(decide, args.decisions)))

    def brute(_: int) -> None:
        best = {}
        for name in names:
            resident = held[name]
            depth = 0
            for content in contents:
                if content not in resident:
                    break
                depth += 1
            best[name] = depth
        max(best, key=lambda n: best[n])

    base = timed(brute, 20)
    ids = [rng.randrange(30_000) for _ in range(args.blocks * BLOCK)]
    hashing = timed(lambda _: hash_prompt(ids), 20)

    print(f"{args.blocks} prompt blocks, {args.replicas} replicas, {args.decisions} decisions; milliseconds")
    print(f"{'':24}{'p50':>9}{'p99':>9}{'of brute force (p50)':>24}")
    for name, samples in [*rows, ("brute force", base), ("hashing the tokens", hashing)]:
        p50, p99 = percentile(samples, 50), percentile(samples, 99)
        print(f"{name:24}{p50:9.3f}{p99:9.3f}{p50 / percentile(base, 50):24.4f}")


if __name__ == "__main__":
    main()
