"""Hashes of routers in the field, against published vectors."""

import pytest

from routers.murmur import murmur3_low64, vllm_hash


@pytest.mark.parametrize(("key", "expected"), [("a", 0x29D1AB12EC5FEA11), ("request:", 0x13B2F1AE12A8B5AB)])
def test_vllm_routers_hash_is_the_one_observed(key, expected):
    assert vllm_hash(key) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0),
        (b"hello", 0xCBD8A7B341BD9B02),
        (b"The quick brown fox jumps over the lazy dog", 0xE34BBC7BBC071B6C),
    ],
)
def test_murmur3_gives_the_published_low_half(text, expected):
    assert murmur3_low64(text, 0) == expected
