"""The block index against counting leading blocks one by one, and the reference figures of its spec."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import Cleared, EventError, PrefixIndex, PrefixKeys, Removed, Stored, local_block_hashes

BLOCK = 16


class Leading:
    """The slow truth: which engine hashes each replica holds, and how often."""

    def __init__(self, count_copies):
        self.count_copies = count_copies
        self.held = {}

    def store(self, replica, chain, first, last):
        """Blocks first..last-1 of a chain of contents; engine hashes are the leading contents themselves."""
        held = self.held.setdefault(replica, Counter())
        if first and not held[chain[:first]]:
            return
        for depth in range(first + 1, last + 1):
            held[chain[:depth]] = held[chain[:depth]] + 1 if self.count_copies else 1

    def remove(self, replica, prefix):
        held = self.held.setdefault(replica, Counter())
        held[prefix] = max(0, held[prefix] - 1)

    def clear(self, replica):
        self.held.pop(replica, None)

    def match(self, chain):
        found = {}
        for replica, held in self.held.items():
            depth = 0
            while depth < len(chain) and held[chain[: depth + 1]]:
                depth += 1
            if depth:
                found[replica] = depth
        return found


CHAIN = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple)
REPLICA = st.sampled_from(["r0", "r1", "r2", "r3", "r4"])
ACTION = st.one_of(
    st.tuples(st.just("store"), REPLICA, CHAIN, st.integers(0, 8), st.integers(1, 24)),
    st.tuples(st.just("remove"), REPLICA, CHAIN, st.integers(1, 24)),
    st.tuples(st.just("remove-tail"), REPLICA, CHAIN),
    st.tuples(st.just("clear"), REPLICA),
    st.tuples(st.just("forget"), REPLICA),
)


def engine_hash(replica, prefix):
    """Another name on every replica, as engines with different hash seeds have it."""
    return hash((replica, prefix)) & (2**64 - 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(ACTION, max_size=40), st.lists(CHAIN, min_size=1, max_size=6), st.booleans())
def test_the_match_equals_counting_leading_blocks_through_any_history(actions, probes, count_copies):
    index, truth = PrefixIndex(count_copies=count_copies), Leading(count_copies)
    for action in actions:
        kind, replica = action[0], action[1]
        if kind == "store":
            chain, first, last = action[2], min(action[3], len(action[2]) - 1), min(action[4], len(action[2]))
            last = max(first + 1, last)
            parent = engine_hash(replica, chain[:first]) if first else None
            names = tuple(engine_hash(replica, chain[:depth]) for depth in range(first + 1, last + 1))
            index.apply(replica, [Stored(names, parent, chain[first:last], BLOCK)])
            truth.store(replica, chain, first, last)
        elif kind == "remove":
            prefix = action[2][: action[3]]
            index.apply(replica, [Removed((engine_hash(replica, prefix),))])
            truth.remove(replica, prefix)
        elif kind == "remove-tail":
            for depth in range(len(action[2]), 0, -1):
                index.removed(replica, [engine_hash(replica, action[2][:depth])])
                truth.remove(replica, action[2][:depth])
        elif kind == "clear":
            index.apply(replica, [Cleared()])
            truth.clear(replica)
        else:
            index.forget(replica)
            truth.clear(replica)
    for probe in [*probes, *(action[2] for action in actions if action[0] == "store")]:
        assert index.match(PrefixKeys(probe)) == truth.match(probe)
    for replica in list(truth.held):
        index.forget(replica)
    assert len(index) == 0  # nothing held, nothing remembered


def store(index, replica, contents, parent=None, base=0, **more):
    names = tuple(range(base, base + len(contents)))
    return index.stored(replica, Stored(names, parent, tuple(contents), BLOCK, **more))


def depth(index, contents, replica="r0"):
    return index.match(PrefixKeys(contents)).get(replica, 0)


def test_a_hole_ends_the_match_and_filling_it_restores_all_beyond():
    index = PrefixIndex()
    store(index, "r0", range(100, 110))
    index.removed("r0", [5])
    assert depth(index, range(100, 110)) == 5
    index.stored("r0", Stored((5,), 4, (105,), BLOCK))
    assert depth(index, range(100, 110)) == 10


def test_a_store_whose_parent_was_never_announced_is_dropped_and_counted():
    index = PrefixIndex()
    store(index, "r0", [1, 2])
    assert not index.stored("r1", Stored((9,), 1, (3,), BLOCK))  # r0's block 1 says nothing about r1
    assert index.stats.unknown_parents == 1
    assert index.match(PrefixKeys([1, 2, 3])) == {"r0": 2}


def test_removing_what_was_never_announced_changes_nothing_and_is_counted():
    index = PrefixIndex()
    store(index, "r0", [1, 2])
    index.removed("r0", [77])
    index.removed("r9", [0])
    assert index.stats.unknown_removals == 2
    assert depth(index, [1, 2]) == 2


def test_a_second_copy_survives_the_first_removal_when_copies_are_counted():
    counted, as_set = PrefixIndex(), PrefixIndex(count_copies=False)
    for index in (counted, as_set):
        store(index, "r0", [1, 2])
        store(index, "r0", [1, 2])
        index.removed("r0", [1])
    assert depth(counted, [1, 2]) == 2
    assert depth(as_set, [1, 2]) == 1
    counted.removed("r0", [1])
    assert depth(counted, [1, 2]) == 1


def test_two_engine_hashes_of_one_content_hold_it_until_both_are_gone():
    """A salted and a plain copy have different engine hashes and the same tokens."""
    index = PrefixIndex()
    store(index, "r0", [1, 2], base=0)
    store(index, "r0", [1, 2], base=50)
    index.removed("r0", [0, 1])
    assert depth(index, [1, 2]) == 2
    index.removed("r0", [51, 50])
    assert depth(index, [1, 2]) == 0


def test_an_engine_hash_that_comes_back_with_other_content_moves_there():
    index = PrefixIndex()
    store(index, "r0", [1, 2], base=0)
    store(index, "r0", [1, 3], base=0)
    assert index.stats.conflicts == 1
    assert depth(index, [1, 3]) == 2
    assert depth(index, [1, 2]) == 1


def test_a_store_that_contradicts_itself_is_dropped():
    index = PrefixIndex()
    assert not index.stored("r0", Stored((1, 1), None, (5, 6), BLOCK))
    store(index, "r0", [5], base=7)
    assert not index.stored("r0", Stored((7,), 7, (6,), BLOCK))
    assert index.stats.contradictions == 2


def test_hashes_and_contents_must_pair():
    with pytest.raises(EventError, match="one content hash per block"):
        PrefixIndex().stored("r0", Stored((1, 2), None, (5,), BLOCK))


def test_a_gap_voids_one_replica_and_no_other():
    index = PrefixIndex()
    store(index, "r0", [1, 2])
    store(index, "r1", [1, 2])
    index.gap("r0")
    assert index.match(PrefixKeys([1, 2])) == {"r1": 2}
    assert index.resident_blocks("r0") == 0
    assert index.stats.gaps == 1


def test_a_replica_that_comes_back_starts_with_nothing():
    index = PrefixIndex()
    for name in ("r0", "r1", "r2"):
        store(index, name, [1, 2])
    index.forget("r1")
    store(index, "r7", [1])
    assert index.match(PrefixKeys([1, 2])) == {"r0": 2, "r2": 2, "r7": 1}


def tiered():
    """Three blocks on the device, three more on the host, two more on disk."""
    index = PrefixIndex()
    store(index, "r0", [1, 2, 3])
    index.stored("r0", Stored((10, 11, 12), 2, (4, 5, 6), BLOCK, medium="CPU_PINNED"))
    index.stored("r0", Stored((20, 21), 12, (7, 8), BLOCK, medium="DISK"))
    return index, PrefixKeys(range(1, 9))


def test_lower_tiers_count_on_from_where_the_upper_one_stopped():
    index, keys = tiered()
    device = index.match(keys)
    assert device == {"r0": 3}
    assert index.lower_tiers(keys, device) == {"r0": (3, 2)}


def test_lower_tiers_do_not_count_without_the_blocks_before_them():
    index, keys = tiered()
    index.removed("r0", [0, 1, 2])
    assert index.match(keys) == {}
    assert index.lower_tiers(keys, {}) == {}


def test_a_removal_acts_on_its_own_tier_only():
    index, keys = tiered()
    index.removed("r0", [12], "CPU")
    index.removed("r0", [0], "DISK")
    assert index.match(keys) == {"r0": 3}
    assert index.lower_tiers(keys, {"r0": 3}) == {"r0": (2, 0)}


def test_clearing_drops_every_tier():
    index, keys = tiered()
    index.cleared("r0")
    assert index.match(keys) == {}
    assert len(index) == 0


@pytest.mark.parametrize("medium", [None, "gpu", "GPU", "STORAGE", "cpu"])
def test_a_medium_that_dynamo_does_not_know_counts_as_device(medium):
    index = PrefixIndex()
    store(index, "r0", [1], medium=medium)
    assert depth(index, [1]) == 1


# -- reference figures ------------------------------------------------------------------------------------------


def random_blocks(rng, blocks, extra=0):
    return rng.integers(0, 50_000, size=blocks * BLOCK + extra)


def changed(tokens, at):
    tokens = tokens.copy()
    tokens[at] = (tokens[at] + 1) % 50_000
    return tokens


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda tokens: changed(tokens, 4 * BLOCK - 1), 3),  # the last token of block 3
        (lambda tokens: changed(tokens, 4 * BLOCK), 4),  # one token later
        (lambda tokens: changed(tokens, 9 * BLOCK + 3), 9),  # in the partial block
        (lambda tokens: np.concatenate([[7], tokens]), 0),  # a timestamp in front
        (lambda tokens: tokens[: BLOCK - 1], 0),  # shorter than one block
    ],
)
def test_the_boundary_is_the_block(make, blocks):
    tokens = random_blocks(np.random.default_rng(20260826), 9, extra=9)
    index = PrefixIndex()
    store(index, "r0", local_block_hashes(tokens, BLOCK).tolist())
    assert depth(index, local_block_hashes(make(tokens), BLOCK)) == blocks


class LruEngine:
    """Sixty blocks, least recently used first out."""

    def __init__(self, capacity=60):
        self.capacity = capacity
        self.slots = OrderedDict()

    def admit(self, names):
        evicted = []
        for name in names:
            if name in self.slots:
                self.slots.move_to_end(name)
                continue
            if len(self.slots) >= self.capacity:
                evicted.append(self.slots.popitem(last=False)[0])
            self.slots[name] = True
        return evicted

    def hits(self, names):
        found = 0
        while found < len(names) and names[found] in self.slots:
            found += 1
        return found


def drift(tell_removals):
    rng = np.random.default_rng(20260826)
    system = random_blocks(rng, 4)
    rng = np.random.default_rng(3)
    prompts = [np.concatenate([system, random_blocks(rng, 4)]) for _ in range(40)]
    engine, index = LruEngine(), PrefixIndex(count_copies=False)
    believed = served = total = 0
    for tokens in prompts + prompts:
        keys = PrefixKeys(local_block_hashes(tokens, BLOCK))
        names = [keys.at(depth) for depth in range(1, len(keys) + 1)]
        believed += index.match(keys).get("r0", 0)
        served += engine.hits(names)
        total += len(names)
        evicted = engine.admit(names)
        contents = tuple(local_block_hashes(tokens, BLOCK).tolist())
        index.stored("r0", Stored(tuple(names), None, contents, BLOCK))
        if tell_removals:
            index.removed("r0", evicted)
    return believed, served, total


def test_an_index_that_never_hears_of_evictions_believes_476_blocks_where_316_are_served():
    assert drift(tell_removals=False) == (476, 316, 640)


def test_with_removals_belief_equals_what_is_served():
    assert drift(tell_removals=True) == (316, 316, 640)


def test_rows_of_blocks_that_are_gone_serve_again():
    """An engine that evicts as much as it stores makes the index no larger."""
    index = PrefixIndex()
    for number in range(300):
        store(index, "r0", [1000 * number + n for n in range(20)], base=20 * number)
        if number >= 10:
            index.removed("r0", range(20 * (number - 10), 20 * (number - 9)))
    assert len(index) == index.resident_blocks("r0") == 200
    assert len(index._blocks.keys) < 300
    assert depth(index, [1000 * 299 + n for n in range(20)]) == 20
    assert depth(index, list(range(20))) == 0


def test_siblings_come_and_go_in_any_order():
    index = PrefixIndex()
    store(index, "r0", [1], base=0)
    for number in range(6):
        store(index, "r0", [10 + number], parent=0, base=100 + number)
    for number in (3, 0, 5, 1):
        index.removed("r0", [100 + number])
    assert [depth(index, [1, 10 + number]) for number in range(6)] == [1, 1, 2, 1, 2, 1]
    index.removed("r0", [0])
    assert [depth(index, [1, 10 + number]) for number in range(6)] == [0] * 6
    store(index, "r0", [1], base=0)
    assert [depth(index, [1, 10 + number]) for number in range(6)] == [1, 1, 2, 1, 2, 1]


def test_more_replicas_than_a_word_has_bits():
    index = PrefixIndex()
    for number in range(130):
        store(index, f"r{number}", list(range(number + 1)))
    found = index.match(PrefixKeys(range(200)))
    assert found == {f"r{number}": number + 1 for number in range(130)}
    index.forget("r70")
    assert "r70" not in index.match(PrefixKeys(range(200)))
