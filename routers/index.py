"""Block index: which prefix blocks are resident on which replica, as the replicas' own events tell it.

Law: the match of a replica is the number of its leading resident blocks, exactly what counting them one by one
would give, through holes, removals, re-stores and replicas that come and go. A block is found by its prefix key
(see `hashing`), and every block carries, beside the set of holders, the set `reach` of replicas that hold it *and*
everything before it. `reach` only shrinks with depth, so one bisection answers for all replicas at once. The odd
thing: a removal inside a chain walks its descendants to correct `reach`; engines evict the deepest block first, so
that walk is nearly always of length one.

Engine hashes are opaque names here, kept per replica, so engines may differ in hash seed. Placement by parent: a
store whose parent the replica never announced cannot be placed and is dropped (and counted), as Dynamo does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from routers.errors import EventError
from routers.hashing import PrefixKeys, extend_keys
from routers.view import Cleared, KvEvent, Stored

DEVICE, HOST, DISK = "device", "host", "disk"

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


class _Block:
    """A prefix of `depth` blocks. `holders` and `reach` are bit sets of replicas on the device tier."""

    __slots__ = ("children", "depth", "holders", "key", "lower", "parent", "reach")

    def __init__(self, key: int, depth: int, parent: _Block | None) -> None:
        self.key = key
        self.depth = depth
        self.parent = parent
        self.children: dict[int, _Block] | _Block | None = None  # most blocks have one child: no dict for those
        self.holders = 0
        self.reach = 0
        self.lower: dict[str, int] | None = None  # tier -> bit set, for host and disk


class _Residency:
    """What one replica announced: engine hash -> block, per tier."""

    __slots__ = ("bit", "copies", "name", "several", "tiers")

    def __init__(self, name: str, bit: int) -> None:
        self.name = name
        self.bit = bit
        self.tiers: dict[str, dict[int, _Block]] = {DEVICE: {}}
        self.copies: dict[tuple[str, int], int] = {}  # stores beyond the first of one hash
        self.several: dict[tuple[str, _Block], int] = {}  # hashes that name one block, where more than one does

    def find(self, engine_hash: int) -> _Block | None:
        for blocks in self.tiers.values():
            block = blocks.get(engine_hash)
            if block is not None:
                return block
        return None


class PrefixIndex:
    """See the module text.

    `count_copies`: a real engine may hold a block twice and says so with two stores and two removals, the first
    removal leaving one copy. True counts them and stays equal to the engine. False keeps a set, as Dynamo does: the
    first removal ends the belief, but a re-announcement (vLLM's full report mode) does no harm.
    """

    def __init__(self, *, count_copies: bool = True, tiers: Callable[[str | None], str] = tier_of) -> None:
        self._count_copies = count_copies
        self._tier_of = tiers
        self._root = _Block(0, 0, None)
        self._root.holders = self._root.reach = -1  # every replica holds the empty prefix
        self._blocks: dict[int, _Block] = {}
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

    # -- what replicas say -------------------------------------------------------------------------------------

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
        parent: _Block | None = self._root
        if event.parent is not None:
            parent = residency.tiers[DEVICE].get(event.parent) or residency.find(event.parent)
            if parent is None:
                self.stats.unknown_parents += 1
                return False
        assert parent is not None
        if event.parent in event.hashes or (len(event.hashes) > 1 and len(set(event.hashes)) < len(event.hashes)):
            self.stats.contradictions += 1
            return False
        held = residency.tiers.setdefault(tier, {})
        known = self._blocks
        for engine_hash, key in zip(event.hashes, extend_keys(parent.key, parent.depth, event.content), strict=True):
            block = known.get(key)
            if block is None:
                block = known[key] = _Block(key, parent.depth + 1, parent)
                _adopt(parent, block)
            before = held.get(engine_hash)
            if before is block:
                if self._count_copies:
                    place = (tier, engine_hash)
                    residency.copies[place] = residency.copies.get(place, 0) + 1
            else:
                if before is not None:
                    self.stats.conflicts += 1
                    residency.copies.pop((tier, engine_hash), None)
                    self._drop(residency, tier, before)
                    if key not in known:  # dropping the old block pruned this one away
                        known[key] = block
                        _adopt(parent, block)
                held[engine_hash] = block
                self._hold(residency, tier, block)
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
            block = held.get(engine_hash)
            if block is None:
                self.stats.unknown_removals += 1
                continue
            self.stats.removed_blocks += 1
            if residency.copies:
                place = (tier, engine_hash)
                copies = residency.copies.pop(place, 0)
                if copies:
                    if copies > 1:
                        residency.copies[place] = copies - 1
                    continue
            del held[engine_hash]
            self._drop(residency, tier, block)

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
        first = blocks.get(at(1))
        everyone = first.reach if first is not None else 0
        found: dict[str, int] = {}
        # Bisection over depth: replicas in reach at `low` but not at `high` end somewhere between.
        spans = [(1, everyone, len(keys) + 1, 0)] if everyone else []
        while spans:
            low, at_low, high, at_high = spans.pop()
            while high - low > 1 and at_low != at_high:
                middle = (low + high) // 2
                block = blocks.get(at(middle))
                reach = block.reach if block is not None else 0
                if reach == at_low:
                    low = middle
                elif reach == at_high:
                    high = middle
                else:
                    spans.append((middle, reach, high, at_high))
                    high, at_high = middle, reach
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
                    block = self._blocks.get(keys.at(depth + 1))
                    if block is None or not block.lower or not block.lower.get(tier, 0) & residency.bit:
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

    def _hold(self, residency: _Residency, tier: str, block: _Block) -> None:
        bit = residency.bit
        if tier != DEVICE:
            lower = block.lower = block.lower or {}
            if lower.get(tier, 0) & bit:
                residency.several[tier, block] = residency.several.get((tier, block), 1) + 1
            else:
                lower[tier] = lower.get(tier, 0) | bit
                self._lower_blocks += 1
            return
        if block.holders & bit:
            residency.several[tier, block] = residency.several.get((tier, block), 1) + 1
            return
        block.holders |= bit
        assert block.parent is not None
        if block.parent.reach & bit:
            block.reach |= bit
            if block.children is not None:
                _spread(block, bit)

    def _drop(self, residency: _Residency, tier: str, block: _Block) -> None:
        bit = residency.bit
        if residency.several:
            names = residency.several.pop((tier, block), 1)
            if names > 1:
                if names > 2:
                    residency.several[tier, block] = names - 1
                return
        if tier != DEVICE:
            assert block.lower is not None
            block.lower[tier] &= ~bit
            self._lower_blocks -= 1
            if not block.lower[tier]:
                del block.lower[tier]
        else:
            block.holders &= ~bit
            if block.reach & bit:
                block.reach &= ~bit
                if block.children is not None:
                    _retract(block, bit)
        while not block.holders and not block.lower and block.children is None and block.parent is not None:
            del self._blocks[block.key]
            _disown(block.parent, block)
            block = block.parent

    def _wipe(self, replica: str) -> None:
        residency = self._replicas.get(replica)
        if residency is None:
            return
        residency.copies.clear()
        residency.several.clear()
        for tier, held in residency.tiers.items():
            # Deepest first: then no removal has a descendant to correct.
            for block in sorted(set(held.values()), key=lambda block: -block.depth):
                self._drop(residency, tier, block)
        residency.tiers = {DEVICE: {}}


def _children(block: _Block) -> Iterable[_Block]:
    children = block.children
    if children is None:
        return ()
    return children.values() if isinstance(children, dict) else (children,)


def _adopt(parent: _Block, child: _Block) -> None:
    children = parent.children
    if children is None:
        parent.children = child
    elif isinstance(children, dict):
        children[child.key] = child
    else:
        parent.children = {children.key: children, child.key: child}


def _disown(parent: _Block, child: _Block) -> None:
    children = parent.children
    if children is child:
        parent.children = None
    elif isinstance(children, dict):
        del children[child.key]
        if not children:
            parent.children = None


def _spread(block: _Block, bit: int) -> None:
    """`block` came into reach: so do its held descendants, down to the next hole."""
    stack = list(_children(block))
    while stack:
        child = stack.pop()
        if child.holders & bit and not child.reach & bit:
            child.reach |= bit
            stack.extend(_children(child))


def _retract(block: _Block, bit: int) -> None:
    """`block` fell out of reach, and with it everything below that was in reach."""
    stack = list(_children(block))
    while stack:
        child = stack.pop()
        if child.reach & bit:
            child.reach &= ~bit
            stack.extend(_children(child))
