"""sglang-router 0.3.2 as released, in front of our replicas. It reads text, so prompts travel as text."""

from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest

from harness.processes import get_json
from harness.tests.peers.live import fleet, token_ids

pytestmark = pytest.mark.peers

TEXT = "the first family of prompts goes on for quite a while before it ends " * 6
OTHER = "another one, about nothing in particular, that shares no beginning " * 6


def test_cache_aware_sends_a_repeated_prompt_back_to_the_replica_that_it_warmed(tmp_path):
    with fleet(tmp_path) as world:
        url = world.start_peer("sglang-router", "cache_aware")
        order = [world.names[worker["url"]] for worker in get_json(f"{url}/workers")["workers"]]
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(world.ask, TEXT, max_tokens=150)  # about a second: the other prompt must go elsewhere
            world.wait_busy()
            other = world.ask(OTHER)
            first = busy.result()
        assert world.placed(first) == order[0]
        assert world.placed(other) == order[1]
        again, other_again = world.ask(TEXT + "more"), world.ask(OTHER + "and more")
        assert world.placed(again) == order[0]
        assert world.placed(other_again) == order[1]  # not the first at a tie, but the warm one
        assert again.cached_tokens > 0
        assert other_again.cached_tokens > 0


def test_a_prompt_of_token_ids_is_refused_as_the_preset_says(tmp_path):
    with fleet(tmp_path, replicas=1) as world:
        world.start_peer("sglang-router", "round_robin")
        with pytest.raises(HTTPError) as refused:
            world.ask(token_ids(1, 20))
        refused.value.close()
        assert refused.value.code == 422


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "manual"])
def test_every_other_policy_serves_chat_and_completions(tmp_path, policy):
    with fleet(tmp_path, replicas=2) as world:
        world.start_peer("sglang-router", policy)
        headers = {"X-SMG-Routing-Key": "k1"}
        placed = {world.placed(world.ask(f"{k} {OTHER}", headers=headers)) for k in range(4)}
        chat = world.ask([{"role": "user", "content": "hello"}], path="/v1/chat/completions", headers=headers)
        placed.add(world.placed(chat))
        if policy == "manual":
            assert len(placed) == 1
        if policy == "round_robin":
            assert placed == {"r0", "r1"}
