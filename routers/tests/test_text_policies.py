"""Policies that guess from the text (or tokens) they sent: branch order, thresholds and ties of the real ones."""

import random

import pytest

from routers import HashedPrompt, Router, Signal, Stored, TextPrompt, TokenPrompt, TurnView, make_policy

S = 1_000_000


def text_turn(name, text):
    return TurnView(request_id=name, prompt=TextPrompt(text))


def token_turn(name, tokens):
    return TurnView(request_id=name, prompt=TokenPrompt(list(tokens)))


def router(policy, count=3, seed=1, **options):
    return Router(make_policy(policy, options, random.Random(seed)), [f"r{i}" for i in range(count)])


def send(one, text, now_us=0, *, end=True, name=None, turn=text_turn):
    name = name or f"q{one.counts.routed}"
    decision = one.route(turn(name, text), now_us)
    if end:
        one.finished(name, 1, now_us)
    return decision


def load(one, replica, requests, turn=text_turn, text="."):
    """That many requests in flight on one replica, whose text matches nothing."""
    others = [view.name for view in one.replicas() if view.name != replica]
    for number in range(requests):
        one.route(turn(f"load-{replica}-{number}", text), 0, exclude=others)


# -- ray-prefix-affinity -----------------------------------------------------------------------------------------


def test_ray_sends_unmatched_text_to_those_that_were_sent_the_least():
    one = router("ray-prefix-affinity")
    seen = [send(one, text) for text in ("aaaa", "bbbb", "cccc")]
    assert [decision.rule for decision in seen] == ["smallest"] * 3
    assert [decision.replica for decision in seen] == ["r0", "r1", "r2"]  # registration order at a tie
    send(one, "aaaa tail")
    assert send(one, "dddd").replica == "r1"


@pytest.mark.parametrize(("shared", "rule"), [(10, "match"), (9, "smallest")])
def test_ray_takes_owners_from_a_tenth_of_the_characters_on(shared, rule):
    one = router("ray-prefix-affinity")
    first = send(one, "x" * shared + "a" * 40)
    send(one, "long" * 30)
    probe = "x" * shared + "b" * (100 - shared)
    decision = send(one, probe)
    assert decision.rule == rule
    assert (decision.replica == first.replica) is (rule == "match")


def test_ray_counts_a_partly_matched_edge_and_asks_the_shortest_queue_among_owners():
    one = router("ray-prefix-affinity", 2)
    one.route(text_turn("a", "shared prefix one"), 0, exclude=["r1"])
    one.route(text_turn("b", "shared prefix two"), 0, exclude=["r0"])
    one.route(text_turn("c", "elsewhere"), 0, exclude=["r1"])
    decision = one.route(text_turn("d", "shared prefix three"), 0)
    assert (decision.replica, decision.rule) == ("r1", "match")  # "shared prefix t" is r1's alone
    decision = one.route(text_turn("e", "shared prefix"), 0)
    assert decision.rule == "match"
    assert decision.replica == "r0"  # both own it, two in flight each: the first wins


def test_ray_balances_only_above_its_threshold_which_is_infinite_unless_given():
    one = router("ray-prefix-affinity", 2)
    one.route(text_turn("seed", "warm text"), 0, exclude=["r1"])
    load(one, "r0", 50, text="warm text")
    assert send(one, "warm text").replica == "r0"
    two = router("ray-prefix-affinity", 2, imbalanced_threshold=3)
    load(two, "r0", 3, text="warm text")
    assert send(two, "warm text").rule == "match"  # three more is not above three
    load_one_more = two.route(text_turn("more", "warm text"), 0, exclude=["r1"])
    assert load_one_more.replica == "r0"
    decision = send(two, "warm text")
    assert (decision.rule, decision.replica) == ("imbalanced", "r1")


def test_ray_falls_to_the_pair_when_the_smallest_tenant_cannot_serve_and_without_text():
    one = router("ray-prefix-affinity", 3)
    send(one, "aaaa")
    send(one, "bbbb")
    one.drain_replica("r2", 0)  # the only one without text stays in the tree
    assert send(one, "cccc").rule == "pair"
    assert send(one, "").rule == "no-text"
    assert one.route(TurnView(request_id="none"), 0).rule == "no-text"


def test_ray_draws_its_pair_first_whether_it_is_needed_or_not():
    one, twin = router("ray-prefix-affinity", seed=5), random.Random(5)
    send(one, "aaaa")
    twin.sample(range(3), 2)
    assert one.policy.rng.getstate() == twin.getstate()


def test_ray_evicts_down_to_its_target_and_only_if_told_to():
    options = {"do_eviction": True, "eviction_threshold_chars": 100, "eviction_target_chars": 60}
    for evicts in (True, False):
        one = router("ray-prefix-affinity", 1, **{**options, "do_eviction": evicts})
        for number in range(12):
            send(one, chr(97 + number) * 10, number * S)
        held = one.policy.stats()["chars"]["r0"]
        assert held == (70 if evicts else 120)  # 110 down to 60 at 10 s, and one more at 11 s


def test_ray_forgets_a_removed_replica_and_takes_a_new_one_for_the_smallest():
    one = router("ray-prefix-affinity", 2)
    send(one, "aaaa")
    send(one, "bbbbbb")
    one.remove_replica("r0", 0)
    assert send(one, "aaaa").rule == "smallest"
    one.add_replica("new", 0)
    assert send(one, "zzzz").replica == "new"


# -- sglang-cache-aware ------------------------------------------------------------------------------------------


def test_sglang_sends_twelve_unrelated_prompts_one_by_one_to_one_replica():
    one = router("sglang-cache-aware", 4)
    placed = {send(one, chr(97 + number) * 20).replica for number in range(12)}
    assert len(placed) == 1  # observed with the released binary: ties go to the first


def test_sglangs_first_is_arbitrary_and_fixed_per_process():
    firsts = [send(router("sglang-cache-aware", 4, seed=seed), "x").replica for seed in range(12)]
    assert len(set(firsts)) > 1
    assert firsts == [send(router("sglang-cache-aware", 4, seed=seed), "x").replica for seed in range(12)]


@pytest.mark.parametrize(("matched", "rule"), [(30, "miss"), (31, "match")])
def test_sglang_matches_strictly_above_its_threshold(matched, rule):
    one = router("sglang-cache-aware")
    send(one, "x" * matched)
    assert send(one, "x" * matched + "y" * (100 - matched)).rule == rule


def test_sglang_asks_the_creator_whoever_was_sent_the_text_later():
    one = router("sglang-cache-aware", 2)
    first = one.route(text_turn("a", "common text"), 0, exclude=["r1"])
    one.finished("a", 1, 0)
    one.route(text_turn("b", "common text"), 0, exclude=["r0"])
    one.finished("b", 1, 0)
    load(one, "r0", 5)
    assert send(one, "common text").replica == first.replica == "r0"


@pytest.mark.parametrize(
    ("low", "high", "out_of_balance"),
    [
        (0, 64, False),  # 64 is not above 64
        (0, 65, True),
        (130, 195, False),  # 65 above, but 195 is not above 1.5 * 130
        (129, 195, True),
    ],
)
def test_sglang_balances_when_both_the_number_and_the_factor_are_exceeded(low, high, out_of_balance):
    one = router("sglang-cache-aware", 2)
    one.route(text_turn("seed", "warm text"), 0, exclude=["r1"])
    one.finished("seed", 1, 0)
    load(one, "r0", high)
    load(one, "r1", low)
    decision = send(one, "warm text")
    assert (decision.rule, decision.replica) == (("imbalanced", "r1") if out_of_balance else ("match", "r0"))


def test_sglang_inserts_what_it_sends_by_load_alone_too():
    one = router("sglang-cache-aware", 2, balance_abs_threshold=0)
    load(one, "r0", 2)
    assert send(one, "new text").rule == "imbalanced"
    assert one.policy.stats()["tree_chars"]["r1"] == len("new text")


def test_sglang_forgets_a_creator_that_cannot_serve_and_does_not_insert_then():
    one = router("sglang-cache-aware", 3)
    one.route(text_turn("a", "the text"), 0, exclude=["r1", "r2"])
    one.finished("a", 1, 0)
    one.drain_replica("r0", 0)
    first = send(one, "the text")
    assert first.rule == "gone"
    assert one.policy.stats()["tree_chars"] == {"r1": 0, "r2": 0}
    assert send(one, "the text").rule == "miss"


def test_sglang_without_text_goes_by_load():
    one = router("sglang-cache-aware", 2)
    load(one, "r0", 1)
    decision = one.route(TurnView(request_id="ids"), 0)
    assert (decision.replica, decision.rule) == ("r1", "miss")


def test_sglang_evicts_each_tenant_to_the_size_of_the_tree():
    one = router("sglang-cache-aware", 1, max_tree_size=25)
    for number in range(7):
        send(one, chr(97 + number) * 10, number * 10 * S)
    assert one.policy.stats()["tree_chars"]["r0"] == 20


# -- smg-cache-aware ---------------------------------------------------------------------------------------------


def test_smg_takes_the_least_loaded_owner():
    one = router("smg-cache-aware", 3)
    for name in ("r0", "r1"):
        one.route(text_turn(f"warm-{name}", "common text"), 0, exclude=[n for n in ("r0", "r1", "r2") if n != name])
    one.finished("warm-r1", 1, 0)
    decision = send(one, "common text")
    assert (decision.replica, decision.rule) == ("r1", "match")


def test_smg_breaks_ties_between_owners_at_random():
    placed = set()
    for seed in range(12):
        one = router("smg-cache-aware", 3, seed=seed)
        for name in ("r0", "r1"):
            one.route(text_turn("w", "common text"), 0, exclude=[n for n in ("r0", "r1", "r2") if n != name])
            one.finished("w", 1, 0)
        placed.add(send(one, "common text").replica)
    assert placed == {"r0", "r1"}


@pytest.mark.parametrize(("busy", "gated"), [(96, False), (97, True)])
def test_smg_gates_its_pick_by_the_mean(busy, gated):
    """Three replicas, one busy: mean is a third of it, so the pick must be above mean + 64."""
    one = router("smg-cache-aware", 3)
    load(one, "r0", busy, text="warm text")
    decision = send(one, "warm text")
    assert decision.rule == ("gated" if gated else "match")
    assert (decision.replica == "r0") is not gated


def test_smg_misses_go_to_the_fewest_in_flight_then_the_fewest_processed_then_the_first():
    one = router("smg-cache-aware", 3)
    assert [send(one, text * 9).replica for text in "abcd"] == ["r0", "r1", "r2", "r0"]


def test_smg_budgets_all_replicas_together():
    one = router("smg-cache-aware", 2, max_tree_size=25, eviction_interval_secs=1)
    for number in range(6):
        send(one, chr(97 + number) * 10, number * S)
    assert sum(one.policy.stats()["tree_chars"].values()) == 20


def test_smg_with_events_takes_most_blocks_then_load():
    one = router("smg-cache-aware", 3, use_kv_events=True)
    assert one.needs == {Signal.TOKENS, Signal.KV_EVENTS}
    turn = TurnView(request_id="q", prompt=HashedPrompt(64, [1, 2, 3, 4], 16))
    assert one.route(turn, 0).rule == "miss"
    one.finished("q", 1, 0)
    one.kv_events("r1", [Stored((1, 2), None, (1, 2), 16)], 0)
    one.kv_events("r2", [Stored((1,), None, (1,), 16)], 0)
    decision = one.route(turn, 0)
    assert (decision.replica, decision.believed_hit_tokens) == ("r1", 32)


# -- vllm-cache-aware --------------------------------------------------------------------------------------------


def test_vllm_matches_every_replica_by_itself_and_takes_the_least_loaded_of_the_best():
    one = router("vllm-cache-aware", 3)
    one.route(token_turn("a", range(100)), 0, exclude=["r1", "r2"])
    one.route(token_turn("b", range(100)), 0, exclude=["r0", "r2"])
    one.finished("b", 1, 0)
    one.route(token_turn("c", range(40)), 0, exclude=["r0", "r1"])
    decision = one.route(token_turn("d", range(110)), 0)
    assert (decision.replica, decision.believed_hit_tokens) == ("r1", 100)
    assert decision.scores == {"r0": 100 / 110, "r1": 100 / 110, "r2": 40 / 110}


@pytest.mark.parametrize(("shared", "rule"), [(30, "miss"), (31, "match")])
def test_vllm_counts_whole_tokens_strictly_above_its_threshold(shared, rule):
    one = router("vllm-cache-aware", 2)
    one.route(token_turn("a", range(shared)), 0, exclude=["r1"])
    one.finished("a", 1, 0)
    other = [*range(shared), *range(500, 600 - shared)]
    assert one.route(token_turn("b", other), 0).rule == rule


def test_vllm_without_tokens_goes_by_load_and_remembers_nothing():
    one = router("vllm-cache-aware", 2)
    load(one, "r0", 1, turn=lambda name, text: TurnView(request_id=name))
    decision = one.route(TurnView(request_id="q"), 0)
    assert (decision.replica, decision.rule) == ("r1", "no-tokens")
    assert one.policy.stats()["tree_chars"] == {"r0": 0, "r1": 0}


def test_vllm_budget_counts_eight_characters_a_token():
    one = router("vllm-cache-aware", 1, max_tree_size=8 * 25, eviction_interval_secs=1)
    for number in range(4):
        one.route(token_turn(f"q{number}", range(100 * number, 100 * number + 10)), number * S)
    assert one.policy.stats()["tree_chars"]["r0"] == 20


def test_smg_looks_at_eight_owners_in_an_order_of_its_own():
    """The real one walks a map without order: which eight is arbitrary, and stays so for the life of a process."""
    seen = set()
    for seed in range(12):
        one = router("smg-cache-aware", 12, seed=seed)
        for number in range(12):
            others = [f"r{i}" for i in range(12) if i != number]
            one.route(text_turn(f"warm{number}", "the same text"), 0, exclude=others)
            one.finished(f"warm{number}", 1, 0)
        chosen = {send(one, "the same text", name=f"q{i}").replica for i in range(60)}
        assert len(chosen) == 8
        seen |= chosen
    assert len(seen) == 12


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"lora_name": "ad"}, {}])
def test_vllm_keeps_token_histories_of_each_salt_and_adapter_apart(other):
    one = router("vllm-cache-aware", 1)
    one.route(TurnView(request_id="a", prompt=TokenPrompt(list(range(50)), cache_salt="a")), 0)
    probe = TokenPrompt(list(range(50)), **other)
    assert one.route(TurnView(request_id="b", prompt=probe), 1).rule == "miss"
    same = TokenPrompt(list(range(50)), cache_salt="a")
    assert one.route(TurnView(request_id="c", prompt=same), 2).rule == "match"
