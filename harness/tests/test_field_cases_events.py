"""Engine and router know each other by a wire alone: what one publishes is all that the other may believe."""

from __future__ import annotations

import random

import pytest

from mock_engine import BlockHasher, Engine, EngineConfig, Lora, Request, Step, StepCost, TokenSequence, encode_batch
from routers import Router, TurnView, make_policy
from routers.prompts import TokenPrompt
from routers.wire import Skipped, decode_batch, to_events

BLOCK = 16
ADAPTER = Lora("ad1", "/adapters/ad1")


class Wire:
    """One engine, and a router that hears of it what was published, batch by batch, and nothing else."""

    def __init__(self, *, form: str = "maps", int_hashes: bool = True, algorithm: str = "sha256", blocks: int = 41):
        self.engine = Engine(
            EngineConfig(num_gpu_blocks=blocks, block_size=BLOCK, max_num_batched_tokens=128, max_num_seqs=4),
            cost=StepCost(step_fixed_us=1000),
            rng=random.Random(0),
        )
        self.router = Router(make_policy("pure-kv-affinity", block_size=BLOCK), ["r0"])
        self.skipped = Skipped()
        self._wire = {"form": form, "int_hashes": int_hashes}
        self._hasher = BlockHasher(algorithm, seed="0")

    def believed(self, name: str, ids: list[int], salt: str | None, lora: Lora | None) -> int:
        prompt = TokenPrompt(ids, None, lora.name if lora else None, salt)
        decision = self.router.route(TurnView(request_id=name, prompt=prompt), self.engine.ready_us)
        self.router.finished(name, 1, self.engine.ready_us)
        return decision.believed_hit_tokens or 0

    def submit(self, name: str, ids: list[int], answer: int, salt: str | None = None, lora: Lora | None = None) -> None:
        sequence = TokenSequence(
            ids, hasher=self._hasher, output=hash_free(name), cache_salt=salt, lora=lora, block_size=BLOCK
        )
        self.engine.submit(Request(request_id=name, sequence=sequence, max_tokens=answer), self.engine.ready_us)

    def run(self) -> dict[str, int]:
        """Until the engine is idle; cached tokens of each request at its first admission."""
        found: dict[str, int] = {}
        while (step := self.engine.step(self.engine.ready_us)) is not None:
            self.hear(step)
            for admission in step.admitted:
                found.setdefault(admission.request_id, admission.cached_tokens)
        return found

    def hear(self, step: Step) -> None:
        if step.kv_events:
            batch = decode_batch(encode_batch(step.ends_us / 1e6, step.kv_events, **self._wire))
            self.router.kv_events("r0", to_events(batch, BLOCK, self.skipped), step.ends_us)


def hash_free(name: str) -> int:
    """A seed for an answer that no other name has."""
    return int.from_bytes(name.encode(), "big") % 2**63


@pytest.mark.parametrize(
    ("form", "int_hashes", "algorithm"),
    [
        ("maps", True, "sha256"),
        ("maps", False, "sha256_cbor"),
        ("maps", False, "xxhash_cbor"),
        ("arrays", True, "xxhash"),
        ("arrays", False, "sha256"),
    ],
)
def test_an_index_fed_by_the_wire_alone_foretells_what_the_engine_serves(form, int_hashes, algorithm):
    """A thousand prompts, two or three at a time, on a cache that evicts and preempts and is reset now and then. With
    a parent that is not the block before, or tokens of other blocks, an index never gets past the first of them."""
    wire = Wire(form=form, int_hashes=int_hashes, algorithm=algorithm)
    rng = random.Random(28)
    texts = [[rng.randrange(30_000) for _ in range(240)] for _ in range(4)]
    # The old arrays carry no extra keys, so a router that reads them cannot tell salts apart; it can tell adapters.
    salts = (None, "s1", "s2") if form == "maps" else (None,)
    foretold = asked = 0
    while asked < 1000:
        if rng.random() < 0.02:
            assert wire.engine.reset_prefix_cache()
            wire.submit(f"after-reset-{asked}", texts[0][:1], 1)
            wire.run()
        first = None
        for _ in range(rng.choice((1, 1, 2, 3))):
            asked += 1
            shared = rng.randrange(1, 200)
            ids = rng.choice(texts)[:shared] + [rng.randrange(30_000) for _ in range(rng.choice((0, 3, 40)))]
            salt, lora = rng.choice(salts), rng.choice((None, None, ADAPTER))
            name = f"q{asked}"
            if first is None:
                first = name, wire.believed(name, ids, salt, lora), len(ids)
            wire.submit(name, ids, rng.choice((1, 20, 90)), salt, lora)
        cached = wire.run()
        name, believed, tokens = first
        assert cached[name] == min(believed, (tokens - 1) // BLOCK * BLOCK)  # the last token is always computed
        foretold += believed > 0
    snapshot = wire.engine.snapshot()
    assert foretold > 80
    assert snapshot.evicted_blocks > 1000
    assert snapshot.preemptions > 0
    assert wire.skipped == Skipped()


def test_a_reset_that_nobody_heard_of_yet_costs_exactly_the_next_prompt():
    """vLLM tells of a reset with the next step only: until then a router believes, and the first prompt misses."""
    wire = Wire(blocks=201)
    text = [random.Random(1).randrange(30_000) for _ in range(160)]
    wire.submit("warm", text, 1)
    wire.run()
    assert wire.engine.reset_prefix_cache()
    beliefs, served = [], []
    for name in ("first", "second"):
        beliefs.append(wire.believed(name, text, None, None))
        wire.submit(name, text, 1)
        served.append(wire.run()[name])
    assert (beliefs, served) == ([160, 160], [0, 144])
