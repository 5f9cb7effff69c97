"""production-stack's policies: chunks, the score of load and cache, and the fallback on arrivals."""

import random

import pytest

from routers import HashedPrompt, Router, Stored, TextPrompt, TurnView, make_policy
from routers.policies.stack import md5_integer
from routers.rates import WindowCounts

S = 1_000_000
TEN = tuple(range(100, 110))


def router(policy, count=3, seed=1, **options):
    return Router(make_policy(policy, options, random.Random(seed)), [f"r{i}" for i in range(count)])


def text(name, value):
    return TurnView(request_id=name, prompt=TextPrompt(value))


def blocks(name, contents, session=None):
    return TurnView(request_id=name, session_id=session, prompt=HashedPrompt(16 * len(contents), contents, 16))


def test_arrivals_count_for_the_window_and_never_is_not_zero():
    counts = WindowCounts(60)
    assert counts.count("r0", 0) is None
    counts.add("r0", 0)
    counts.add("r0", 30 * S)
    assert [counts.count("r0", at * S) for at in (30, 60, 61, 90, 91)] == [2, 2, 1, 1, 0]
    counts.forget("r0")
    assert counts.count("r0", 0) is None


def test_chunks_of_128_characters_match_as_wholes_and_a_short_last_one_counts_as_one():
    one = router("stack-prefix-aware", 2)
    one.route(text("a", "x" * 300), 0, exclude=["r1"])
    decision = one.route(text("b", "x" * 256 + "y" * 100), 0)
    assert decision.replica == "r0"
    assert "first 2 of 3 chunks" in decision.reason
    assert "first 3 of 3 chunks" in one.route(text("c", "x" * 300), 0).reason
    assert one.route(text("d", "x" * 127 + "y"), 0).rule == "random"


def test_a_chunk_hash_does_not_know_what_stands_before_it_but_the_trie_does():
    one = router("stack-prefix-aware", 2)
    one.route(text("a", "a" * 128 + "b" * 128), 0, exclude=["r1"])
    assert one.route(text("b", "b" * 128), 0).rule == "random"


def test_a_match_is_drawn_among_survivors_whatever_their_load():
    one = router("stack-prefix-aware", 3)
    for name, others in (("r0", ["r1", "r2"]), ("r1", ["r0", "r2"])):
        one.route(text(f"w-{name}", "w" * 128), 0, exclude=others)
    placed = [one.route(text(f"q{i}", "w" * 128), 0).replica for i in range(60)]
    assert set(placed) == {"r0", "r1"}
    assert 15 < placed.count("r0") < 45


def test_without_a_match_every_replica_is_drawn_unless_a_least_match_is_asked():
    one = router("stack-prefix-aware", 3)
    assert {one.route(text(f"q{i}", f"{i}" * 200), 0).replica for i in range(40)} == {"r0", "r1", "r2"}
    two = router("stack-prefix-aware", 3, prefix_min_match_length=128)
    assert [two.route(text(f"q{i}", f"{i}" * 200), i).replica for i in range(5)] == ["r0", "r1", "r2", "r0", "r1"]


def test_nothing_is_ever_forgotten():
    one = router("stack-prefix-aware", 2)
    one.route(text("a", "w" * 128), 0, exclude=["r1"])
    assert one.route(text("b", "w" * 128), 10**15).replica == "r0"


@pytest.mark.parametrize(("busy", "chosen"), [(1, "r0"), (2, "r1"), (3, "r1")])
def test_the_score_trades_a_whole_hit_for_load_above_the_mean(busy, chosen):
    """r0 holds the prompt and has so many in flight, r1 neither: scores 1 - (busy - mean) / max(1, mean) against
    mean / max(1, mean). One is a tie at 0.5, which the smaller name wins; two is 0 against 1."""
    one = router("stack-load-aware", 2)
    one.kv_events("r0", [Stored(TEN, None, TEN, 16)], 0)
    for number in range(busy):
        one.route(blocks(f"load{number}", [1]), 0, exclude=["r1"])
    decision = one.route(blocks("q", TEN), 0)
    mean = busy / 2
    assert decision.scores == {"r0": 1 - (busy - mean) / max(1, mean), "r1": mean / max(1, mean)}
    assert decision.replica == chosen


def test_without_weight_on_load_the_holder_wins():
    one = router("stack-load-aware", 2, beta=0.0)
    one.kv_events("r1", [Stored(TEN, None, TEN, 16)], 0)
    assert {one.route(blocks(f"q{i}", TEN), 0).replica for i in range(9)} == {"r1"}


def test_when_nobody_holds_anything_the_session_ring_decides_and_else_the_arrivals():
    one = router("stack-load-aware", 3)
    owners = {one.route(blocks(f"q{i}", [i], session="s"), 0).replica for i in range(5)}
    assert len(owners) == 1
    points = {(md5_integer(f"r{r}-{i}"), f"r{r}") for r in range(3) for i in range(160)}
    after = [point for point in sorted(points) if point[0] > md5_integer("s")] or sorted(points)
    assert owners == {after[0][1]}
    two = router("stack-load-aware", 3)
    assert [two.route(blocks(f"q{i}", [i]), i).replica for i in range(4)] == ["r0", "r1", "r2", "r0"]


def test_arrivals_older_than_a_minute_count_no_more():
    one = router("stack-load-aware", 2)
    one.route(blocks("a", [1]), 0)
    one.route(blocks("b", [2]), 59 * S)
    assert one.route(blocks("c", [3]), 61 * S).replica == "r0"
