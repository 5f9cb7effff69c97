"""Flat maps from names to blocks against dicts, through growth, removal and names that collide."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers.slots import KeySlots, NamedSlots

CLOSE = st.integers(0, 40)
APART = st.integers(0, 2**64 - 1)
ALIKE = st.integers(0, 60).map(lambda n: n << 40)  # equal in their low bits
NAME = st.one_of(CLOSE, APART, ALIKE)
HISTORY = st.lists(st.tuples(st.booleans(), NAME), max_size=150)


@settings(deadline=None)
@given(HISTORY)
def test_named_slots_are_a_dict_in_which_the_first_block_keeps_its_name(history):
    slots, truth = NamedSlots(), {}
    for block, (comes, name) in enumerate(history, 1):
        if comes:
            assert slots.put(name, block) == truth.get(name, 0)
            truth.setdefault(name, block)
        else:
            assert slots.pop(name) == truth.pop(name, 0)
        assert len(slots) == len(truth)
    for _, name in history:
        assert slots.get(name) == truth.get(name, 0)
    assert sorted(slots.blocks().tolist()) == sorted(truth.values())


@settings(deadline=None)
@given(HISTORY)
def test_key_slots_find_each_block_by_its_key(history):
    keys, truth = array("Q", [0]), {}
    slots = KeySlots(keys)
    for comes, key in history:
        block = truth.get(key, 0)
        assert slots.get(key) == block
        if comes and not block:
            keys.append(key)
            truth[key] = len(keys) - 1
            slots.add(truth[key])
        elif block and not comes:
            slots.drop(block)
            del truth[key]
    for key in {key for _, key in history}:
        assert slots.get(key) == truth.get(key, 0)
    assert sorted(slots.blocks().tolist()) == sorted(truth.values())


@pytest.mark.parametrize("step", [1, 1 << 20, 1 << 40, 0x9E3779B97F4A7C15])
def test_growth_loses_no_name_whatever_the_pattern_of_names(step):
    slots = NamedSlots()
    names = [step * n % 2**64 for n in range(5000)]
    for block, name in enumerate(names, 1):
        assert slots.put(name, block) == 0
    assert [slots.get(name) for name in names] == list(range(1, 5001))
    for name in names[::2]:
        slots.pop(name)
    assert [slots.get(name) for name in names] == [0 if n % 2 == 0 else n + 1 for n in range(5000)]


def test_one_block_may_have_several_names():
    slots = NamedSlots()
    for name in range(100):
        slots.put(name, 7)
    assert {slots.get(name) for name in range(100)} == {7}
    assert len(slots.blocks()) == 100
