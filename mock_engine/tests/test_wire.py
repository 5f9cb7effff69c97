"""Event batches are vLLM 0.33.0's, byte for byte."""

import msgspec
import pytest

from mock_engine import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    EngineError,
    RunSequence,
    TokenSequence,
    encode_batch,
)
from mock_engine.wire import external_hash

BATCH = (
    "93cb41d954fc4020000093de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1a1eb4e3edd9361acfd41bc1"
    "f76b956ddeb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f"
    "72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a27331c0a967726f75705f69647800b26b"
    "765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a47365737384a474797065ac426c6f"
    "636b52656d6f766564ac626c6f636b5f68617368657391cf1a1eb4e3edd9361aa66d656469756da3475055a967726f75705f6964780081a47479"
    "7065b0416c6c426c6f636b73436c656172656400"
)
FIRST, SECOND = 1882140585328457242, 15284023028817948126

STORED = BlockStored(
    block_hashes=(FIRST, SECOND),
    parent_block_hash=None,
    token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
    block_size=4,
    extra_keys=(("s1",), None),
    session_id="sess",
)


def test_a_batch_has_vllms_bytes() -> None:
    payload = encode_batch(1700000000.5, [STORED, BlockRemoved((FIRST,)), AllBlocksCleared()], 0)
    assert len(payload) == 310
    assert payload.hex() == BATCH


def test_a_lone_clear_has_vllms_bytes() -> None:
    expected = "93cb41d954fc402000009181a474797065b0416c6c426c6f636b73436c656172656400"
    assert encode_batch(1700000000.5, [AllBlocksCleared()]).hex() == expected


def test_an_integer_hash_is_the_digests_last_eight_bytes() -> None:
    digest = bytes(range(32))
    assert external_hash(digest) == 0x18191A1B1C1D1E1F
    sequence = TokenSequence(range(8), hasher=BlockHasher(), output=0, block_size=4)
    _, (event,), _ = msgspec.msgpack.decode(encode_batch(0, [sequence.stored(1, 2, None)]))
    assert event["block_hashes"] == [external_hash(sequence.block_keys(2)[1])]
    assert event["parent_block_hash"] == external_hash(sequence.block_keys(2)[0])


def test_whole_digests_travel_as_bin() -> None:
    sequence = TokenSequence(range(8), hasher=BlockHasher(), output=0, block_size=4)
    payload = encode_batch(
        0, [sequence.stored(0, 2, None), BlockRemoved((sequence.block_keys(1)[0],))], int_hashes=False
    )
    assert payload.count(b"\xc4\x20" + sequence.block_keys(1)[0]) == 2
    assert payload.count(b"\xc4\x20" + sequence.block_keys(2)[1]) == 1


def test_plain_blocks_always_carry_extra_keys_and_the_spec_kind() -> None:
    sequence = TokenSequence(range(8), hasher=BlockHasher(), output=0, block_size=4)
    _, (event,), rank = msgspec.msgpack.decode(encode_batch(0, [sequence.stored(0, 2, None)], 3))
    assert list(event) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind",
    ]  # fmt: skip
    assert event["extra_keys"] == [None, None]
    assert event["token_ids"] == list(range(8))
    assert rank == 3


def test_the_legacy_form_is_arrays_led_by_their_names() -> None:
    payload = encode_batch(1.5, [STORED, BlockRemoved((FIRST,)), AllBlocksCleared()], 1, form="arrays")
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [FIRST, SECOND], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None],
            ["BlockRemoved", [FIRST], "GPU"],
            ["AllBlocksCleared"],
        ],
        1,
    ]


def test_a_symbolic_event_never_meets_a_wire() -> None:
    event = RunSequence(((1, 32),), 2).stored(0, 2, None)
    with pytest.raises(EngineError, match="submit a TokenSequence"):
        encode_batch(0, [event])


def test_an_unknown_form_is_refused_with_the_choices() -> None:
    with pytest.raises(EngineError, match="maps, arrays"):
        encode_batch(0, [], form="json")
