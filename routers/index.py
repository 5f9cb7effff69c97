"""Block index: which prefix blocks are resident on which replica, as the replicas' own events tell it.

Law: the match of a replica is the number of its leading resident blocks, exactly what counting them one by one
would give, through holes, removals, re-stores and replicas that come and go. A block is found by its prefix key
(see `hashing`), and every block carries, beside the set of holders, the set `reach` of replicas that hold it *and*
everything before it. `reach` only shrinks with depth, so one bisection answers for all replicas at once. The odd
thing: a removal inside a chain walks its descendants to correct `reach`; engines evict the deepest block first, so
that walk is nearly always of length one. Blocks are rows of flat arrays (`blocks`, `slots`) and no objects, so a
million of them cost about a hundred megabytes.

Engine hashes are opaque names here, kept per replica, so engines may differ in hash seed. Placement by parent: a
store whose parent the replica never announced cannot be placed and is dropped (and counted), as Dynamo does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from routers.blocks import NONE, ROOT, Blocks
from routers.errors import EventError
from routers.hashing import MASK, PrefixKeys, extend_keys
from routers.slots import NamedSlots
from routers.view import Cleared, EventGap, KvEvent, KvEvents, Observation, ReplicaRemoved, Stored

DEVICE, HOST, DISK = "device", "host", "disk"
_NOWHERE: dict[str, int] = {}

_HOST_MEDIA = frozenset({"CPU", "CPU_PINNED", "CPU_TIER1"})
_DISK_MEDIA = frozenset({"DISK", "EXTERNAL"})


def tier_of(medium: str | None) -> str:
    """Tier of an event's medium as Dynamo reads it: null, lower case and even STORAGE count as device."""
    if medium == "GPU":
        return DEVICE
    if medium in _HOST_MEDIA:
        return HOST
    if medium in _DISK_MEDIA:
        return DISK
    return DEVICE


class IndexStats(msgspec.Struct):
    """Counts since the start; a growing `unknown_parents` means that the index misses what engines hold."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_parents: int = 0  # store events dropped because their parent was never announced
    unknown_removals: int = 0  # blocks removed that were never announced
    conflicts: int = 0  # an engine hash that came back with other content
    contradictions: int = 0  # store events dropped because a hash stands in them twice, or is its own parent
    cleared: int = 0
    gaps: int = 0


class _Residency:
    """What one replica announced: engine hash -> block, per tier."""

    __slots__ = ("bit", "copies", "name", "several", "tiers")

    def __init__(self, name: str, bit: int) -> None:
        self.name = name
        self.bit = bit
        self.tiers: dict[str, NamedSlots] = {DEVICE: NamedSlots()}
        self.copies: dict[tuple[str, int], int] = {}  # stores beyond the first of one hash
        self.several: dict[tuple[str, int], int] = {}  # hashes that name one block, where more than one does

    def find(self, engine_hash: int) -> int:
        for slots in self.tiers.values():
            block = slots.get(engine_hash)
            if block:
                return block
        return NONE


class PrefixIndex:
    """See the module text.

    `count_copies`: a real engine may hold a block twice and says so with two stores and two removals, the first
    removal leaving one copy. True counts them and stays equal to the engine. False keeps a set, as Dynamo does: the
    first removal ends the belief, but a re-announcement (vLLM's full report mode) does no harm.
    """

    def __init__(self, *, count_copies: bool = True, tiers: Callable[[str | None], str] = tier_of) -> None:
        self._count_copies = count_copies
        self._tier_of = tiers
        self._blocks = Blocks()
        self._replicas: dict[str, _Residency] = {}
        self._names: dict[int, str] = {}  # bit -> replica
        self._lower_blocks = 0
        self.stats = IndexStats()

    def __len__(self) -> int:
        """Distinct prefix blocks known, held by anyone or needed to reach one that is."""
        return len(self._blocks)

    def resident_blocks(self, replica: str) -> int:
        """Engine hashes announced and not removed, on the device tier."""
        residency = self._replicas.get(replica)
        return len(residency.tiers[DEVICE]) if residency is not None else 0

    def held_blocks(self) -> int:
        """What all replicas announced and did not remove, on every tier; a block that two of them hold counts twice."""
        return sum(len(held) for residency in self._replicas.values() for held in residency.tiers.values())

    def state(self) -> dict[str, Any]:
        """For a policy's `stats`."""
        return {"index": msgspec.structs.asdict(self.stats), "index_blocks": len(self)}

    # -- what replicas say -------------------------------------------------------------------------------------

    def observe(self, event: Observation) -> None:
        """What a policy that holds an index is told, as far as it is about caches."""
        if isinstance(event, KvEvents):
            self.apply(event.replica, event.events)
        elif isinstance(event, EventGap):
            self.gap(event.replica)
        elif isinstance(event, ReplicaRemoved):
            self.forget(event.replica)

    def apply(self, replica: str, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self.stored(replica, event)
            elif isinstance(event, Cleared):
                self.cleared(replica)
            else:
                self.removed(replica, event.hashes, event.medium)

    def stored(self, replica: str, event: Stored) -> bool:
        """False when the event was dropped: its parent was never announced, or it contradicts itself."""
        if len(event.hashes) != len(event.content):
            raise EventError(
                f"a store of {len(event.hashes)} block hashes with {len(event.content)} contents cannot be placed: "
                f"give one content hash per block"
            )
        residency = self._replicas.get(replica) or self._register(replica)
        tier = self._tier_of(event.medium)
        parent = ROOT
        if event.parent is not None:
            parent = residency.find(event.parent & MASK)
            if not parent:
                self.stats.unknown_parents += 1
                return False
        if event.parent in event.hashes or (len(event.hashes) > 1 and len(set(event.hashes)) < len(event.hashes)):
            self.stats.contradictions += 1
            return False
        held = residency.tiers.get(tier)
        if held is None:
            held = residency.tiers[tier] = NamedSlots()
        blocks = self._blocks
        keys = extend_keys(blocks.keys[parent], blocks.depth[parent], event.content)
        for engine_hash, key in zip(event.hashes, keys, strict=True):
            name = engine_hash & MASK
            block = blocks.child_of(parent, key) or blocks.add(key, parent)
            before = held.put(name, block)
            if not before:
                self._hold(residency, tier, block)
            elif before != block:
                self.stats.conflicts += 1
                residency.copies.pop((tier, name), None)
                held.pop(name)
                held.put(name, block)
                self._hold(residency, tier, block)  # first, so that it is not pruned with the other
                self._drop(residency, tier, before)
            elif self._count_copies:
                residency.copies[tier, name] = residency.copies.get((tier, name), 0) + 1
            parent = block
        self.stats.stored_blocks += len(event.hashes)
        return True

    def removed(self, replica: str, hashes: Sequence[int], medium: str | None = "GPU") -> None:
        """Blocks left one tier; hashes that were never announced are counted and otherwise ignored."""
        residency = self._replicas.get(replica)
        tier = self._tier_of(medium)
        held = residency.tiers.get(tier) if residency is not None else None
        if residency is None or held is None:
            self.stats.unknown_removals += len(hashes)
            return
        for engine_hash in hashes:
            name = engine_hash & MASK
            if residency.copies:
                copies = residency.copies.pop((tier, name), 0)
                if copies:
                    if copies > 1:
                        residency.copies[tier, name] = copies - 1
                    self.stats.removed_blocks += 1
                    continue
            block = held.pop(name)
            if block:
                self.stats.removed_blocks += 1
                self._drop(residency, tier, block)
            else:
                self.stats.unknown_removals += 1

    def cleared(self, replica: str) -> None:
        """The replica holds nothing any more, on no tier."""
        self.stats.cleared += 1
        self._wipe(replica)

    def gap(self, replica: str) -> None:
        """Events were lost, so nothing that is believed of this replica may be used."""
        self.stats.gaps += 1
        self._wipe(replica)

    def forget(self, replica: str) -> None:
        """The replica left the fleet."""
        self._wipe(replica)
        residency = self._replicas.pop(replica, None)
        if residency is not None:
            del self._names[residency.bit]

    # -- what policies ask ---------------------------------------------------------------------------------------

    def match(self, keys: PrefixKeys) -> dict[str, int]:
        """Leading resident device blocks of every replica that has any."""
        if not self._names or not len(keys):
            return {}
        blocks, at = self._blocks, keys.at
        named, names, reach = blocks.by_key.get, blocks.keys, blocks.reach
        rows = len(names)
        first = named(at(1))
        everyone = reach[first]
        found: dict[str, int] = {}
        # Bisection over depth: replicas in reach at `low` but not at `high` end somewhere between. Blocks that were
        # stored together stand in a row, so the first guess is the row that would then be the one.
        spans = [(1, first, everyone, len(keys) + 1, 0)] if everyone else []
        while spans:
            low, low_block, at_low, high, at_high = spans.pop()
            while high - low > 1 and at_low != at_high:
                middle = (low + high) // 2
                key = at(middle)
                block = low_block + middle - low
                if block >= rows or names[block] != key:
                    block = named(key)
                reached = reach[block]
                if reached == at_low:
                    low, low_block = middle, block
                elif reached == at_high:
                    high = middle
                else:
                    spans.append((middle, block, reached, high, at_high))
                    high, at_high = middle, reached
            ended = at_low & ~at_high
            while ended:
                bit = ended & -ended
                found[self._names[bit]] = low
                ended ^= bit
        return found

    def lower_tiers(
        self, keys: PrefixKeys, device: dict[str, int], *, chained: bool = True
    ) -> dict[str, tuple[int, int]]:
        """Blocks that extend the device match on the lower tiers: replica -> (host, disk), where any.

        `chained`: disk counts on from where host stopped; otherwise both count from the end of the device match.
        """
        found: dict[str, tuple[int, int]] = {}
        if not self._lower_blocks:
            return found
        for name, residency in self._replicas.items():
            depth = start = device.get(name, 0)
            counts = []
            for tier in (HOST, DISK):
                while depth < len(keys):
                    block = self._blocks.by_key.get(keys.at(depth + 1))
                    if not self._blocks.lower.get(block, _NOWHERE).get(tier, 0) & residency.bit:
                        break
                    depth += 1
                counts.append(depth - start)
                if chained:
                    start = depth
                depth = start
            if counts[0] or counts[1]:
                found[name] = (counts[0], counts[1])
        return found

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def _register(self, replica: str) -> _Residency:
        bit = 1
        while bit in self._names:
            bit <<= 1
        residency = self._replicas[replica] = _Residency(replica, bit)
        self._names[bit] = replica
        return residency

    def _hold(self, residency: _Residency, tier: str, block: int) -> None:
        bit, blocks = residency.bit, self._blocks
        if tier != DEVICE:
            lower = blocks.lower.setdefault(block, {})
            if lower.get(tier, 0) & bit:
                residency.several[tier, block] = residency.several.get((tier, block), 1) + 1
            else:
                lower[tier] = lower.get(tier, 0) | bit
                self._lower_blocks += 1
            return
        holders = blocks.holders[block]
        if holders & bit:
            residency.several[tier, block] = residency.several.get((tier, block), 1) + 1
            return
        blocks.holders[block] = blocks.mask(holders | bit)
        if blocks.reach[blocks.parent[block]] & bit:
            blocks.reach[block] = blocks.mask(blocks.reach[block] | bit)
            if blocks.child[block]:
                self._spread(block, bit)

    def _drop(self, residency: _Residency, tier: str, block: int) -> None:
        bit, blocks = residency.bit, self._blocks
        if residency.several:
            names = residency.several.pop((tier, block), 1)
            if names > 1:
                if names > 2:
                    residency.several[tier, block] = names - 1
                return
        if tier != DEVICE:
            lower = blocks.lower[block]
            lower[tier] &= ~bit
            self._lower_blocks -= 1
            if not lower[tier]:
                del lower[tier]
                if not lower:
                    del blocks.lower[block]
        else:
            left = blocks.holders[block] & ~bit
            blocks.holders[block] = blocks.mask(left) if left else 0
            if blocks.reach[block] & bit:
                blocks.reach[block] = blocks.mask(blocks.reach[block] & ~bit)
                if blocks.child[block]:
                    self._retract(block, bit)
            if left:
                return
        blocks.prune(block)

    def _spread(self, block: int, bit: int) -> None:
        """`block` came into reach: so do its held descendants, down to the next hole."""
        blocks, stack = self._blocks, [block]
        while stack:
            for child in blocks.children(stack.pop()):
                if blocks.holders[child] & bit and not blocks.reach[child] & bit:
                    blocks.reach[child] = blocks.mask(blocks.reach[child] | bit)
                    stack.append(child)

    def _retract(self, block: int, bit: int) -> None:
        """`block` fell out of reach, and with it everything below that was in reach."""
        blocks, stack = self._blocks, [block]
        while stack:
            for child in blocks.children(stack.pop()):
                if blocks.reach[child] & bit:
                    blocks.reach[child] = blocks.mask(blocks.reach[child] & ~bit)
                    stack.append(child)

    def _wipe(self, replica: str) -> None:
        residency = self._replicas.get(replica)
        if residency is None:
            return
        residency.copies.clear()
        residency.several.clear()
        for tier, held in residency.tiers.items():
            # Deepest first: then no removal has a descendant to correct.
            for block in sorted(set(held.blocks().tolist()), key=self._blocks.depth.__getitem__, reverse=True):
                self._drop(residency, tier, block)
        residency.tiers = {DEVICE: NamedSlots()}
