"""Block hashes are vLLM's, digest for digest (vectors recorded from vLLM 0.33.0)."""

from random import Random

import pytest

from mock_engine import BlockHasher, ConfigError, Lora
from mock_engine.hashing import BlockKeys

IDS = list(range(1, 9))
WIDE = [0, 255, 256, 65535, 65536, 128000, 151643, 2147483647]
ADAPTER = Lora("ad1", "/adapters/ad1")


@pytest.mark.parametrize(
    ("algorithm", "seed", "digest"),
    [
        ("sha256", None, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"),
        ("sha256", "0", "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c"),
        ("sha256_cbor", None, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"),
        ("sha256_cbor", "0", "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"),
        ("xxhash", "0", "6fb31cc38bba6066183f7f2104b9c051"),
        ("xxhash_cbor", "0", "1ebe36576dcb573f26b99533a20aaeca"),
    ],
)
def test_chains_start_at_vllms_none_hash(algorithm: str, seed: str | None, digest: str) -> None:
    assert BlockHasher(algorithm, seed=seed).none_hash.hex() == digest


VECTORS = [
    ("sha256", None, IDS, 4, None, None, (
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a",
        "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde")),
    ("sha256", None, list(range(1, 17)), 16, None, None, (
        "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",)),
    ("sha256", None, IDS, 4, None, "s1", (
        "212c5a48b6305994093ea27595471850f18a87464e7fd5d5757baaa7745b5639",
        "45d34e640da9e8a7b91cf6f92cf7a2956f8f07658021756b56e2c4dd76ebecc4")),
    ("sha256", None, IDS, 4, ADAPTER, None, (
        "ac3afeb0f9314f84ff90d845cf276cf2c897a9ff38a414032c5cfbf75f8f1641",
        "d7a7ca3349a463d10ddcb21904e6ab1c287f545e4bd53eb093455974aa4033ee")),
    ("sha256", None, IDS, 4, ADAPTER, "s1", (
        "97160bcfe17b93ba1b6694f5f30e44441d0411caae1796dc23045eec62c48479",
        "8cb7f2397753850344a76b5d7fa9fbd030359a285a88b98cba6bd420cc869f15")),
    ("sha256", None, WIDE, 4, None, None, (
        "a460e553ebf9a4709aec4c9f4b483550241baed2a0bb0b60e35dc02dbfa7abbe",
        "1768163c2e31293a04bb4ea048767e0afa19dcc0740b4228d33507d261394fd5")),
    ("sha256", "0", IDS, 4, None, None, (
        "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
        "9e62b5a7ec298f33cb4c7d9e00b659874bb2432d23ad6879ad1746592a2b036b")),
    ("sha256_cbor", None, IDS, 4, None, None, (
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
        "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1")),
    ("sha256_cbor", None, IDS, 4, ADAPTER, "s1", (
        "323566d93bc798d933dc51138f84ee08a85ec7486cb22aa1d76a9f5e25a49dd8",
        "614043c489b9cb045523d615bcedbf46a806d6e7c3d518e437e426ba180026de")),
    ("xxhash", "0", IDS, 4, None, None, (
        "f3856cedd7e636094750c4546e855397",
        "0c9832567b17003b126077f57e0bb670")),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "seed", "ids", "size", "lora", "salt", "digests"), VECTORS)
def test_a_block_hash_is_vllms(algorithm, seed, ids, size, lora, salt, digests) -> None:
    hasher = BlockHasher(algorithm, seed=seed)
    assert tuple(digest.hex() for digest in hasher.chain(None, ids, size, BlockKeys(lora, salt))) == digests


def test_a_chain_may_be_hashed_in_pieces() -> None:
    hasher, keys = BlockHasher(), BlockKeys(ADAPTER, "s1")
    whole = hasher.chain(None, WIDE, 2, keys)
    first = hasher.chain(None, WIDE[:4], 2, keys)
    assert first + hasher.chain(first[-1], WIDE[4:], 2, keys) == whole


def test_a_partial_block_has_no_hash() -> None:
    assert len(BlockHasher().chain(None, IDS, 3, BlockKeys())) == 2
    assert BlockHasher().chain(None, IDS, 9, BlockKeys()) == []


def test_equal_strings_in_the_extra_keys_do_not_fold_into_one() -> None:
    """Pickle would write the second occurrence of one object as a back-reference, and the digest would depend on it."""
    name = "adapter-7"
    alike = BlockHasher().chain(None, IDS, 4, BlockKeys(Lora(name, name), name))
    apart = BlockHasher().chain(None, IDS, 4, BlockKeys(Lora(name, "adapter" + "-7"), "-".join(("adapter", "7"))))
    assert alike == apart


def test_xxhash_without_a_seed_differs_from_process_to_process() -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        BlockHasher("xxhash")
    assert BlockHasher("xxhash", rng=Random(1)).none_hash != BlockHasher("xxhash", rng=Random(2)).none_hash


def test_events_show_the_name_and_the_salt_but_not_the_path() -> None:
    keys = BlockKeys(ADAPTER, "s9")
    assert (keys.event_first, keys.event_later) == (("ad1", "s9"), ("ad1",))
    keys = BlockKeys(None, "s1")
    assert (keys.event_first, keys.event_later) == (("s1",), None)
    assert BlockKeys().event_first is None


def test_an_unknown_algorithm_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="sha256, sha256_cbor, xxhash, xxhash_cbor"):
        BlockHasher("md5")
