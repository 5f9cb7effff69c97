"""What a replica says that it holds is what it holds, under names that a router can compute from tokens alone."""

from __future__ import annotations

import base64
from struct import pack
from typing import Any

import xxhash
from hypothesis import given, settings

from mock_engine import Engine
from mock_engine.prefix_report import BLOOM_HASHES, PrefixReport, ResidentPrefixes, bloom
from mock_engine.tests.serving import DEV, listening, serving
from mock_engine.tests.world import Log, World, advance_by_run_until, play, tokens_request, worlds


def token_hash(token_ids: list[int]) -> int:
    return int(xxhash.xxh3_64_intdigest(pack(f"<{len(token_ids)}I", *token_ids), seed=1337))


def contains(report: dict[str, Any], value: int) -> bool:
    """As a router reads the filter; written here a second time on purpose."""
    data = base64.b64decode(report["bits"])
    low, high = value % 2**32, (value >> 32) | 1
    places = [(low + i * high) % report["m"] for i in range(report["hashes"])]
    return all(data[place // 8] >> (place % 8) & 1 for place in places)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_it_knows_exactly_what_the_cache_holds(world: World) -> None:
    """Whatever is stored twice, announced again, evicted or cut short."""
    engine = world.engine()
    size = world.config.block_size
    cache = engine._scheduler.pool.cache
    known = ResidentPrefixes(size, lambda key: bool(cache.longest((key,), 1)))
    tokens: dict[bytes, list[int]] = {}  # of the whole prefix that ends with this block

    def advance(engine: Engine, horizon_us: int, log: Log) -> None:
        while engine._ready_ps < horizon_us * 1_000_000 and (step := engine.step(engine.ready_us)) is not None:
            for event in step.kv_events:
                before = tokens.get(getattr(event, "parent_block_hash", None), [])
                for at, key in enumerate(getattr(event, "block_hashes", ())):
                    if hasattr(event, "token_ids"):
                        before = tokens[key] = before + event.token_ids[at * size : (at + 1) * size]
            generation, held = known.generation, len(known)
            known.observe(step.kv_events)
            assert set(known._blocks) == cache.keys()
            assert generation != known.generation or held == len(known)
            log.add(step)
        longest = known.longest(1000, 0)
        followed = {known._blocks[key].parent for key in set(tokens) & cache.keys()}
        assert {row[2] for row in longest} == cache.keys() - followed
        assert all(row[:2] == (token_hash(tokens[row[2]]), len(tokens[row[2]])) for row in longest)
        assert set(known.token_hashes()) == {token_hash(tokens[key]) for key in set(tokens) & cache.keys()}

    play(world, tokens_request, advance, engine)


@settings(max_examples=30, deadline=None)
@given(worlds())
def test_an_unchanged_generation_means_an_unchanged_report(world: World) -> None:
    engine = world.engine()
    cache = engine._scheduler.pool.cache
    known = ResidentPrefixes(world.config.block_size, lambda key: bool(cache.longest((key,), 1)))
    seen: dict[int, list[Any]] = {}

    def advance(engine: Engine, horizon_us: int, log: Log) -> None:
        while engine._ready_ps < horizon_us * 1_000_000 and (step := engine.step(engine.ready_us)) is not None:
            known.observe(step.kv_events)
            now = [sorted(known.token_hashes()), known.longest(5, 0)]
            assert seen.setdefault(known.generation, now) == now

    play(world, tokens_request, advance, engine)
    advance_by_run_until(engine, 1, Log())


def test_a_filter_has_every_hash_and_few_others() -> None:
    inside = [token_hash([at]) for at in range(2000)]
    outside = [token_hash([at, at]) for at in range(2000)]
    data = bloom(inside, 20_000)
    report = {"bits": base64.b64encode(data).decode(), "hashes": BLOOM_HASHES, "m": 20_000}
    assert all(contains(report, value) for value in inside)
    assert sum(contains(report, value) for value in outside) < 60  # 1 % is expected


def test_an_empty_cache_has_an_empty_report() -> None:
    report = PrefixReport([ResidentPrefixes(16, lambda key: True)], 5)
    assert report.body("top-k") == {"generation": 0, "block_size": 16, "form": "top-k", "prefixes": []}
    assert not any(base64.b64decode(report.body("bloom")["bits"]))


KNOWN_PROMPTS = (list(range(2000, 2320)), [*range(2000, 2160), *range(7000, 7112)], [9] * 100)
KNOWN_TOP_K = {
    "generation": 3,
    "block_size": 16,
    "form": "top-k",
    "prefixes": [
        {"token_hash": 5637801577679984127, "tokens": 320, "blocks": 20, "block_hash": 14422865675947530505},
        {"token_hash": 5164312152339093750, "tokens": 272, "blocks": 17, "block_hash": 6382468232585956084},
    ],
}
KNOWN_BLOOM = {
    "generation": 3,
    "block_size": 16,
    "form": "bloom",
    "bits": (
        "ICI9AFECRIEJFgAIIBwABGBIgNAQjChihAAAIRgARMgQAASAAFKQCEIIcCIAAAQIIKAABCKhDBATogoCAkIEhAsYUACgQyxgiAEAARBAAEOYQAgA"
        "AwACCREAAEAAwAILAoCIBASghHFIAWEA0AEUoBdDKCUCUaQgAMKHHEoRoRA="
    ),
    "hashes": 7,
    "m": 1024,
}


async def test_the_report_of_a_known_cache_is_this_in_both_forms() -> None:
    """Of two prompts that share 160 tokens, and one that is too short for the list. Printed by asking the route."""
    async with serving() as client:
        for prompt in KNOWN_PROMPTS:
            await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert await client.get("/prefix_cache_state") == KNOWN_TOP_K
        assert await client.get("/prefix_cache_state?form=bloom") == KNOWN_BLOOM


async def test_the_route_lists_the_longest_prefixes_of_256_tokens_and_more() -> None:
    async with serving("--mock-report-top-k", "2") as client:
        prompts = [[at] * length for at, length in ((1, 300), (2, 600), (3, 200), (4, 400))]
        for prompt in prompts:
            await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        report = await client.get("/prefix_cache_state")
        assert [list(row) for row in report.pop("prefixes")[:1]] == [["token_hash", "tokens", "blocks", "block_hash"]]
        assert report == {"generation": 4, "block_size": 16, "form": "top-k"}
        rows = (await client.get("/prefix_cache_state"))["prefixes"]
        assert [(row["tokens"], row["blocks"]) for row in rows] == [(592, 37), (400, 25)]
        assert rows[0]["token_hash"] == token_hash(prompts[1][:592])
        assert rows[1]["token_hash"] == token_hash(prompts[3])


async def test_a_conversation_is_one_prefix_that_grows_with_its_answer() -> None:
    async with serving() as client:
        ask = {"prompt": list(range(1000, 1300)), "max_tokens": 40, "seed": 3, "return_token_ids": True}
        answer = (await client.post("/v1/completions", ask))["choices"][0]["token_ids"]
        (row,) = (await client.get("/prefix_cache_state"))["prefixes"]
        whole = [*ask["prompt"], *answer][:336]  # the last token is never computed
        assert (row["tokens"], row["token_hash"]) == (336, token_hash(whole))


async def test_the_filter_holds_every_block_boundary_and_forgets_with_the_cache() -> None:
    async with serving(env=DEV) as client:
        prompt = list(range(2000, 2100))
        await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        report = await client.get("/prefix_cache_state?form=bloom")
        assert list(report) == ["generation", "block_size", "form", "bits", "hashes", "m"]
        assert len(base64.b64decode(report["bits"])) * 8 == report["m"]
        assert all(contains(report, token_hash(prompt[:end])) for end in range(16, 97, 16))
        await client.post("/reset_prefix_cache")
        after = await client.get("/prefix_cache_state?form=bloom")
        assert after["generation"] > report["generation"]
        assert not contains(after, token_hash(prompt[:16]))


async def test_what_only_some_may_hit_is_not_told() -> None:
    async with serving("--lora-modules", "ad=/x") as client:
        for more in ({"cache_salt": "s"}, {"model": "ad"}):
            await client.post("/v1/completions", {"prompt": [5] * 400, "max_tokens": 40, **more})
        assert (await client.get("/prefix_cache_state"))["prefixes"] == []


async def test_ranks_report_together_and_a_restart_goes_on_counting() -> None:
    async with listening("--data-parallel-size", "2") as client:
        for rank in ("0", "1"):
            ask = {"prompt": [int(rank) + 1] * 320, "max_tokens": 1}
            await client.post("/v1/completions", ask, **{"X-data-parallel-rank": rank})
        before = await client.get("/prefix_cache_state")
        assert {row["token_hash"] for row in before["prefixes"]} == {token_hash([1] * 320), token_hash([2] * 320)}
        await client.post("/mock/restart")
        after = await client.get("/prefix_cache_state")
        assert after["prefixes"] == []
        assert after["generation"] > before["generation"]


async def test_another_form_is_a_bad_request() -> None:
    async with serving() as client:
        status, body, _ = await client.ask("GET", "/prefix_cache_state?form=trie")
        assert (status, body["error"]["param"]) == (400, "form")
        assert "top-k, bloom" in body["error"]["message"]


async def test_the_engines_hash_of_the_last_block_is_the_one_in_its_events() -> None:
    async with serving() as client:
        await client.post("/v1/completions", {"prompt": [5] * 256, "max_tokens": 1})
        (row,) = (await client.get("/prefix_cache_state"))["prefixes"]
        (end,) = client.replica.drivers[0].prefixes._ends
        assert isinstance(end, bytes)
        assert row["block_hash"] == int.from_bytes(end[-8:], "big")
