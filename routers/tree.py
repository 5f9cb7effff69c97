"""Compressed prefix tree of texts: which tenants (replicas) were sent what, character by character.

Law: a node's owners are a subset of its parent's, and `chars(tenant)` is the number of characters on the nodes that
the tenant owns. The tree says what was *sent*, never what a replica still holds. The odd thing: Ray, SGLang and vLLM
grow the same tree and read it differently, so stamping, matching and eviction are told apart by the caller: whether
an insert stamps its whole path or its last node, whether a match is bound to owners, and what is dropped when.

Token histories live in it, too, as a text with one character per token (`token_text`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_CODE_POINTS = 0x110000


class Node:
    """`owners`: tenant -> stamp of its last use here. `creator`: the owner that a SGLang match returns."""

    __slots__ = ("children", "creator", "owners", "parent", "text")

    def __init__(self, text: str, parent: Node | None) -> None:
        self.text = text
        self.parent = parent
        self.children: dict[str, Node] = {}
        self.owners: dict[str, int] = {}
        self.creator: str | None = None


class PrefixTree:
    def __init__(self) -> None:
        self.root = Node("", None)
        self._chars: dict[str, int] = {}

    def add_tenant(self, tenant: str) -> None:
        """The root belongs to every tenant; adding one again is no change."""
        if tenant not in self._chars:
            self._chars[tenant] = 0
            self.root.owners[tenant] = 0

    def tenants(self) -> tuple[str, ...]:
        """In the order of being added."""
        return tuple(self._chars)

    def chars(self, tenant: str) -> int:
        return self._chars.get(tenant, 0)

    def total_chars(self) -> int:
        """Summed over tenants, so that a character that two of them own counts twice."""
        return sum(self._chars.values())

    # -- matching ------------------------------------------------------------------------------------------------

    def walk(self, text: str) -> Iterator[tuple[Node, int]]:
        """Nodes along a text, each with the characters matched so far; the last one may be matched in part."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                return
            if not text.startswith(child.text, at):
                yield child, at + _common(text, at, child.text)
                return
            at += len(child.text)
            node = child
            yield node, at

    def match(self, text: str) -> tuple[Node, int]:
        """The deepest node entered and the characters matched, whoever owns them; the root when nothing matches."""
        return max(self.walk(text), key=lambda step: step[1], default=(self.root, 0))

    def match_owned(self, text: str, tenants: Sequence[str]) -> tuple[list[str], int]:
        """Those of `tenants` that own the deepest node which any of them owns, and the characters matched there."""
        node, matched = self.root, 0
        for child, depth in self.walk(text):
            if not any(tenant in child.owners for tenant in tenants):
                break
            node, matched = child, depth
        return [tenant for tenant in tenants if tenant in node.owners], matched

    def match_each(self, text: str) -> dict[str, int]:
        """Characters matched on nodes that each tenant owns, where any."""
        found: dict[str, int] = {}
        for node, depth in self.walk(text):
            if not node.owners:
                break
            for tenant in node.owners:
                found[tenant] = depth
        return found

    # -- growing -------------------------------------------------------------------------------------------------

    def insert(self, text: str, tenant: str, stamp: int, *, whole_path: bool) -> None:
        """`tenant` was sent `text`. `whole_path` stamps every node of it, else only the last one; a node that is new
        to the tenant on the way there then starts at stamp 0."""
        self.add_tenant(tenant)
        node, at = self.root, 0
        if whole_path:
            node.owners[tenant] = stamp
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Node(text[at:], node)
                child.creator = tenant
            elif not text.startswith(child.text, at):
                child = self._split(child, _common(text, at, child.text))
            if tenant not in child.owners:
                self._chars[tenant] += len(child.text)
                child.owners[tenant] = 0
            if whole_path:
                child.owners[tenant] = stamp
            at += len(child.text)
            node = child
        if node is not self.root:
            node.owners[tenant] = stamp

    def _split(self, child: Node, length: int) -> Node:
        """Cut a node in two; the upper part is new and inherits owners and creator."""
        parent = child.parent
        assert parent is not None
        upper = Node(child.text[:length], parent)
        upper.owners = dict(child.owners)
        upper.creator = child.creator
        parent.children[upper.text[0]] = upper
        child.text = child.text[length:]
        child.parent = upper
        upper.children[child.text[0]] = child
        return upper

    # -- forgetting ------------------------------------------------------------------------------------------------

    def remove_tenant(self, tenant: str) -> None:
        """Everything it was sent is forgotten, and the tenant with it."""
        for node in reversed(list(self._owned(tenant))):
            self._drop(node, tenant)
        self._chars.pop(tenant, None)
        self.root.owners.pop(tenant, None)

    def evict_leaves(self, chars_max: int, tenant: str | None = None) -> int:
        """Drop the oldest leaves of one tenant until it has at most `chars_max` characters; without a tenant, of all
        of them until all have no more in sum. A parent becomes a leaf in turn. Returns the characters dropped."""
        left = self.total_chars() if tenant is None else self.chars(tenant)
        if left <= chars_max:
            return 0
        names = self.tenants() if tenant is None else (tenant,)
        heap: list[tuple[int, int, Node, str]] = []
        order = 0
        for name in names:
            for node in self._owned(name):
                if _is_leaf(node, name):
                    heap.append((node.owners[name], order, node, name))
                    order += 1
        heapq.heapify(heap)
        dropped = 0
        while heap and left - dropped > chars_max:
            _, _, node, name = heapq.heappop(heap)
            dropped += len(node.text)
            parent = node.parent
            self._drop(node, name)
            if parent is not None and parent is not self.root and _is_leaf(parent, name):
                order += 1
                heapq.heappush(heap, (parent.owners[name], order, parent, name))
        return dropped

    def evict_oldest(self, tenant: str, chars: int) -> int:
        """Drop a tenant's least recently used nodes until at least `chars` characters are gone; nodes of one stamp go
        together. Returns the characters dropped."""
        nodes = sorted(self._owned(tenant), key=lambda node: node.owners[tenant])
        dropped, at = 0, 0
        while at < len(nodes) and dropped < chars:
            stamp = nodes[at].owners[tenant]
            end = at
            while end < len(nodes) and nodes[end].owners[tenant] == stamp:
                end += 1
            for node in reversed(nodes[at:end]):  # children behind their parents in the walk, so before them here
                dropped += len(node.text)
                self._drop(node, tenant)
            at = end
        return dropped

    def _owned(self, tenant: str) -> Iterator[Node]:
        """Nodes of a tenant without the root, parents before their children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            for child in node.children.values():
                if tenant in child.owners:
                    yield child
                    stack.append(child)

    def _drop(self, node: Node, tenant: str) -> None:
        del node.owners[tenant]
        self._chars[tenant] -= len(node.text)
        if node.creator == tenant:
            node.creator = next(iter(node.owners), None)
        if not node.owners and not node.children and node.parent is not None:
            del node.parent.children[node.text[0]]


def token_text(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """Token ids as a text of as many characters. Ids 1,114,112 apart fall together; no vocabulary is that large."""
    words = np.asarray(token_ids, dtype=np.int64) % _CODE_POINTS
    return words.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _common(text: str, at: int, edge: str) -> int:
    """Characters that `text` from `at` on and `edge` share; they are known to share the first and not all."""
    low, high = 1, min(len(edge), len(text) - at) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if text.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle
    return low


def _is_leaf(node: Node, tenant: str) -> bool:
    return not any(tenant in child.owners for child in node.children.values())
