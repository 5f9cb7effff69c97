"""What a real replica reports of its cache, read by the routers' own parser, is what its engine then finds in it."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from harness.processes import PYTHON, Children, free_ports, wait_ready
from routers import Router, TokenPrompt, TurnView, make_policy
from routers.prefix_poll import parse_prefix_state

BLOCK = 16
BLOCKS = 160  # few enough that later conversations push earlier ones out
FORMS = ("top-k", "bloom")


class Asker:
    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.load(answer))

    def report(self, form: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/prefix_cache_state?form={form}", timeout=10) as answer:
            return bytes(answer.read())


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    with Children(tmp_path_factory.mktemp("replica")) as children:
        (port,) = free_ports(1)
        command = (
            *PYTHON, "-m", "mock_engine", "--host", "127.0.0.1", "--port", str(port), "--mock-speedup", "20",
            "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048", "--enable-prompt-tokens-details",
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        wait_ready(children.start("replica", command), f"{url}/health", 30)
        yield Asker(url)


def conversations(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """(conversation, tokens that its next turn adds), interleaved; three system prompts are shared by all."""
    systems = [[5_000 + 1_000 * at + token for token in range(250)] for at in range(3)]
    fresh = 10_000
    for turn in range(4):
        for talk in rng.sample(range(6), 6):
            length = rng.randrange(20, 150)
            added = list(range(fresh, fresh + length))
            fresh += length
            yield talk, (systems[talk % 3] + added if turn == 0 else added)


def believed(router: Router, ids: list[int]) -> int:
    decision = router.policy.choose(TurnView(request_id="q", prompt=TokenPrompt(ids)), router.fleet(0))
    return decision.believed_hit_tokens or 0


def test_the_reported_prefixes_are_those_that_the_engine_hits(replica: Asker) -> None:
    """A filter names every block, so belief and truth are equal; a list names ends only and never promises more."""
    readers = {
        form: Router(make_policy("reported-prefixes", {"min_prefix_tokens": 0, "report": form}), ["r0"])
        for form in FORMS
    }
    history: dict[int, list[int]] = {}
    hits, listed = [], 0
    for talk, added in conversations(random.Random(7)):
        prompt = history.get(talk, []) + added
        if len(prompt) % BLOCK == 0:
            prompt.append(prompt[-1])  # the engine never takes a whole prompt from its cache
        promises = {}
        for form, reader in readers.items():
            reader.reported_prefixes(parse_prefix_state(replica.report(form), "r0", BLOCK, 0))
            promises[form] = believed(reader, prompt)
        answer = replica.post({"prompt": prompt, "max_tokens": 30, "seed": talk, "return_token_ids": True})
        hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert promises["bloom"] == hit
        assert promises["top-k"] <= hit
        listed += 0 < promises["top-k"] == hit
        hits.append(hit)
        history[talk] = prompt + answer["choices"][0]["token_ids"]
    assert len(set(hits)) > 8, "conversations were cold, warm, and cut short by evictions"
    assert 0 in hits
    assert listed >= 6, "a conversation that goes on continues a listed prefix"


def test_a_report_that_says_nothing_new_costs_nothing_to_take(replica: Asker) -> None:
    replica.post({"prompt": [9] * 300, "max_tokens": 2})
    for token, form in enumerate(FORMS, start=7):
        first = replica.report(form)
        assert replica.report(form) == first
        replica.post({"prompt": [9] * 300, "max_tokens": 2})
        assert replica.report(form) == first, "a request that only hits changes nothing"
        known = parse_prefix_state(first, "r0", BLOCK, 0)
        replica.post({"prompt": [token] * 300, "max_tokens": 2})
        assert parse_prefix_state(replica.report(form), "r0", BLOCK, 0).generation > known.generation
