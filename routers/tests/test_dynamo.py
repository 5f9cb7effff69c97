"""`dynamo-kv` against the worked figures of ai-dynamo 1.4.2 and of the reference text on KV-aware routing."""

import random
from collections import Counter

import numpy as np
import pytest

from routers import (
    HashedPrompt,
    OptionError,
    PrefixIndex,
    PrefixKeys,
    Removed,
    Router,
    Signal,
    Stored,
    TurnView,
    local_block_hashes,
    make_policy,
)
from routers.policies.dynamo_cost import Load, cost, decay_factor, softmax_weights
from routers.policies.dynamo_options import DynamoKvOptions

BLOCK = 16
DECODE = {"track_prefill_tokens": False, "role": "decode"}
LEGACY = {"overlap_score_weight": 2.5, "overlap_score_credit": 0.5, "prefill_load_scale": 3.0}


def price(load, prompt_tokens, least_prefill=0, shared_cache_multiplier=0.0, **options):
    return cost(
        load,
        prompt_tokens=prompt_tokens,
        block_size=BLOCK,
        least_prefill=least_prefill,
        options=DynamoKvOptions(**options),
        shared_cache_multiplier=shared_cache_multiplier,
    )


@pytest.mark.parametrize(
    ("load", "prompt_tokens", "options", "expected"),
    [
        (Load(device=6), 160, {}, 4 + 10),
        (Load(), 160, {}, 10 + 10),
        (Load(), 100, {}, 6.25 + 6),
        (Load(device=3, host=3, disk=2), 160, {}, 10 - 5.75 + 10),  # the tiers' observed credit
        (Load(device=10), 160, {"overlap_score_credit": 2.0}, 0 + 10),  # clamped at nothing, never a bonus
        (Load(device=6), 160, {"overlap_score_credit": 0.0}, 10 + 10),
        (Load(device=6), 160, {"prefill_load_scale": 2.0}, 2 * 4 + 10),
        (Load(device=6), 160, LEGACY, 2.5 * (10 - 3) + 10),
        (Load(device=6), 160, {"overlap_score_weight": 0.0}, 10),  # no prefill term at all
        (Load(active_requests=3), 160, {"decode_active_request_weight": 2.0}, 26),
        (Load(active_blocks=7, shared_blocks=4), 160, {}, 10 + 7 + 6),
        (Load(active_blocks=7, shared_blocks=4), 160, {"track_active_blocks": False}, 10),
        (Load(active_prefill_tokens=80), 160, {}, 15 + 10),
        (Load(active_prefill_tokens=80, device=6), 160, {"track_prefill_tokens": False}, 10),  # nothing to forgive
        (Load(active_prefill_tokens=80, device=6), 160, DECODE, 4),
        (Load(device=6), 160, {**DECODE, "overlap_score_credit": 0.0}, 10),
        (Load(device=12), 160, {**DECODE, "decode_active_request_weight": 1.0}, 0),
    ],
)
def test_the_cost_of_a_candidate(load, prompt_tokens, options, expected):
    assert price(load, prompt_tokens, **options) == pytest.approx(expected)


def test_a_shared_cache_counts_beyond_the_device_match():
    assert price(Load(device=2, shared_cache=4), 160, shared_cache_multiplier=0.5) == pytest.approx(10 - 2 - 2 + 10)


def test_decay_fades_the_credit_of_a_replica_that_already_owes_prefill():
    """Active prefill of 64, 32 and 16 tokens, the first with six blocks cached: the third wins."""
    assert decay_factor(1.0, 64, 16, 160, BLOCK) == pytest.approx(10 / 13)
    loads = {
        "w1": Load(active_prefill_tokens=64, active_blocks=4, device=6),
        "w2": Load(active_prefill_tokens=32, active_blocks=2),
        "w3": Load(active_prefill_tokens=16, active_blocks=1),
    }
    costs = {name: price(load, 160, 16, overlap_score_credit_decay=1.0) for name, load in loads.items()}
    assert costs == {"w1": pytest.approx(23.385, abs=5e-4), "w2": pytest.approx(24), "w3": pytest.approx(22)}


def test_decay_counts_a_partial_block_of_the_prompt_whole():
    assert decay_factor(1.0, 64, 16, 100, BLOCK) == pytest.approx(0.700)


def test_one_request_equivalent_of_excess_halves_six_matched_blocks_to_three():
    plain, faded = (
        price(Load(active_prefill_tokens=8 * BLOCK, device=6), 8 * BLOCK, overlap_score_credit_decay=decay)
        for decay in (0.0, 1.0)
    )
    assert (plain, faded) == (8 + 8 - 6 + 8, 8 + 8 - 3 + 8)
    assert price(Load(device=6), 8 * BLOCK, overlap_score_credit_decay=1.0) == price(Load(device=6), 8 * BLOCK)


def test_softmax_chances_are_those_observed():
    weights = softmax_weights([14.0, 20.0, 20.0], 1.0)
    predicted = [1500 * weight / sum(weights) for weight in weights]
    assert predicted == pytest.approx([864, 318, 318], abs=1)
    assert softmax_weights([3.0, 3.0], 0.5) == [1.0, 1.0]


# -- the policy in a router --------------------------------------------------------------------------------------


def turn(name, contents, tokens=None, **more):
    tokens = BLOCK * len(contents) if tokens is None else tokens
    return TurnView(request_id=name, prompt=HashedPrompt(tokens, contents, BLOCK), **more)


def dynamo(replicas=("r0", "r1", "r2"), seed=1, **options):
    return Router(make_policy("dynamo-kv", options, random.Random(seed), BLOCK), list(replicas))


def warm(router, replica, contents):
    router.kv_events(replica, [Stored(tuple(contents), None, tuple(contents), BLOCK)], 0)


TEN = list(range(100, 110))


def test_six_of_ten_cached_blocks_cost_14_against_20():
    router = dynamo()
    warm(router, "r1", TEN[:6])
    decision = router.route(turn("q", TEN), 0)
    assert decision.replica == "r1"
    assert decision.scores == {"r0": 20.0, "r1": 14.0, "r2": 20.0}
    assert decision.believed_hit_tokens == 96
    assert decision.reason == "lowest cost 14.0: 6 of 10 blocks cached, 0 active"
    assert decision.rule == "cost"


def test_ties_are_drawn_uniformly():
    policy = make_policy("dynamo-kv", {}, random.Random(5), BLOCK)
    fleet = Router(policy, ["r0", "r1", "r2"]).fleet(0)
    seen = Counter(policy.choose(turn("q", TEN), fleet).replica for _ in range(600))
    assert all(160 < seen[name] < 240 for name in ("r0", "r1", "r2"))


def test_a_temperature_draws_by_cost():
    policy = make_policy("dynamo-kv", {"temperature": 1.0}, random.Random(5), BLOCK)
    router = Router(policy, ["r0", "r1", "r2"])
    warm(router, "r0", TEN[:6])
    seen = Counter(policy.choose(turn("q", TEN), router.fleet(0)).replica for _ in range(1500))
    assert 800 < seen["r0"] < 930
    assert abs(seen["r1"] - seen["r2"]) < 80


@pytest.mark.parametrize("credit", [0.5, 1.5, 2.0])
def test_prefill_is_booked_with_whole_device_blocks_whatever_the_credit(credit):
    router = dynamo(["r0"], overlap_score_credit=credit)
    warm(router, "r0", TEN[:6])
    router.route(turn("a", TEN, tokens=165), 0)
    assert router.policy._sequences.prefill_tokens("r0") == 165 - 96


def test_at_credit_zero_there_is_no_index_so_the_whole_prompt_is_booked():
    router = dynamo(["r0"], overlap_score_credit=0.0)
    warm(router, "r0", TEN[:6])
    assert router.needs == {Signal.TOKENS}
    assert router.route(turn("a", TEN), 0).believed_hit_tokens == 0
    assert router.policy._sequences.prefill_tokens("r0") == 160


def test_a_lower_tier_is_booked_by_its_weight():
    router = dynamo(["r0"])
    warm(router, "r0", TEN[:3])
    router.kv_events("r0", [Stored((1, 2, 3), TEN[2], tuple(TEN[3:6]), BLOCK, medium="CPU")], 0)
    router.route(turn("a", TEN), 0)
    assert router.policy._sequences.prefill_tokens("r0") == 160 - 84  # 16 * (3 + 0.75 * 3)


def test_the_first_token_ends_the_prefill_and_the_end_frees_the_blocks():
    router = dynamo(["r0", "r1"])
    first = router.route(turn("a", TEN), 0)
    other = next(name for name in ("r0", "r1") if name != first.replica)
    assert router.route(turn("b", list(range(200, 210))), 1).replica == other
    second = router.route(turn("c", TEN), 2)
    assert second.scores[first.replica] == 20 + 10  # its ten blocks are shared, its prefill is still owed
    assert second.scores[other] == 20 + 20
    router.failed("c", 3)
    router.first_token("a", 4)
    assert router.route(turn("d", TEN), 5).scores[first.replica] == 10 + 10
    router.failed("d", 6)
    router.finished("a", 1, 7)
    assert router.route(turn("e", TEN), 8).scores[first.replica] == 20


def test_without_assumed_reuse_the_same_prompt_counts_again():
    router = dynamo(["r0"], assume_kv_reuse=False)
    router.route(turn("a", TEN), 0)
    router.first_token("a", 0)
    assert router.route(turn("b", TEN), 0).scores == {"r0": 10 + 10 + 10}


def test_output_blocks_count_only_when_asked_and_fade_towards_the_expected_length():
    plain = dynamo(["r0"], track_output_blocks=True)
    assert plain.wants_progress
    faded = dynamo(["r0"], track_output_blocks=True, expected_output_tokens="max_tokens")
    untracked = dynamo(["r0"])
    assert not untracked.wants_progress
    for router in (plain, faded, untracked):
        router.route(turn("a", TEN, max_tokens=64), 0)
        router.progress("a", 32, 1)
    assert [router.policy._sequences.active_blocks("r0") for router in (plain, faded, untracked)] == [12, 6, 10]


def test_a_prompt_that_nobody_tokenised_is_placed_by_load_alone():
    router = dynamo(["r0", "r1"])
    busy = router.route(turn("a", TEN), 0).replica
    decision = router.route(TurnView(request_id="b"), 1)
    assert decision.replica != busy
    assert (decision.rule, decision.believed_hit_tokens) == ("no-tokens", None)


def test_a_gap_ends_the_belief_and_a_removal_shortens_it():
    router = dynamo(["r0", "r1"])
    warm(router, "r0", TEN)
    router.kv_events("r0", [Removed((TEN[4],))], 1)
    assert router.route(turn("a", TEN), 2).believed_hit_tokens == 4 * BLOCK
    router.finished("a", 1, 3)
    router.event_gap("r0", 4)
    assert router.route(turn("b", TEN), 5).believed_hit_tokens == 0


def test_a_replica_that_leaves_takes_index_and_bookings_with_it():
    router = dynamo(["r0", "r1"])
    warm(router, "r0", TEN)
    router.route(turn("a", TEN), 0)
    router.remove_replica("r0", 1)
    router.add_replica("r0", 2)
    assert router.route(turn("b", TEN), 3).scores == {"r0": 20.0, "r1": 20.0}
    assert router.policy.stats()["index_blocks"] == 0


def test_variants_are_named_option_sets():
    assert make_policy("dynamo-kv:decay").options.overlap_score_credit_decay == 1.0
    assert make_policy("dynamo-kv:no-overlap").options.credit == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 cannot work"),
        ({"overlap_score_credit": float("nan")}, "overlap_score_credit=nan"),
        ({"expected_output_tokens": 64}, "set track_output_blocks = true"),
        ({"expected_output_tokens": 0, "track_output_blocks": True}, "at least 1"),
        ({"track_prefill_tokens": 1}, "track_prefill_tokens"),
    ],
)
def test_options_that_cannot_work_say_what_to_change(options, message):
    with pytest.raises(OptionError, match=message):
        make_policy("dynamo-kv", options)


# -- the reference batch: 48 conversations of 3 turns over one system prompt -------------------------------------


def batch(policy, credit=1.0):
    """Backlogs only grow, so the largest one is the makespan; loads are in blocks, half a block decoded per block."""
    names = ["r0", "r1", "r2", "r3"]
    options = DynamoKvOptions(overlap_score_credit=credit)
    seed = np.random.default_rng(20260826)
    system = seed.integers(0, 50_000, size=4 * BLOCK)
    rng = np.random.default_rng(7)
    talks = [
        np.concatenate([system, rng.integers(0, 50_000, size=int(rng.integers(3, 10)) * BLOCK)]) for _ in range(48)
    ]
    index = PrefixIndex(count_copies=False)

    def announce(name, hashes):
        keys = PrefixKeys(hashes)
        index.stored(name, Stored(tuple(keys.array.tolist()), None, tuple(hashes.tolist()), BLOCK))

    announce("r0", local_block_hashes(system, BLOCK))
    prefill, decode, placed = Counter(), Counter(), Counter()
    first, sticky, later = {}, 0, 0
    for step in range(3):
        for talk in range(48):
            if step:
                talks[talk] = np.concatenate([talks[talk], rng.integers(0, 50_000, size=2 * BLOCK)])
            hashes = local_block_hashes(talks[talk], BLOCK)
            matched = index.match(PrefixKeys(hashes))
            if policy == "longest":
                choice = min(names, key=lambda name: (-matched.get(name, 0), name))
            else:
                costs = {
                    name: cost(
                        Load(int(prefill[name] * BLOCK), decode[name], device=matched.get(name, 0)),
                        prompt_tokens=len(talks[talk]),
                        block_size=BLOCK,
                        least_prefill=0,
                        options=options,
                    )
                    for name in names
                }
                choice = min(names, key=lambda name: (costs[name], name))
            placed[choice] += 1
            if step:
                later += 1
                sticky += choice == first[talk]
            else:
                first[talk] = choice
            prefill[choice] += max(0, len(hashes) - matched.get(choice, 0))
            decode[choice] += 0.5 * len(hashes)
            announce(choice, hashes)
    return [placed[name] for name in names], max(prefill[name] + decode[name] for name in names), sticky / later


def test_affinity_alone_herds_and_the_cost_spreads_the_same_batch():
    placed, herded, _ = batch("longest")
    assert placed == [144, 0, 0, 0]
    spread, balanced, sticky = batch("cost")
    assert spread == [35, 36, 36, 37]
    assert (round(herded), round(balanced)) == (1346, 374)
    assert sticky == pytest.approx(0.656, abs=5e-4)


def test_without_the_credit_the_same_batch_takes_a_fifth_longer():
    _, balanced, _ = batch("cost")
    _, blind, sticky = batch("cost", credit=0.0)
    assert blind / balanced == pytest.approx(1.20, abs=5e-3)
    assert sticky == pytest.approx(0.323, abs=5e-4)


def test_the_cost_of_a_cold_fleet_is_least_loaded():
    costs = [price(Load(active_prefill_tokens=blocks * BLOCK), 9 * BLOCK) for blocks in (4, 1, 9, 3)]
    assert costs.index(min(costs)) == 1
