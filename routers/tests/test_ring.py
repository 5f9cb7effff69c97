"""The ring moves what it must and no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import HashRing

KEYS = [f"conversation-{i}" for i in range(10_000)]


def ring_of(count, **more):
    ring = HashRing(**more)
    for i in range(count):
        ring.add(f"r{i}")
    return ring


@pytest.mark.parametrize("replicas", [3, 4, 8])
def test_one_more_replica_moves_about_its_share_and_only_to_itself(replicas):
    before, after = ring_of(replicas), ring_of(replicas + 1)
    moved = [key for key in KEYS if before.owner(key) != after.owner(key)]
    assert {after.owner(key) for key in moved} == {f"r{replicas}"}
    share = 1 / (replicas + 1)
    assert 0.6 * share < len(moved) / len(KEYS) < 1.4 * share


def test_modulo_would_move_most():
    moved = sum(hash_of(key) % 4 != hash_of(key) % 5 for key in KEYS)
    assert moved > 0.75 * len(KEYS)


def hash_of(key):
    return HashRing()._hash(key)


@settings(deadline=None, max_examples=30)
@given(st.sets(st.integers(0, 30), min_size=2, max_size=8), st.lists(st.text(max_size=12), min_size=1, max_size=30))
def test_removing_a_replica_moves_its_own_keys_alone_and_adding_it_again_restores_them(members, keys):
    ring = HashRing(points=20)
    for member in members:
        ring.add(f"r{member}")
    before = {key: ring.owner(key) for key in keys}
    gone = f"r{min(members)}"
    ring.remove(gone)
    for key in keys:
        assert ring.owner(key) == before[key] or before[key] == gone
    ring.add(gone)
    assert {key: ring.owner(key) for key in keys} == before


def test_keys_spread_evenly_within_a_third():
    ring = ring_of(4)
    counts = {f"r{i}": 0 for i in range(4)}
    for key in KEYS:
        counts[ring.owner(key)] += 1
    assert max(counts.values()) < 1.33 * len(KEYS) / 4


def test_a_walk_names_every_member_once_and_starts_with_the_owner():
    ring = ring_of(5)
    walk = list(ring.walk("k"))
    assert walk[0] == ring.owner("k")
    assert sorted(walk) == [f"r{i}" for i in range(5)]


def test_the_next_on_the_walk_becomes_owner_when_the_owner_leaves():
    ring = ring_of(5)
    owner, following = list(ring.walk("k"))[:2]
    ring.remove(owner)
    assert ring.owner("k") == following


def test_an_empty_ring_owns_nothing():
    assert HashRing().owner("k") is None


def test_whether_an_exact_hit_counts_is_a_parameter():
    places = {"a:0": 10, "b:0": 20, "k": 10}
    assert HashRing(points=1, hash_text=places.__getitem__).owner("k") is None
    for inclusive, owner in ((True, "a"), (False, "b")):
        ring = HashRing(points=1, hash_text=places.__getitem__, inclusive=inclusive)
        ring.add("a")
        ring.add("b")
        assert ring.owner("k") == owner
