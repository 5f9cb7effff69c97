"""Memory of the block index at a million blocks over 64 replicas, beside Dynamo's tree and a set of hashes each.

    python benchmarks/index_memory.py [--blocks 1000000] [--replicas 64] [--shared 0.1] [--prompt-blocks 500]

Each index is filled in a process of its own, which reports what its resident memory grew by, and processor time, so
that what else the machine does is not measured. `blocks` are what replicas hold in sum: prompts of `prompt-blocks`
blocks, of which the first `shared` part is alike everywhere. Dynamo's tree is `RadixTree` of `ai-dynamo-runtime`, where
that is installed. The set is the least that remembers who holds what, and it cannot answer for all replicas at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from routers import PrefixIndex, PrefixKeys, Stored

BLOCK = 16
KINDS = ("ours", "set per replica", "dynamo")


def chains(blocks: int, replicas: int, shared: float, length: int) -> Iterator[tuple[int, list[int]]]:
    """(replica, contents) of every prompt that is stored."""
    rng = random.Random(1)
    common = [rng.getrandbits(63) for _ in range(round(shared * length))]
    for number in range(max(1, blocks // length)):
        yield number % replicas, [*common, *(rng.getrandbits(63) for _ in range(length - len(common)))]


def ours(replicas: int) -> tuple[Callable[[int, list[int]], object], Callable[[list[int]], int]]:
    index = PrefixIndex()

    def store(replica: int, contents: list[int]) -> None:
        keys = PrefixKeys(contents).array.tolist()  # an engine's chained names, one per prefix
        index.stored(f"r{replica}", Stored(tuple(keys), None, tuple(contents), BLOCK))

    return store, lambda contents: max(index.match(PrefixKeys(contents)).values())


def sets(replicas: int) -> tuple[Callable[[int, list[int]], object], Callable[[list[int]], int]]:
    held: list[set[int]] = [set() for _ in range(replicas)]

    def match(contents: list[int]) -> int:
        keys = PrefixKeys(contents).array.tolist()
        found = []
        for mine in held:
            depth = 0
            while depth < len(keys) and keys[depth] in mine:
                depth += 1
            found.append(depth)
        return max(found)

    return lambda replica, contents: held[replica].update(PrefixKeys(contents).array.tolist()), match


def dynamo(replicas: int) -> tuple[Callable[[int, list[int]], object], Callable[[list[int]], int]]:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]

    tree = RadixTree()
    events = iter(range(1, 1 << 62))

    def store(replica: int, contents: list[int]) -> None:
        keys = PrefixKeys(contents).array.tolist()
        blocks = [{"block_hash": key, "tokens_hash": content} for key, content in zip(keys, contents, strict=True)]
        data = {"stored": {"parent_hash": None, "blocks": blocks}}
        event = {"event_id": next(events), "data": data, "dp_rank": 0}
        tree.apply_event(replica, json.dumps(event).encode())

    return store, lambda contents: max(tree.find_matches(contents).scores.values())


def measure(kind: str, args: argparse.Namespace) -> None:
    """Fill one index and print its figures as JSON."""
    store, match = {"ours": ours, "set per replica": sets, "dynamo": dynamo}[kind](args.replicas)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    stored, filling, probe = 0, 0.0, []
    for replica, contents in chains(args.blocks, args.replicas, args.shared, args.prompt_blocks):
        started = time.process_time()
        store(replica, contents)
        filling += time.process_time() - started
        stored += len(contents)
        probe = contents
    gc.collect()
    grown = process.memory_info().rss - before
    if match(probe) != len(probe):
        raise SystemExit(f"the index finds {match(probe)} of {len(probe)} blocks that it was told of")
    started = time.process_time()
    for _ in range(50):
        match(probe)
    looking = (time.process_time() - started) / 50
    print(json.dumps({"stored": stored, "bytes": grown, "fill_us": 1e6 * filling / stored, "match_us": 1e6 * looking}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--shared", type=float, default=0.1)
    parser.add_argument("--prompt-blocks", type=int, default=500)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        measure(args.kind, args)
        return
    print(f"{args.blocks:,} blocks on {args.replicas} replicas, prompts of {args.prompt_blocks} blocks")
    print(f"{'':18}{'MB':>10}{'bytes/block':>14}{'store us/block':>16}{'match us':>12}")
    for kind in KINDS:
        run = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--kind", kind], capture_output=True, text=True, check=False
        )
        if run.returncode:
            print(f"{kind:18}left out: {run.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(run.stdout)
        each = found["bytes"] / found["stored"]
        print(f"{kind:18}{found['bytes'] / 1e6:10.0f}{each:14.0f}{found['fill_us']:16.2f}{found['match_us']:12.1f}")


if __name__ == "__main__":
    main()
