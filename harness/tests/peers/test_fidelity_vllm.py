"""Policies that imitate vllm-router 0.1.17 against the released binary, placement by placement."""

import asyncio
import contextlib
import random

import pytest
import zmq

from harness.tests.peers.live import plain
from harness.tests.peers.lockstep import (
    BLOCK,
    Agreement,
    InOrder,
    Ours,
    ReplicaCache,
    compare,
    sequence,
    token_prompt,
)
from harness.tests.peers.stub_workers import NAMES, SETTLE_S, replay, routed
from routers import POLICIES, TextPrompt, make_policy

pytestmark = pytest.mark.peers


def report(capsys, *found):
    with capsys.disabled():
        print("\n" + "\n".join(agreement.line() for agreement in found))


async def test_kv_aware_places_as_the_real_one_does(tmp_path, capsys):
    context = zmq.Context()
    caches = {name: ReplicaCache(name, 400, context) for name in NAMES}
    found = Agreement("vllm-kv-aware and vllm-router 0.1.17 kv_aware")
    events = {name: cache.endpoint for name, cache in caches.items()}
    prompts, batches = {}, 0
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, 0)
        async with routed(tmp_path, "vllm-router", "kv_aware", "--log-level", "debug", events=events) as (
            client,
            order,
            child,
        ):
            ours = Ours(make_policy("vllm-kv-aware", {}, InOrder(), BLOCK), order)
            await asyncio.sleep(0.3)  # subscriptions reach the publishers
            for op in sequence(11, requests=250):
                if op.kind == "start":
                    turn, decision = ours.choose(op.request_id, token_prompt(op))
                    real = await client.start(op.request_id, "/v1/completions", {"prompt": op.prompt}, {})
                    compare(found, op.request_id, decision, real)
                    ours.follow(turn, decision, real)
                    prompts[op.request_id] = op.prompt
                elif op.kind == "first":
                    await client.first(op.request_id)
                    name = ours.placed(op.request_id)
                    ours.first(op.request_id, caches[name].prefill(op.request_id, prompts[op.request_id]))
                    batches += 1
                    await _heard(child, batches)
                else:
                    await client.end(op.request_id)
                    ours.end(op.request_id)
                await asyncio.sleep(SETTLE_S)
    evicted = sum(cache.engine.snapshot().evicted_blocks for cache in caches.values())
    report(capsys, found)
    assert evicted > 100
    assert not found.different, "\n".join(found.different[:10])
    assert not found.tied


async def _heard(child, batches):
    """The router logs every batch that it has applied."""
    for _ in range(1000):
        if child.log.read_bytes().count(b"kv_index live sequence advanced") >= batches:
            return
        await asyncio.sleep(0.003)
    raise AssertionError(f"the router heard fewer than {batches} batches:\n{plain(child.log)[-2000:]}")


KEY_HEADERS = ("x-session-id", "x-user-id", "x-tenant-id", "x-correlation-id", "x-request-id", "x-trace-id")


FIELD_TEXTS = (
    "hello\nuser: u*\nbye",
    'a line of JSON: {"user": "u* v", "x": 1}',
    "the superuser: u*, and more",
    "session_id: s* user:\tu*",
    "user_id: u* session_id: s*",
    '{"session_params": {"session_id": "t*"}, "user": "u*"}',
    "session_params: {session_id: t*} user: u*",  # without its quotes it is none
    "user:, session_id: s*",
    "user is here; user: u*",  # no colon follows the first one
    "User: u*",
    "user=u*",
    f"{'x' * 200} user: {{u*}}",
)
"""Prompts in which the router finds a field, or just misses one; `*` is a number."""


def keyed_requests(seed, count):
    """(id, path, body, headers, prompt of ours): every kind of key that the router knows, and none."""
    rng = random.Random(seed)
    for k in range(count):
        kind = rng.choice(["header", "header", "two headers", "text", "long text", "field", "chat", "chat header"])
        headers = {}
        if "header" in kind:
            for name in rng.sample(KEY_HEADERS, 2 if kind == "two headers" else 1):
                headers[name] = f"key-{rng.randrange(60)}"
        text = f"prompt {rng.randrange(60)}"
        if kind == "long text":
            text = f"{rng.randrange(40)} " * 80
        elif kind == "field":
            text = rng.choice(FIELD_TEXTS).replace("*", str(rng.randrange(40)))
        if kind.startswith("chat"):
            body = {"messages": [{"role": "user", "content": text}], "user": f"u{k}"}
            yield f"q{k}", kind, "/v1/chat/completions", body, headers, TextPrompt(text)
        else:
            yield f"q{k}", kind, "/v1/completions", {"prompt": text}, headers, TextPrompt(text)


@pytest.mark.parametrize(
    ("theirs", "policy"), [("consistent_hash", "vllm-consistent-hash"), ("sticky_least_loaded", "sticky-least-loaded")]
)
async def test_session_policies_place_as_the_real_ones_do(tmp_path, capsys, theirs, policy):
    found: dict[str, Agreement] = {}
    async with routed(tmp_path, "vllm-router", theirs) as (client, order, _):
        ours = Ours(make_policy(policy, {}, InOrder(), BLOCK), order)
        for request_id, kind, path, body, headers, prompt in keyed_requests(3, 300):
            ours.path = path
            turn, decision = ours.choose(request_id, prompt, headers.get("x-session-id"), headers)
            real = await client.start(request_id, path, body, headers)
            title = f"{policy} and vllm-router 0.1.17 {theirs}, {kind}"
            compare(found.setdefault(kind, Agreement(title)), request_id, decision, real)
            ours.follow(turn, decision, real)
            await client.end(request_id)
            ours.end(request_id)
    report(capsys, *found.values())
    assert not [line for agreement in found.values() for line in agreement.different[:3]]


async def test_round_robin_takes_turns_as_the_real_one_does(tmp_path, capsys):
    found = Agreement("round-robin and vllm-router 0.1.17 round_robin")
    async with routed(tmp_path, "vllm-router", "round_robin") as (client, order, _):
        ours = Ours(make_policy("round-robin", {}, InOrder(), BLOCK), order)
        for k in range(40):
            turn, decision = ours.choose(f"q{k}", TextPrompt("x"))
            real = await client.start(f"q{k}", "/v1/completions", {"prompt": "x"}, {})
            compare(found, f"q{k}", decision, real)
            ours.follow(turn, decision, real)
            await client.end(f"q{k}")
            ours.end(f"q{k}")
    report(capsys, found)
    assert not found.different


async def test_power_of_two_never_takes_the_single_busiest(tmp_path, capsys):
    """Both draw their pairs, so placements agree by chance only; the busier of a pair never wins in either."""
    found = Agreement("power-of-two and vllm-router 0.1.17 power_of_two")
    busiest = []
    async with routed(tmp_path, "vllm-router", "power_of_two") as (client, order, _):
        ours = Ours(make_policy("power-of-two", {}, random.Random(5), BLOCK), order)

        def check(request_id, decision, real):
            compare(found, request_id, decision, real)
            loads = {name: view.in_flight for name, view in ours.views.items()}
            if list(loads.values()).count(max(loads.values())) == 1:
                busiest.extend(name for name in (decision.replica, real) if loads[name] == max(loads.values()))

        ops = sequence(13, requests=200, sessions=12, in_flight=9)
        await replay(ops, client, ours, lambda op: TextPrompt("x"), lambda op: {"prompt": "x"}, check)
    report(capsys, found)
    assert not busiest


async def test_cache_aware_places_as_the_real_one_does(tmp_path, capsys):
    if "vllm-cache-aware" not in POLICIES:
        pytest.skip("no policy vllm-cache-aware is registered")
    found = Agreement("vllm-cache-aware and vllm-router 0.1.17 cache_aware")
    limits = {"balance_abs_threshold": 2, "balance_rel_threshold": 1.2}
    args = [f"--{key.replace('_', '-')}={value}" for key, value in limits.items()]
    async with routed(tmp_path, "vllm-router", "cache_aware", *args) as (client, order, _):
        ours = Ours(make_policy("vllm-cache-aware", limits, InOrder(), BLOCK), order)
        ops = sequence(17, requests=300, sessions=12, in_flight=9)
        await replay(
            ops, client, ours, token_prompt, lambda op: {"prompt": op.prompt}, lambda *each: compare(found, *each)
        )
    report(capsys, found)
    assert not found.different, "\n".join(found.different[:10])
