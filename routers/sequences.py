"""What every replica owes for the requests that this router placed there, as Dynamo books it.

Prefill: the uncached prompt tokens of a request, from its booking until its first token or its end. Decode: the
unique prompt blocks per replica, from booking until the request ends, shared prefixes counted once; and, if asked,
the blocks of its output. The odd thing: prompts live in one compressed tree for all replicas, whose edges are
stretches of some prompt's prefix keys, so booking costs with branches and not with blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import msgspec

from routers.hashing import NO_KEYS, PrefixKeys


class _Edge:
    """Blocks start+1..end of `keys`, shared by everything below. `requests[r]`: requests of replica r through here."""

    __slots__ = ("children", "end", "end_key", "fraction", "keys", "parent", "requests", "start")

    def __init__(self, keys: PrefixKeys, start: int, end: int, parent: _Edge | None) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        self.end_key = keys.at(end) if end else 0
        self.parent = parent
        self.children: dict[int, _Edge] = {}
        self.requests: dict[str, int] = {}
        self.fraction: dict[str, float] = {}  # weight of a block here for replica r, where it is not 1


class _Booking(msgspec.Struct):
    replica: str
    booked_us: int
    prefill_tokens: int
    prompt_tokens: int
    private_blocks: int  # prompt blocks that are shared with nobody by decree (no reuse assumed)
    tail: _Edge | None
    expected_output: int | None
    output_blocks: int = 0
    fraction: float = 1.0  # weight of the output and private blocks


class ActiveSequences:
    """See the module text. Times are only used to forget bookings that nobody ended."""

    def __init__(self, block_size: int, *, expiry_us: int = 3_600_000_000, check_us: int = 30_000_000) -> None:
        self._block_size = block_size
        self._expiry_us = expiry_us  # Dynamo `sequences/single.rs`: an hour, looked for every 30 s
        self._check_us = check_us
        self._checked_us = 0
        self._root = _Edge(NO_KEYS, 0, 0, None)
        self._bookings: dict[str, _Booking] = {}
        self._prefill: dict[str, int] = {}
        self._blocks: dict[str, float] = {}
        self._requests: dict[str, int] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._bookings)

    # -- what a cost function asks -------------------------------------------------------------------------------

    def prefill_tokens(self, replica: str) -> int:
        return self._prefill.get(replica, 0)

    def active_blocks(self, replica: str) -> int:
        """Weighted blocks, rounded half up as Rust rounds."""
        return math.floor(self._blocks.get(replica, 0.0) + 0.5)

    def blocks(self) -> int:
        """Weighted blocks of all replicas."""
        return sum(map(self.active_blocks, self._blocks))

    def requests(self, replica: str) -> int:
        return self._requests.get(replica, 0)

    def shared_blocks(self, keys: PrefixKeys) -> dict[str, int]:
        """Blocks of this prompt that are active already: replica -> leading blocks, where any."""
        found: dict[str, int] = {}
        above: dict[str, int] = {}
        depth_above = 0
        for edge, depth in self._descend(keys):
            # Whoever is active on an edge is active on all above it, so equal numbers mean that nobody ended there.
            if len(edge.requests) < len(above):
                for replica in above:
                    if replica not in edge.requests:
                        found[replica] = depth_above
            above, depth_above = edge.requests, depth
        for replica in above:
            found[replica] = depth_above
        return found

    # -- a request's life --------------------------------------------------------------------------------------------

    def book(
        self,
        request_id: str,
        replica: str,
        keys: PrefixKeys,
        *,
        prompt_tokens: int,
        prefill_tokens: int,
        share: bool = True,
        expected_output: int | None = None,
        now_us: int = 0,
    ) -> None:
        """`share` False: the blocks count, but equal prompts do not merge (Dynamo then uses random hashes)."""
        self.expire(now_us)
        if request_id in self._bookings:
            return
        prefill_tokens = max(0, prefill_tokens)
        tail = self._enter(keys, replica) if share and len(keys) else None
        private = 0 if share else len(keys)
        self._bookings[request_id] = _Booking(
            replica, now_us, prefill_tokens, prompt_tokens, private, tail, expected_output
        )
        self._add_blocks(replica, private)
        if prefill_tokens:
            self._prefill[replica] = self._prefill.get(replica, 0) + prefill_tokens
        self._requests[replica] = self._requests.get(replica, 0) + 1

    def prefill_done(self, request_id: str) -> None:
        """First token: the prefill is owed no more. Unknown requests are no news (they may have expired)."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.prefill_tokens:
            self._prefill[booking.replica] -= booking.prefill_tokens
            booking.prefill_tokens = 0

    def output(self, request_id: str, output_tokens: int) -> None:
        """Total output so far. Each block it opened adds one; an expected length fades what the request holds alone:
        every such block then weighs max(0, 1 - output / expected)."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        blocks = -(-(booking.prompt_tokens + output_tokens) // self._block_size)
        grown = blocks - -(-booking.prompt_tokens // self._block_size) - booking.output_blocks
        if grown <= 0:
            return
        booking.output_blocks += grown
        self._add_blocks(booking.replica, grown)  # new blocks start at full weight
        if booking.expected_output is None:
            if booking.fraction != 1.0:
                self._add_blocks(booking.replica, (booking.fraction - 1.0) * grown)
            return
        fraction = max(0.0, 1.0 - output_tokens / max(1, booking.expected_output))
        self._fade(booking, fraction, grown)

    def free(self, request_id: str) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        replica = booking.replica
        if booking.prefill_tokens:
            self._prefill[replica] -= booking.prefill_tokens
        self._add_blocks(replica, -(booking.output_blocks + booking.private_blocks) * booking.fraction)
        if booking.tail is not None:
            self._leave(booking.tail, replica)
        self._requests[replica] -= 1
        if not self._requests[replica]:
            # Nothing is owed, so nothing may remain of rounding.
            del self._requests[replica]
            self._prefill.pop(replica, None)
            self._blocks.pop(replica, None)

    def forget(self, replica: str) -> None:
        """The replica left the fleet: its bookings are void."""
        for request_id in [name for name, booking in self._bookings.items() if booking.replica == replica]:
            self.free(request_id)

    def expire(self, now_us: int) -> None:
        """Free what was booked longer ago than the expiry; looks no more often than every `check_us`."""
        if now_us - self._checked_us < self._check_us:
            return
        self._checked_us = now_us
        before = now_us - self._expiry_us
        for request_id in [name for name, booking in self._bookings.items() if booking.booked_us < before]:
            self.expired += 1
            self.free(request_id)

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _descend(self, keys: PrefixKeys) -> Iterator[tuple[_Edge, int]]:
        """Edges along a prompt, each with the depth up to which the prompt agrees."""
        edge, depth, length, at = self._root, 0, len(keys), keys.at
        while depth < length:
            child = edge.children.get(at(depth + 1))
            if child is None:
                return
            end = child.end
            if end > length or at(end) != child.end_key:
                yield child, keys.common(child.keys, depth + 1, end)
                return
            yield child, end
            edge, depth = child, end

    def _enter(self, keys: PrefixKeys, replica: str) -> _Edge:
        edge, depth = self._root, 0
        path: list[_Edge] = []
        for child, agreed in self._descend(keys):
            if agreed < child.end:
                child = self._split(child, agreed)
            edge, depth = child, agreed
            path.append(child)
        if depth < len(keys):
            child = edge.children[keys.at(depth + 1)] = _Edge(keys, depth, len(keys), edge)
            path.append(child)
        for edge in path:
            held = edge.requests.get(replica, 0)
            edge.requests[replica] = held + 1
            if not held:
                self._add_blocks(replica, edge.end - edge.start)
        return path[-1]

    def _split(self, edge: _Edge, depth: int) -> _Edge:
        """Cut an edge in two at `depth`; the lower part stays the object that bookings point to."""
        assert edge.parent is not None
        upper = _Edge(edge.keys, edge.start, depth, edge.parent)
        upper.requests = dict(edge.requests)
        upper.fraction = dict(edge.fraction)
        edge.parent.children[edge.keys.at(edge.start + 1)] = upper
        upper.children[edge.keys.at(depth + 1)] = edge
        edge.start, edge.parent = depth, upper
        return upper

    def _leave(self, tail: _Edge, replica: str) -> None:
        edge: _Edge | None = tail
        while edge is not None and edge.parent is not None:
            held = edge.requests[replica] - 1
            if held:
                edge.requests[replica] = held
            else:
                del edge.requests[replica]
                self._add_blocks(replica, -(edge.end - edge.start) * edge.fraction.pop(replica, 1.0))
            parent = edge.parent
            if not edge.requests:
                del parent.children[edge.keys.at(edge.start + 1)]
            edge = parent

    def _fade(self, booking: _Booking, fraction: float, grown: int) -> None:
        own = booking.output_blocks + booking.private_blocks
        self._add_blocks(booking.replica, own * fraction - (own - grown) * booking.fraction - grown)
        booking.fraction = fraction
        edge = booking.tail
        while edge is not None and edge.parent is not None and edge.requests[booking.replica] == 1:
            old = edge.fraction.get(booking.replica, 1.0)
            edge.fraction[booking.replica] = fraction
            self._add_blocks(booking.replica, (edge.end - edge.start) * (fraction - old))
            edge = edge.parent

    def _add_blocks(self, replica: str, blocks: float) -> None:
        if blocks:
            self._blocks[replica] = self._blocks.get(replica, 0.0) + blocks


class RouteGuesses:
    """What replicas should hold if they kept all that was routed to them for `ttl_s`: Dynamo's approximate index.

    A block lives until the last routing decision that held it is `ttl_s` old, so every decision refreshes its whole
    chain. Above `blocks_max` the oldest decisions are forgotten until `prune_to` of it is left, as Dynamo prunes.
    """

    def __init__(self, ttl_s: float, *, blocks_max: int | None = None, prune_to: float = 0.8) -> None:
        self._ttl_us = round(1e6 * ttl_s)
        self._blocks_max = blocks_max
        self._prune_to = prune_to
        self._held = ActiveSequences(1)
        self._ends: deque[tuple[int, str]] = deque()
        self._decisions = 0

    def __len__(self) -> int:
        return len(self._held)

    def routed(self, replica: str, keys: PrefixKeys, now_us: int) -> None:
        if not len(keys):
            return
        self._decisions += 1
        name = str(self._decisions)
        self._held.book(name, replica, keys, prompt_tokens=0, prefill_tokens=0)
        self._ends.append((now_us + self._ttl_us, name))
        if self._blocks_max is not None and self._held.blocks() > self._blocks_max:
            while self._ends and self._held.blocks() > self._prune_to * self._blocks_max:
                self._held.free(self._ends.popleft()[1])

    def expire(self, now_us: int) -> None:
        """Forget what is older than the time to live; times never go back."""
        while self._ends and self._ends[0][0] <= now_us:
            self._held.free(self._ends.popleft()[1])

    def blocks(self) -> int:
        """Believed now, all replicas together."""
        return self._held.blocks()

    def match(self, keys: PrefixKeys) -> dict[str, int]:
        return self._held.shared_blocks(keys)

    def forget(self, replica: str) -> None:
        self._held.forget(replica)
