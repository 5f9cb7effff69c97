import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import StackDistances
from workloads.stack_distance import _RangeFenwick


def chain(path):
    """Keys of a prompt that is a path in a tree: a key is all that leads to it."""
    return [hash((1, *path[: n + 1])) for n in range(len(path))]


paths = st.lists(st.integers(0, 2), max_size=6)
requests = st.lists(st.tuples(paths, st.integers(0, 2)), max_size=40)


class Lru:
    """The plain way: one list, most recent first, cut at the cache's size."""

    def __init__(self, blocks):
        self.blocks, self.resident, self.hits = blocks, [], 0

    def request(self, keys, asked):
        for key in keys[:asked]:
            if key not in self.resident:
                break
            self.hits += 1
        for key in reversed(keys):
            if key in self.resident:
                self.resident.remove(key)
            self.resident.insert(0, key)
        del self.resident[self.blocks :]


@given(requests)
@settings(deadline=None, max_examples=150)
def test_the_hits_of_every_size_are_those_of_an_lru_cache_of_that_size(asked):
    distances = StackDistances()
    caches = {blocks: Lru(blocks) for blocks in (0, 1, 2, 3, 5, 8, 13, 1000)}
    for path, unasked in asked:
        keys = chain(path)
        lookups = max(0, len(keys) - unasked)
        distances.request(keys, lookups)
        for cache in caches.values():
            cache.request(keys, lookups)
    assert {blocks: distances.hits(blocks) for blocks in caches} == {b: c.hits for b, c in caches.items()}
    assert distances.hits(distances.distinct) == distances.hits(10**9)


@given(requests)
@settings(deadline=None, max_examples=50)
def test_a_larger_cache_never_hits_less(asked):
    distances = StackDistances()
    for path, _ in asked:
        distances.request(chain(path), len(path))
    sizes, hits = distances.curve()
    assert sizes[0] == 0
    assert hits[0] == 0
    assert (hits[1:] >= hits[:-1]).all()
    assert hits[-1] <= distances.lookups


def test_numbers_are_given_anew_without_changing_a_distance():
    """More uses than the tree first has room for, cycling over 1,000 blocks: LRU's worst case."""
    distances = StackDistances()
    keys = [[n] for n in range(1000)]
    for _ in range(12):
        for key in keys:
            distances.request(key, 1)
    assert distances.hits(999) == 0
    assert distances.hits(1000) == 11 * 1000


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 20)), max_size=12), st.integers(0, 20))
def test_the_tree_counts_ranges(ranges, stop):
    tree, plain = _RangeFenwick(20), [0] * 20
    for first, end in ranges:
        if first < end:
            tree.add(first, end)
            for i in range(first, end):
                plain[i] += 1
    assert tree.below(stop) == sum(plain[:stop])


@pytest.mark.parametrize("blocks", [0, 5])
def test_without_requests_nothing_hits(blocks):
    assert StackDistances().hits(blocks) == 0
