"""Prefixes as engines report them: names, filters, and what a policy makes of an old report."""

import base64
import random

import msgspec
import pytest
import xxhash
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from routers import (
    Bloom,
    HashedPrompt,
    PrefixKeys,
    ReportedPrefixes,
    Router,
    Signal,
    TokenPrompt,
    TurnView,
    WireError,
    bloom_positions,
    make_policy,
    prefix_token_hashes,
)
from routers.prefix_poll import parse_prefix_state

IDS = list(range(1000, 1400))  # 25 blocks of 16


def turn(name="q", ids=IDS):
    return TurnView(request_id=name, prompt=TokenPrompt(ids))


def router(count=2, **options):
    policy = make_policy("reported-prefixes", {"min_prefix_tokens": 0, **options}, random.Random(1))
    return Router(policy, [f"r{i}" for i in range(count)])


def report(one, name, *depths, generation=1, ids=IDS):
    hashes = prefix_token_hashes(ids, 16)
    one.reported_prefixes(ReportedPrefixes(name, generation, tuple((hashes[d - 1], d) for d in depths), 0))


def bloom_of(values, size=256, hashes=4):
    data = bytearray(size)
    for value in values:
        for place in bloom_positions(value, 8 * size, hashes):
            data[place >> 3] |= 1 << (place & 7)
    return Bloom(bytes(data), hashes)


def test_a_prefix_is_named_by_one_hash_over_all_its_tokens():
    hashes = prefix_token_hashes(IDS[:40], 16)
    packed = b"".join(token.to_bytes(4, "little") for token in IDS[:32])
    assert hashes == [xxhash.xxh3_64_intdigest(packed[:64], 1337), xxhash.xxh3_64_intdigest(packed, 1337)]


def test_bloom_positions_are_what_an_engine_must_set():
    value = (3 << 32) | 5  # low 5, high 3
    assert bloom_positions(value, 1000, 4) == [5, 8, 11, 14]
    assert bloom_positions((4 << 32) | 998, 1000, 3) == [998, 3, 8]  # high made odd


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 2**64 - 1), max_size=40))
def test_a_filter_never_denies_what_was_put_in(values):
    bloom = bloom_of(values)
    assert all(value in bloom for value in values)


def test_an_empty_filter_holds_nothing():
    assert 5 not in Bloom(b"", 3)


@pytest.mark.parametrize("bloom", [False, True])
@pytest.mark.parametrize("other", [{"cache_salt": "tenant-a"}, {"lora_name": "adapter"}])
def test_a_prompt_under_a_salt_or_an_adapter_is_cached_nowhere_since_no_report_is_about_it(bloom, other):
    one = router(min_prefix_tokens=16)
    hashes = prefix_token_hashes(IDS, 16)
    if bloom:
        one.reported_prefixes(ReportedPrefixes("r1", 1, (), 0, bloom_of(hashes)))
    else:
        report(one, "r1", 25)
    assert one.route(turn("plain"), 0).believed_hit_tokens == 400
    apart = TurnView(request_id="apart", prompt=TokenPrompt(IDS, **other))
    assert one.route(apart, 0).believed_hit_tokens == 0


def test_the_longest_reported_prefix_wins():
    one = router()
    assert one.needs == {Signal.TOKENS, Signal.REPORTED_PREFIXES}
    report(one, "r0", 3)
    report(one, "r1", 2, 20)
    decision = one.route(turn(), 0)
    assert (decision.replica, decision.believed_hit_tokens) == ("r1", 320)
    assert decision.reason == "highest score 0.800: 20 of 25 blocks cached, load 0.00"


def test_a_list_of_ends_does_not_know_a_beginning_that_is_not_listed():
    one = router(1)
    report(one, "r0", 20)
    assert one.route(turn(ids=[*IDS[:160], *range(240)]), 0).believed_hit_tokens == 0


def test_a_filter_knows_every_beginning_and_counts_to_the_first_no():
    one, hashes = router(1), prefix_token_hashes(IDS, 16)
    one.reported_prefixes(ReportedPrefixes("r0", 1, (), 0, bloom_of(hashes[:20] + hashes[22:])))
    assert one.route(turn(), 0).believed_hit_tokens == 320
    assert one.route(turn("p", [*IDS[:160], *range(240)]), 0).believed_hit_tokens == 160


def test_a_short_match_is_not_worth_the_distortion():
    one = Router(make_policy("reported-prefixes"), ["r0"])
    report(one, "r0", 15)
    assert one.route(turn("a"), 0).believed_hit_tokens == 0  # 240 tokens, below 256
    report(one, "r0", 16, generation=2)
    assert one.route(turn("b"), 0).believed_hit_tokens == 256


def test_a_report_replaces_the_one_before_and_an_unchanged_generation_is_no_news():
    one = router(1)
    report(one, "r0", 10)
    report(one, "r0", 12, generation=1)
    assert one.route(turn("a"), 0).believed_hit_tokens == 160
    report(one, "r0", 12, generation=2)
    assert one.route(turn("b"), 0).believed_hit_tokens == 192
    report(one, "r0", generation=3)
    assert one.route(turn("c"), 0).believed_hit_tokens == 0


def test_a_replica_that_left_takes_its_report_with_it():
    one = router()
    report(one, "r0", 20)
    one.remove_replica("r0", 0)
    report(one, "r0", 20)
    one.add_replica("r0", 0)
    assert one.route(turn(), 0).believed_hit_tokens == 0


def test_load_is_weighed_against_the_match():
    one = router(w_load=0.5)
    report(one, "r0", 20)
    assert [one.route(turn(f"q{i}"), 0).replica for i in range(2)] == ["r0", "r0"]  # 0.8 - 0.5 against 0
    two = router(w_load=1.5)
    report(two, "r0", 20)
    assert [two.route(turn(f"q{i}"), 0).replica for i in range(2)] == ["r0", "r1"]


def test_a_simulation_may_name_prefixes_by_content():
    one, contents = router(1), [7, 8, 9]
    keys = PrefixKeys(contents)
    one.reported_prefixes(ReportedPrefixes("r0", 1, ((keys.at(2), 2),), 0, by_content=True))
    prompt = HashedPrompt(48, contents, 16)
    assert one.route(TurnView(request_id="q", prompt=prompt), 0).believed_hit_tokens == 32


# -- the wire ----------------------------------------------------------------------------------------------------


def encoded(**changes):
    state = {"generation": 7, "block_size": 16, "form": "top-k", "prefixes": [{"token_hash": 22, "blocks": 3}]}
    return msgspec.json.encode({**state, **changes})


def test_both_forms_are_read():
    assert parse_prefix_state(encoded(), "r0", 16, 5) == ReportedPrefixes("r0", 7, ((22, 3),), 5)
    rows = [{"block_hash": 11, "tokens": 48, "blocks": 3, "token_hash": 2**64 - 1}]
    assert parse_prefix_state(encoded(prefixes=rows), "r0", 16, 5).prefixes == ((2**64 - 1, 3),)
    bits = base64.b64encode(b"\x01\x02").decode()
    found = parse_prefix_state(encoded(form="bloom", bits=bits, hashes=3), "r0", 16, 5)
    assert found.bloom == Bloom(b"\x01\x02", 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "is this our engine's"),
        (encoded(block_size=32), "give --block-size 32"),
        (encoded(form="trie"), "form 'trie'"),
        (encoded(form="bloom", bits="AQ=="), "with 0 hashes"),
        (encoded(form="bloom", bits="?", hashes=1), "is this our engine's"),
        (encoded(prefixes=[{"blocks": 2}]), "is this our engine's"),
    ],
)
def test_what_is_no_report_says_so(body, message):
    with pytest.raises(WireError, match=message):
        parse_prefix_state(body, "r0", 16, 0)


async def test_reports_are_polled_for_a_policy_that_needs_them(fleet, router_for, eventually):
    (replica, other) = await fleet(2)
    hashes = prefix_token_hashes(IDS, 16)

    async def answer(request, body):
        assert request.raw_path == "/prefix_cache_state?form=top-k"
        return web.Response(body=encoded(prefixes=[{"token_hash": hashes[19], "blocks": 20}]))

    async def absent(request, body):
        return web.Response(status=404)

    replica.answer, other.answer = answer, absent
    service = await router_for([replica, other], policy="reported-prefixes", prefix_interval_ms=20)
    stats = service._prefixes.stats
    await eventually(lambda: stats.unchanged >= 2 and stats.absent >= 2)
    decision = service.router.policy.choose(turn(), service.router.fleet(0))
    assert (decision.replica, decision.believed_hit_tokens) == ("r0", 320)
    assert service.state()["policy_stats"]["reports"]["r0"]["generation"] == 7
    replica.answer = absent
    await eventually(lambda: stats.absent >= 5)
    assert service.state()["prefix_poll"]["failed"] == 0
