"""How large a policy's own index is: what the figure counts, and that it follows growth and forgetting."""

import random

import pytest

from routers import HashedPrompt, Removed, Router, Stored, TextPrompt, TokenPrompt, TurnView, make_policy, policy_names

BY_EVENTS = ["pure-kv-affinity", "dynamo-kv", "vllm-kv-aware", "affinity-load-score", "stack-load-aware"]
KEEP_NONE = {
    "random", "round-robin", "least-requests", "least-tokens", "power-of-two", "session-modulo", "session-ring",
    "session-ring-valve", "ray-consistent-hash", "vllm-consistent-hash", "sticky-least-loaded", "verl-sticky-inflight",
    "dynamo-load-aware", "clairvoyant", "lowest-completed-qps",
}  # fmt: skip


def router(policy, **options):
    return Router(make_policy(policy, options, random.Random(1)), ["r0", "r1"])


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_says_how_much_it_believes_or_that_it_believes_nothing(policy):
    assert router(policy).index_size() == (None if policy in KEEP_NONE else 0)


@pytest.mark.parametrize("policy", [*BY_EVENTS, "llmd-precise-prefix"])
def test_an_index_of_events_counts_the_blocks_of_every_replica(policy):
    one = router(policy)
    for name in ("r0", "r1"):
        one.kv_events(name, [Stored((1, 2, 3), None, (11, 12, 13), 16)], 0)
    assert (one.index_size(), one.policy.index_unit) == (6, "blocks")
    one.kv_events("r0", [Removed((3,))], 1)
    assert one.index_size() == 5
    one.remove_replica("r1", 2)
    assert one.index_size() == 2


def test_a_text_tree_counts_characters_and_shrinks_only_where_it_evicts():
    sizes = {}
    for evicts in (False, True):
        one = router(
            "ray-prefix-affinity", do_eviction=evicts, eviction_threshold_chars=1000, eviction_target_chars=500
        )
        for number in range(200):
            prompt = TextPrompt(f"{number:04}" + "x" * 96)
            one.route(TurnView(request_id=f"q{number}", prompt=prompt), number * 1_000_000)
            one.finished(f"q{number}", 1, number * 1_000_000)
        sizes[evicts] = one.index_size()
    assert sizes[False] > 15_000
    assert sizes[True] < 4000
    assert one.policy.index_unit == "characters"


def test_guesses_of_routed_prompts_count_until_they_expire():
    one = router("dynamo-approx", ttl_s=10.0)
    for number, at_us in ((0, 0), (100, 5_000_000)):
        prompt = HashedPrompt(160, range(number, number + 10), 16)
        one.route(TurnView(request_id=f"q{number}", prompt=prompt), at_us)
    assert one.index_size() == 20
    one.route(TurnView(request_id="late", prompt=HashedPrompt(16, [7000], 16)), 11_000_000)
    assert one.index_size() == 11


@pytest.mark.parametrize(
    ("policy", "prompt", "expected", "unit"),
    [
        ("llmd-approx-prefix", HashedPrompt(160, range(10), 16), 10, "blocks"),
        ("stack-prefix-aware", TextPrompt("x" * 300), 3, "chunks"),
        ("sglang-cache-aware", TextPrompt("x" * 300), 300, "characters"),
        ("smg-cache-aware", TextPrompt("x" * 300), 300, "characters"),
        ("vllm-cache-aware", TokenPrompt(list(range(77))), 77, "tokens"),
        ("prefix-hash", TokenPrompt(list(range(77))), 1, "prefixes"),
    ],
)
def test_the_same_prompt_sent_twice_to_one_replica_counts_once(policy, prompt, expected, unit):
    one = router(policy)
    for name in ("a", "b"):
        one.route(TurnView(request_id=name, prompt=prompt), 0, exclude=["r1"])
    assert (one.index_size(), one.policy.index_unit) == (expected, unit)


async def test_the_router_process_tells_the_size_and_its_unit(router_for):
    service = await router_for(["http://127.0.0.1:9"], policy="ray-prefix-affinity")
    assert (service.state()["index_size"], service.state()["index_unit"]) == (0, "characters")
    service = await router_for(["http://127.0.0.1:9"], policy="round-robin")
    assert (service.state()["index_size"], service.state()["index_unit"]) == (None, None)
