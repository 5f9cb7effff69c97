"""vLLM's event batches: the recorded bytes, both event forms, and everything that is not one."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import Cleared, Removed, Stored, TokenPrompt, WireError, local_block_hashes
from routers.wire import Batch, Skipped, WireCleared, WireRemoved, WireStored, decode_batch, decode_sequence, to_events

# ts 1700000000.5; tokens 1..8 in blocks of 4 under salt s1, session `sess`; one removal; cleared; rank 0.
RECORDED = bytes.fromhex(
    "93cb41d954fc4020000093de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1a1eb4e3edd9361acf"
    "d41bc1f76b956ddeb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f7369"
    "7a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a27331c0a967726f"
    "75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a47365"
    "737384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf1a1eb4e3edd9361aa66d656469756da3475055"
    "a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
FIRST, SECOND = 1882140585328457242, 15284023028817948126


def packed(*events, rank=0):
    return msgspec.msgpack.encode([1.5, list(events), rank])


def a_store(**changes):
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**event, **changes}


def test_the_recorded_batch_reads_as_what_was_sent():
    batch = decode_batch(RECORDED)
    assert batch.ts == 1700000000.5
    assert batch.dp_rank == 0
    stored, removed, cleared = batch.events
    assert stored == WireStored(
        block_hashes=(FIRST, SECOND),
        parent_block_hash=None,
        token_ids=tuple(range(1, 9)),
        block_size=4,
        medium="GPU",
        extra_keys=(("s1",), None),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="sess",
    )
    assert removed == WireRemoved(block_hashes=(FIRST,), medium="GPU", group_idx=0)
    assert cleared == WireCleared()


def test_a_batch_becomes_events_with_content_hashes():
    skipped = Skipped()
    content = tuple(local_block_hashes(range(1, 9), 4).tolist())
    assert to_events(decode_batch(RECORDED), 4, skipped, ignore_extra_keys=True) == (
        Stored((FIRST, SECOND), None, content, 4, "GPU", None, (("s1",), None)),
        Removed((FIRST,), "GPU"),
        Cleared(),
    )
    assert skipped == Skipped()


def test_a_salt_is_part_of_the_first_blocks_content():
    stored, *_ = to_events(decode_batch(RECORDED), 4, Skipped())
    assert stored.content == tuple(TokenPrompt(range(1, 9), cache_salt="s1").block_hashes(4).tolist())
    plain = local_block_hashes(range(1, 9), 4).tolist()
    assert stored.content[0] != plain[0]
    assert stored.content[1] == plain[1]


def test_an_adapters_name_among_the_extra_keys_is_not_counted_twice():
    batch = decode_batch(packed(a_store(lora_name="ad1", lora_id=1, extra_keys=[["ad1", "s9"], ["ad1"]])))
    (stored,) = to_events(batch, 4, Skipped())
    assert stored.content == tuple(TokenPrompt(range(8), None, "ad1", "s9").block_hashes(4).tolist())
    (bare,) = to_events(decode_batch(packed(a_store(lora_name="ad1", extra_keys=[["ad1"], ["ad1"]]))), 4, Skipped())
    assert bare.content == tuple(TokenPrompt(range(8), None, "ad1").block_hashes(4).tolist())


def test_extra_keys_that_are_fewer_than_blocks_leave_the_rest_plain():
    (stored,) = to_events(decode_batch(packed(a_store(extra_keys=[["s1"]]))), 4, Skipped())
    assert stored.content == tuple(TokenPrompt(range(8), cache_salt="s1").block_hashes(4).tolist())


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9, 10])
def test_the_array_form_of_any_version_means_the_same(length):
    fields = [[11, 12], None, list(range(8)), 4, None, "GPU", None, None, 0, "full_attention"][:length]
    batch = decode_batch(packed(["BlockStored", *fields], ["BlockRemoved", [11]], ["AllBlocksCleared"]))
    found = to_events(batch, 4, Skipped())
    content = tuple(local_block_hashes(range(8), 4).tolist())
    assert found == (
        Stored((11, 12), None, content, 4, "GPU" if length > 5 else None),
        Removed((11,), None),
        Cleared(),
    )


def test_digest_bytes_and_their_integer_form_name_the_same_block():
    digest = bytes(range(24)) + FIRST.to_bytes(8, "big")
    batch = decode_batch(packed(a_store(block_hashes=[digest, SECOND - 2**64], parent_block_hash=digest)))
    assert batch.events[0].block_hashes == (FIRST, SECOND)
    assert batch.events[0].parent_block_hash == FIRST


def test_unknown_fields_and_a_missing_rank_are_no_matter():
    batch = decode_batch(msgspec.msgpack.encode([3, [a_store(ownership="x", lookahead_token_ids=[1])]]))
    assert batch.dp_rank is None
    assert len(batch.events) == 1


def test_an_adapter_seeds_the_content():
    (event,) = to_events(decode_batch(packed(a_store(lora_name="ad1"))), 4, Skipped())
    assert event.content == tuple(local_block_hashes(range(8), 4, "ad1").tolist())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 8, "block_hashes": [1]}, "block_size"),
        ({"kv_cache_spec_kind": "sliding_window"}, "kind"),
        ({"kv_cache_spec_kind": "mamba"}, "kind"),
        ({"locality": "REMOTE"}, "remote"),
    ],
)
def test_what_an_index_cannot_use_is_left_out_and_counted(changes, reason):
    skipped = Skipped()
    assert to_events(decode_batch(packed(a_store(**changes))), 4, skipped) == ()
    assert getattr(skipped, reason) == 1


def test_short_tokens_give_the_complete_blocks():
    skipped = Skipped()
    (event,) = to_events(decode_batch(packed(a_store(token_ids=list(range(6))))), 4, skipped)
    assert event.hashes == (11,)
    assert skipped.short == 1


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (msgspec.msgpack.encode({"ts": 1}), "must be an array"),
        (msgspec.msgpack.encode([1.0]), "must be an array"),
        (msgspec.msgpack.encode([1.0, [], 0, 0]), "must be an array"),
        (msgspec.msgpack.encode(["now", [], 0]), "time must be a number"),
        (msgspec.msgpack.encode([1.0, {}, 0]), "events must be an array"),
        (msgspec.msgpack.encode([1.0, [], "0"]), "dp_rank"),
        (packed("BlockStored"), "an event must be a map"),
        (packed([]), "an event must be a map"),
        (packed({"type": "BlockTouched"}), "no event is called 'BlockTouched'"),
        (packed({"block_hashes": [1]}), "no event is called None"),
        (packed(a_store(block_hashes=7)), "block_hashes must be an array"),
        (packed(a_store(block_hashes=["x"])), "a block hash must be"),
        (packed(a_store(block_hashes=[b""])), "a block hash must be"),
        (packed(a_store(token_ids=None)), "token_ids must be an array"),
        (packed(a_store(token_ids=[-1] * 8)), "a token id must be"),
        (packed(a_store(token_ids=["a"] * 8)), "a token id must be"),
        (packed(a_store(block_size=0)), "positive whole number"),
        (packed(a_store(block_size=None)), "positive whole number"),
        (packed(a_store(medium=3)), "medium must be text"),
        (packed(a_store(extra_keys="s")), "extra_keys"),
        (packed({"type": "BlockRemoved"}), "BlockRemoved: block_hashes"),
        (packed(["BlockStored"]), "BlockStored: block_hashes"),
    ],
)
def test_what_is_no_batch_is_refused_whole_with_its_reason(payload, message):
    with pytest.raises(WireError, match=message):
        decode_batch(payload)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "token_ids"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["type", "block_hashes", "token_ids", "block_size"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(VALUES | st.tuples(st.floats(0, 9), st.lists(VALUES, max_size=3), st.none()))
def test_any_msgpack_is_a_batch_or_a_wire_error(value):
    try:
        batch = decode_batch(msgspec.msgpack.encode(value))
    except WireError:
        return
    assert isinstance(batch, Batch)
    to_events(batch, 4, Skipped())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60), st.integers(0, len(RECORDED)))
def test_any_bytes_are_a_batch_or_a_wire_error(noise, cut):
    for payload in (noise, RECORDED[:cut] + noise):
        with contextlib.suppress(WireError):
            assert isinstance(decode_batch(payload), Batch)


def test_a_sequence_frame_has_eight_bytes():
    assert decode_sequence((7).to_bytes(8, "big")) == 7
    with pytest.raises(WireError, match="sequence frame of 4 bytes"):
        decode_sequence(b"\0\0\0\7")
