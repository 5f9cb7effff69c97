"""`vllm-kv-aware` against the rules read from vllm-router 0.1.17."""

import random
from collections import Counter

import pytest

from routers import (
    HashedPrompt,
    OptionError,
    Removed,
    Router,
    Signal,
    Stored,
    TokenPrompt,
    TurnView,
    make_policy,
)
from routers.policies.vllm import credit_tokens, vllm_tier

TEN = list(range(100, 110))


def turn(name, contents, tokens=None):
    tokens = 16 * len(contents) if tokens is None else tokens
    return TurnView(request_id=name, prompt=HashedPrompt(tokens, contents, 16))


def router(count=2, seed=1, **options):
    return Router(make_policy("vllm-kv-aware", options, random.Random(seed)), [f"r{i}" for i in range(count)])


def store(one, replica, contents, parent=None, medium="GPU"):
    one.kv_events(replica, [Stored(tuple(contents), parent, tuple(contents), 16, medium)], 0)


@pytest.mark.parametrize(
    ("device", "lower", "weight", "tokens", "expected"),
    [
        (6, 0, 0.8, 160, 96),
        (10, 0, 0.8, 160, 144),  # the block that holds the last token is computed
        (10, 0, 0.8, 161, 160),
        (3, 5, 0.8, 160, 16 * (3 + 4.0)),
        (9, 10, 0.8, 160, 159),  # never the last token
    ],
)
def test_the_credit_is_bounded_by_the_last_token(device, lower, weight, tokens, expected):
    assert credit_tokens(device, lower, weight, tokens, 16) == pytest.approx(expected)


def test_the_cost_is_work_times_company():
    one = router()
    store(one, "r0", TEN[:6])
    first = one.route(turn("a", TEN), 0)
    assert first.scores == {"r0": 64.0, "r1": 160.0}
    second = one.route(turn("b", TEN), 1)
    assert second.scores == {"r0": (64 + 64) * 2.0, "r1": 160.0}  # what is owed and who is there both count
    assert second.replica == "r1"
    one.first_token("a", 2)
    assert one.route(turn("c", TEN), 3).scores == {"r0": 128.0, "r1": (160 + 160) * 2.0}


def test_a_lower_tier_counts_by_its_weight_from_the_end_of_the_device_blocks():
    one = router(1)
    store(one, "r0", TEN[:2])
    store(one, "r0", TEN[2:5], TEN[1], "CPU")
    assert one.route(turn("a", TEN), 0).scores == {"r0": 90.0}  # 160 - 16 * (2 + 3 * 0.8), rounded up
    store(one, "r0", [7002, 7003, 7004, 7005], TEN[1], "STORAGE")  # other content: no part of this prompt
    one.failed("a", 0)
    one.kv_events("r0", [Stored((1, 2, 3, 4), TEN[1], tuple(TEN[2:6]), 16, "STORAGE")], 0)
    assert one.route(turn("b", TEN), 0).scores == {"r0": 109.0}  # four on disk are the longer segment, at 0.3


def test_storage_is_the_disk_here():
    assert [vllm_tier(medium) for medium in (None, "GPU", "CPU", "STORAGE")] == ["device", "device", "host", "disk"]


def test_a_tie_always_goes_to_the_same_first_replica():
    placed = set()
    one = router(4)
    for number in range(12):
        placed.add(one.route(turn(f"q{number}", TEN), number).replica)
        one.finished(f"q{number}", 1, number)
    assert len(placed) == 1
    firsts = {router(4, seed).route(turn("q", TEN), 0).replica for seed in range(30)}
    assert firsts == {"r0", "r1", "r2", "r3"}


def test_without_tokens_owed_prefill_ranks_and_then_company():
    one = router(3)
    busy = one.route(turn("a", TEN), 0).replica
    second = one.route(TurnView(request_id="b"), 1)
    assert second.rule == "free"
    assert second.replica != busy
    third = one.route(TurnView(request_id="c"), 2).replica
    assert {busy, second.replica, third} == {"r0", "r1", "r2"}
    assert second.believed_hit_tokens is None


def test_a_temperature_draws_by_cost_difference():
    one = router(2, temperature=50.0)
    store(one, "r0", TEN[:6])
    seen = Counter(one.policy.choose(turn("q", TEN), one.fleet(0)).replica for _ in range(1000))
    assert 820 < seen["r0"] < 920  # 1 / (1 + exp(-96 / 50)) = 0.872


def test_a_removal_and_a_replica_that_leaves_are_forgotten():
    one = router()
    store(one, "r0", TEN)
    one.kv_events("r0", [Removed((TEN[3],))], 0)
    assert one.route(turn("a", TEN), 0).believed_hit_tokens == 48
    one.remove_replica("r0", 1)
    one.finished("a", 1, 2)
    one.add_replica("r0", 3)
    assert one.route(turn("b", TEN), 4).scores == {"r1": 160.0, "r0": 160.0}


def salted(name, salt):
    return TurnView(request_id=name, prompt=TokenPrompt(list(range(160)), cache_salt=salt))


def test_a_salted_prompt_gets_no_credit_wherever_its_blocks_are():
    one = router()
    contents = tuple(int(value) for value in salted("", "s").prompt.block_hashes(16))
    one.kv_events("r0", [Stored(contents, None, contents, 16)], 0)
    assert one.route(salted("a", "s"), 0).scores == {"r0": 160.0, "r1": 160.0}


@pytest.mark.parametrize(
    ("extra_keys", "lora", "kept"),
    [
        ((("salt",), None), None, 0),
        ((("ad",), ("ad",)), "ad", 10),
        ((("ad", "salt"), ("ad",)), "ad", 0),
        (None, None, 10),
    ],
)
def test_a_batch_with_salts_or_images_is_rejected_and_its_source_wiped(extra_keys, lora, kept):
    one = router()
    store(one, "r0", TEN[:8])
    one.kv_events("r0", [Stored((8, 9), TEN[7], tuple(TEN[8:]), 16, "GPU", lora, extra_keys)], 1)
    believed = {decision.believed_hit_tokens for decision in [one.policy.choose(turn("q", TEN, 170), one.fleet(2))]}
    assert believed == {16 * kept}


def asks(name, session=None, **headers):
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return TurnView(request_id=name, prompt=HashedPrompt(160, TEN, 16), session_id=session, headers=named)


def test_without_a_time_to_live_sessions_are_not_looked_at():
    assert Signal.SESSION_ID not in router().needs
    assert Signal.SESSION_ID in router(affinity_ttl_s=10.0).needs


def test_a_bound_session_stays_whatever_the_load_and_owes_no_prefill():
    one = router(affinity_ttl_s=10.0)
    home = one.route(asks("a", "s"), 0).replica
    one.first_token("a", 1)
    for number in range(5):
        bound = one.route(asks(f"b{number}", "s"), 2)
        assert (bound.replica, bound.rule) == (home, "bound")
    assert one.policy.owed(home) == (0, 0)


@pytest.mark.parametrize(("idle_us", "rule"), [(10_000_000, "bound"), (10_000_001, "cost")])
def test_a_binding_ends_when_the_session_was_idle_for_its_time(idle_us, rule):
    one = router(affinity_ttl_s=10.0)
    home = one.route(asks("a", "s"), 0).replica
    store(one, {"r0": "r1", "r1": "r0"}[home], TEN)
    assert one.route(asks("b", "s"), idle_us).rule == rule


def test_the_session_is_the_first_of_the_headers_that_name_one():
    one = router(affinity_ttl_s=10.0)
    home = one.route(asks("a", x_claude_code_session_id="one", x_session_id="two"), 0).replica
    assert one.route(asks("b", x_session_id="one"), 1).replica == home
    assert one.route(asks("c", "two", x_claude_code_session_id="one"), 2).rule == "bound"


def test_a_retry_elsewhere_moves_no_session():
    one = router(affinity_ttl_s=10.0)
    home = one.route(asks("a", "s"), 0).replica
    one.failed("a", 1)
    assert one.route(asks("a", "s"), 2, exclude=[home]).replica != home
    assert one.route(asks("b", "s"), 3).replica == home


def test_the_longest_idle_sessions_are_forgotten_beyond_the_capacity():
    one = router(affinity_ttl_s=10.0, affinity_capacity=2)
    for number in range(3):
        one.route(asks(f"q{number}", f"s{number}"), number)
    assert [one.policy.choose(asks("x", f"s{number}"), one.fleet(9)).rule == "bound" for number in range(3)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("ttl_s", [0.5, 40_000_000.0])
def test_a_time_to_live_out_of_the_routers_range_is_an_error(ttl_s):
    with pytest.raises(OptionError, match="31536000"):
        router(affinity_ttl_s=ttl_s)
