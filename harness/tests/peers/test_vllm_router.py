"""vllm-router 0.1.17 as released, in front of our replicas."""

import re

import pytest

from harness.peers import find_peer
from harness.processes import get_json
from harness.tests.peers.live import BLOCK, fleet, leading_blocks, plain, token_ids

pytestmark = pytest.mark.peers

DECISION = re.compile(
    r'KV prefix decision outcome="(\w+)" worker="(\S+)" input_tokens=(\d+) .*credited_prefix_tokens=(\d+)'
)


def test_kv_aware_scores_our_events_and_returns_to_the_warm_replica(tmp_path):
    with fleet(tmp_path) as world:
        url = world.start_peer("vllm-router", "kv_aware", "--log-level", "debug")
        order = [world.names[u] for u in get_json(f"{url}/list_workers")["urls"]]
        warm = order[-1]  # the one that no tie would choose
        prompt = token_ids(1, 25 * BLOCK + 5)
        first = world.ask(prompt, url=next(r.url for r in world.replicas if r.name == warm))
        assert first.cached_tokens == 0
        world.wait_log("kv_index live sequence advanced")
        again = world.ask(prompt)
        longer = world.ask([*prompt, *token_ids(2, 100)])
        other = world.ask(token_ids(3, 200))
        assert [world.placed(a) for a in (again, longer)] == [warm, warm]
        assert world.placed(other) == order[0]  # a tie goes to the first of the router's own order
        decisions = DECISION.findall(plain(world.peer_log))
        credited = [int(found[3]) for found in decisions]
        assert credited == [again.cached_tokens, longer.cached_tokens, 0]
        assert again.cached_tokens == leading_blocks(len(prompt)) == 400
        assert {found[0] for found in decisions} == {"prefix_cost"}


def test_kv_aware_credits_nothing_to_a_request_that_asks_for_token_ids(tmp_path):
    """Why the preset says that a run must not ask: it would measure the router without what it is for."""
    assert not find_peer("vllm-router").may_ask_for_ids
    with fleet(tmp_path, replicas=2) as world:
        world.start_peer("vllm-router", "kv_aware", "--log-level", "debug")
        prompt = token_ids(1, 405)
        world.ask(prompt)
        world.wait_log("kv_index live sequence advanced")
        fields = {"seed": 2**62, "temperature": 0.0, "priority": 0}  # what our load generator sends besides
        world.ask(prompt, **fields)
        world.ask(prompt, **fields, return_token_ids=True)
        assert [int(found[3]) for found in DECISION.findall(plain(world.peer_log))] == [0, 400, 0]


def test_kv_aware_follows_evictions(tmp_path):
    """What it credits is what our engine serves, block for block, while a small cache keeps evicting."""
    with fleet(tmp_path, replicas=2, num_gpu_blocks=120, max_model_len=2048) as world:
        world.start_peer("vllm-router", "kv_aware", "--log-level", "debug")
        served = []
        for k in range(40):
            family, length = k * 7 % 5, 50 + k * 37 % 300
            prompt = [*token_ids(100 + family, 160), *token_ids(k // 3, length)]
            served.append(world.ask(prompt).cached_tokens)
            world.wait_log("kv_index live sequence advanced", k + 1)
        credited = [int(found[3]) for found in DECISION.findall(plain(world.peer_log))]
        assert credited == served
        assert sum(served) > 0
        assert sum(world.state(r.name)["evicted_blocks"] for r in world.replicas) > 0


def test_cache_aware_asks_our_render_route_and_keeps_a_prefix_together(tmp_path):
    with fleet(tmp_path) as world:
        world.start_peer("vllm-router", "cache_aware", "--log-level", "debug")
        text = "a prompt that is long enough for a few blocks of tokens " * 8
        first = world.ask(text)
        again = world.ask(text + " and then some more")
        assert world.placed(first) == world.placed(again)
        assert again.cached_tokens > 0
        assert first.cached_tokens == 0


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "consistent_hash", "sticky_least_loaded"])
def test_every_other_policy_serves_chat_and_completions(tmp_path, policy):
    with fleet(tmp_path, replicas=2) as world:
        world.start_peer("vllm-router", policy)
        headers = {"X-Session-ID": "s1"}
        placed = {world.placed(world.ask(token_ids(k, 40), headers=headers)) for k in range(4)}
        chat = world.ask([{"role": "user", "content": "hello"}], path="/v1/chat/completions", headers=headers)
        placed.add(world.placed(chat))
        if policy in ("consistent_hash", "sticky_least_loaded"):
            assert len(placed) == 1
        if policy == "round_robin":
            assert placed == {"r0", "r1"}
