"""Active sequences against a slow count with sets, and the observed figures."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from routers import ActiveSequences, PrefixKeys

CHAIN = st.lists(st.integers(0, 2), min_size=0, max_size=20).map(tuple)
ACTION = st.one_of(
    st.tuples(st.just("book"), st.sampled_from(["r0", "r1", "r2"]), CHAIN, st.integers(0, 50)),
    st.tuples(st.just("first"), st.integers(0, 30)),
    st.tuples(st.just("free"), st.integers(0, 30)),
)


def blocks_by_hand(active, replica):
    return len({chain[:n] for held, chain, _ in active.values() if held == replica for n in range(1, len(chain) + 1)})


@settings(deadline=None, max_examples=150)
@given(st.lists(ACTION, max_size=40), CHAIN)
def test_blocks_prefill_and_sharing_equal_counting_sets(actions, probe):
    sequences, active, booked = ActiveSequences(16), {}, []
    for action in actions:
        if action[0] == "book":
            name = f"q{len(booked)}"
            booked.append(name)
            active[name] = [action[1], action[2], action[3]]
            keys = PrefixKeys(action[2])
            sequences.book(name, action[1], keys, prompt_tokens=16 * len(keys), prefill_tokens=action[3])
        elif action[1] < len(booked):
            name = booked[action[1]]
            if action[0] == "first":
                sequences.prefill_done(name)
                if name in active:
                    active[name][2] = 0
            else:
                sequences.free(name)
                active.pop(name, None)
        shared = sequences.shared_blocks(PrefixKeys(probe))
        prefill = Counter()
        for held, _, tokens in active.values():
            prefill[held] += tokens
        for replica in ("r0", "r1", "r2"):
            assert sequences.active_blocks(replica) == blocks_by_hand(active, replica)
            assert sequences.prefill_tokens(replica) == prefill[replica]
            assert sequences.requests(replica) == sum(held == replica for held, _, _ in active.values())
            prefixes = {
                chain[:n] for held, chain, _ in active.values() if held == replica for n in range(1, len(chain) + 1)
            }
            assert shared.get(replica, 0) == sum(probe[:n] in prefixes for n in range(1, len(probe) + 1))
    for name in booked:
        sequences.free(name)
    assert len(sequences) == 0
    assert not sequences._root.children  # the tree is empty again


def book(sequences, name, contents, **more):
    keys = PrefixKeys(contents)
    given = {"prompt_tokens": 16 * len(keys), "prefill_tokens": 16 * len(keys), **more}
    sequences.book(name, "r0", keys, **given)


def test_a_shared_prefix_counts_once_and_until_its_last_request_ends():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2, 3])
    book(sequences, "b", [1, 2, 4])
    assert sequences.active_blocks("r0") == 4
    sequences.free("a")
    assert sequences.active_blocks("r0") == 3
    sequences.free("b")
    assert sequences.active_blocks("r0") == 0


def test_without_assumed_reuse_equal_prompts_do_not_merge():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2, 3], share=False)
    book(sequences, "b", [1, 2, 3], share=False)
    assert sequences.active_blocks("r0") == 6
    assert sequences.shared_blocks(PrefixKeys([1, 2, 3])) == {}
    sequences.free("a")
    assert sequences.active_blocks("r0") == 3


def test_output_adds_a_block_whenever_the_last_one_is_full():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1], prompt_tokens=20)
    seen = []
    for output in (1, 12, 13, 28, 29):
        sequences.output("a", output)
        seen.append(sequences.active_blocks("r0"))
    assert seen == [1, 1, 2, 2, 3]


def test_half_way_to_the_expected_length_ten_prompt_and_two_output_blocks_weigh_six():
    sequences = ActiveSequences(16)
    book(sequences, "a", range(10), expected_output=64)
    sequences.output("a", 16)
    sequences.output("a", 32)
    assert sequences.active_blocks("r0") == 6
    sequences.free("a")
    assert sequences.active_blocks("r0") == 0


def test_only_what_a_request_holds_alone_fades():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2, 3, 4], expected_output=32)
    book(sequences, "b", [1, 2, 9, 9])
    sequences.output("a", 16)  # one output block, weight one half, and a's own two prompt blocks
    assert sequences.active_blocks("r0") == 2 + 2 + round(0.5 * 2 + 0.5)


def test_an_output_beyond_the_expected_length_weighs_nothing():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2], expected_output=16)
    sequences.output("a", 64)
    assert sequences.active_blocks("r0") == 0


def test_prefill_is_owed_until_the_first_token_and_never_negative():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2], prefill_tokens=20)
    book(sequences, "b", [1, 2], prefill_tokens=-5)
    assert sequences.prefill_tokens("r0") == 20
    sequences.prefill_done("a")
    sequences.prefill_done("a")
    assert sequences.prefill_tokens("r0") == 0


def test_a_booking_that_nobody_ends_is_forgotten_after_an_hour():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2], now_us=0)
    book(sequences, "b", [3], now_us=3_599_000_000)
    assert sequences.active_blocks("r0") == 3
    book(sequences, "c", [4], now_us=3_700_000_000)
    assert sequences.active_blocks("r0") == 2
    assert sequences.expired == 1
    sequences.free("a")  # its real end is no news then
    assert sequences.requests("r0") == 2


def test_forgetting_a_replica_frees_its_bookings():
    sequences = ActiveSequences(16)
    book(sequences, "a", [1, 2])
    sequences.forget("r0")
    assert len(sequences) == 0
    assert sequences.active_blocks("r0") == 0
