"""What the engines of a simulation hold, followed through their cache events, for policies that hear more than events.

Pure. A block is resident as often as it was stored and not removed; a prefix is, when all its blocks are. `CacheView`
answers how much of a prompt a replica would serve and makes the report that a replica gives of itself; `SimOracle` is
what only a simulation can know.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.prompts import SpanPrompt
from mock_engine import Batch, BlockRemoved, BlockStored, EngineConfig, KvEvent, StepCost
from routers import Bloom, PrefixKeys, ReportedPrefixes

Key = int | bytes
PS_PER_US = 1e6


class _Block:
    __slots__ = ("children", "content", "copies", "parent", "salted")

    def __init__(self, parent: Key | None, content: int, salted: bool) -> None:
        self.parent = parent
        self.content = content
        self.salted = salted
        """It, or a block before it, has extra keys, so that its tokens do not tell whose it is."""
        self.copies = self.children = 0


class CacheView:
    """One replica's cache as its events tell."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.generation = 0
        self._blocks: dict[Key, _Block] = {}

    def observe(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.generation += 1
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    self._drop(key)
            else:
                self._blocks = {}

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        above = self._blocks.get(parent) if parent is not None else None
        salted = above.salted if above is not None else any(event.extra_keys or ())
        for key, content in zip(event.block_hashes, event.contents or (), strict=True):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(parent, content, salted)
                if above is not None:
                    above.children += 1
            block.copies += 1
            parent, above = key, block

    def _drop(self, key: Key) -> None:
        block = self._blocks.get(key)
        if block is None:
            return
        block.copies -= 1
        if not block.copies:
            del self._blocks[key]
            if block.parent in self._blocks:
                self._blocks[block.parent].children -= 1

    def match(self, keys: Sequence[Key]) -> int:
        """Leading blocks of a sequence that are resident, of the engine's own keys."""
        return next((depth for depth, key in enumerate(keys) if key not in self._blocks), len(keys))

    def prefixes(self) -> Iterator[PrefixKeys]:
        """Every resident prefix that nothing resident continues; salted ones are nobody's to tell, as an engine has
        it."""
        for block in self._blocks.values():
            if not block.children and not block.salted:
                chain = [block.content]
                while block.parent is not None and block.parent in self._blocks:
                    block = self._blocks[block.parent]
                    chain.append(block.content)
                if block.parent is None:
                    yield PrefixKeys(chain[::-1])

    def report(self, replica: str, form: str, at_us: int) -> ReportedPrefixes:
        """What our replicas answer at `/prefix_cache_state`, in keys made of contents where they have tokens."""
        from mock_engine.options import ServerOptions  # the shells own these defaults; few simulations ask
        from mock_engine.prefix_report import (
            BLOOM_BITS_MIN,
            BLOOM_BITS_PER_HASH,
            BLOOM_HASHES,
            REPORT_TOKENS_MIN,
            bloom,
        )

        if form == "bloom":
            names = {name for keys in self.prefixes() for name in keys.array.tolist()}
            bits = max(BLOOM_BITS_MIN, -(-len(names) * BLOOM_BITS_PER_HASH // 8) * 8)
            found = Bloom(bloom(names, bits), BLOOM_HASHES)
            return ReportedPrefixes(replica, self.generation, (), at_us, found, by_content=True)
        ends = (keys for keys in self.prefixes() if len(keys) * self.block_size >= REPORT_TOKENS_MIN)
        rows = heapq.nlargest(ServerOptions().report_top_k, ((len(keys), keys.at(len(keys))) for keys in ends))
        listed = tuple((name, blocks) for blocks, name in rows)
        return ReportedPrefixes(replica, self.generation, listed, at_us, by_content=True)


class SimOracle:
    """The truth, as `routers.Oracle` asks for it. `asking` names the request that is being decided."""

    def __init__(self, config: EngineConfig, cost: StepCost, caches: Mapping[str, CacheView]) -> None:
        self._config = config
        self._cost = cost
        self._caches = caches
        self._prompt: SpanPrompt | None = None

    def asking(self, prompt: SpanPrompt) -> None:
        self._prompt = prompt

    def _asked(self) -> SpanPrompt:
        assert self._prompt is not None
        return self._prompt

    def prompt_tokens(self, request_id: str) -> int:
        return self._asked().tokens

    def output_tokens(self, request_id: str) -> int:
        return self._asked().answer[1]

    def cached_tokens(self, request_id: str, replica: str) -> int:
        prompt, size = self._asked(), self._config.block_size
        blocks = (prompt.tokens - 1) // size  # the last token is always computed
        return self._caches[replica].match(prompt.sequence.block_keys(blocks)[:blocks]) * size

    def cache_tokens(self, replica: str) -> int:
        return self._config.usable_blocks * self._config.block_size

    def prefill_us(self, replica: str, tokens: int) -> float:
        total, done = 0, 0
        while done < tokens:
            chunk = min(tokens - done, self._config.max_num_batched_tokens)
            total += self._cost.step_ps(Batch.of(prefills=[(chunk, done)]))
            done += chunk
        return total / PS_PER_US

    def decode_us(self, replica: str, requests: int, context_tokens: int) -> float:
        return self._cost.step_ps(Batch(requests, requests, 0, context_tokens)) / PS_PER_US
