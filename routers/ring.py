"""Consistent-hash ring with virtual nodes: who owns a key, and who comes next when the owner cannot take it.

Law: adding one replica to N moves about 1/(N+1) of the keys, all of them to the new one; removing it moves them back
and touches no other. The odd thing: hash, number of points, label of a point and whether an exact hit counts are
parameters, because the rings in the field differ in nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import xxhash


def xxh3(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


class HashRing:
    """`points`: virtual nodes of a replica; `inclusive`: a key that falls on a point belongs to it."""

    def __init__(
        self,
        *,
        points: int = 160,
        hash_text: Callable[[str], int] = xxh3,
        label: str = "{name}:{i}",
        inclusive: bool = True,
    ) -> None:
        self._count = points
        self._hash = hash_text
        self._label = label
        self._search = bisect_left if inclusive else bisect_right
        self._points: list[int] = []
        self._owners: list[str] = []
        self._members: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def add(self, name: str, points: int | None = None) -> None:
        """Adding a member again is no change. `points` gives one member more or less than its share."""
        if name in self._members:
            return
        count = self._count if points is None else points
        self._members[name] = [self._hash(self._label.format(name=name, i=i)) for i in range(count)]
        self._rebuild()

    def remove(self, name: str) -> None:
        if self._members.pop(name, None) is not None:
            self._rebuild()

    def owner(self, key: str) -> str | None:
        """None on an empty ring."""
        return next(self.walk(key), None)

    def walk(self, key: str) -> Iterator[str]:
        """Members clockwise from the key, each once: the owner, then the ones to fall back to."""
        start = self._search(self._points, self._hash(key))
        seen: set[str] = set()
        for step in range(len(self._points)):
            name = self._owners[(start + step) % len(self._points)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._members):
                    return

    def _rebuild(self) -> None:
        placed = sorted((point, name) for name, points in self._members.items() for point in points)
        self._points = [point for point, _ in placed]
        self._owners = [name for _, name in placed]
