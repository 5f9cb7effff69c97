"""Faults of routers in the field: each shown as the failure it causes, and absent unless asked for."""

import random

import aiohttp
import msgspec
import pytest

from routers import (
    HashedPrompt,
    KvEvents,
    OptionError,
    Router,
    RouterFaults,
    Stored,
    TextPrompt,
    TokenPrompt,
    TurnView,
    faulty_prompt,
    local_block_hashes,
    make_policy,
    parse_faults,
    policy_names,
)
from routers.body import cut_body, prompt_ids, prompt_text, read_body
from routers.proxy import ProxyConfig
from routers.wire import Batch, Skipped, WireStored, to_events

IDS = list(range(10_000, 10_320))  # 20 blocks, six bytes an id with its comma


def test_faults_are_read_and_named_alike():
    faults = parse_faults(["body-truncate-bytes=4096", "ignore-extra-keys"])
    assert faults == RouterFaults(body_truncate_bytes=4096, ignore_extra_keys=True)
    assert faults.names() == ["body-truncate-bytes=4096", "ignore-extra-keys"]
    assert not parse_faults([])
    assert faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("body-truncate-bytes", "write body-truncate-bytes=65536"),
        ("body-truncate-bytes=x", "lacks its number"),
        ("breaker-on-client-errors", "write breaker-on-client-errors=10"),
        ("breaker-on-client-errors=0", "give at least 1"),
        ("body-truncate-bytes=0", "give at least 1"),
        ("template-mismatch=1", "takes no value"),
        ("gremlins", "choose from body-truncate-bytes=N, breaker-on-client-errors=N, template-mismatch"),
    ],
)
def test_a_fault_that_does_not_exist_lists_those_that_do(text, message):
    with pytest.raises(OptionError, match=message):
        parse_faults([text])


# -- reading the first bytes of a body ---------------------------------------------------------------------------


def cut(value, kept):
    raw = msgspec.json.encode(value)
    return cut_body(read_body(raw), raw, kept)


def test_a_cut_list_of_ids_keeps_its_beginning_and_small_fields_survive():
    body = cut({"model": "m", "prompt": IDS, "max_tokens": 7}, 100)
    assert prompt_ids(body) == IDS[: len(prompt_ids(body))]
    assert 10 < len(prompt_ids(body)) < 16
    assert (body.model, body.max_tokens) == ("m", 7)


def test_a_cut_text_is_a_beginning_of_it():
    text = "häßlich " * 50
    for kept in range(20, 60):
        found = prompt_text(cut({"prompt": text}, kept))
        assert text.startswith(found)
        assert len(found.encode()) <= kept
    assert prompt_text(cut({"prompt": text}, 10_000)) == text


def test_cut_messages_lose_the_last_ones():
    messages = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "u" * 500}]
    found = prompt_text(cut({"messages": messages}, 200))
    assert found.startswith("s" * 50 + "\n" + "u" * 10)
    assert len(found) < 200
    assert prompt_text(cut({"messages": messages}, 30)).startswith("s")


def test_a_prompt_of_ids_in_a_list_of_its_own_is_cut_too():
    found = prompt_ids(cut({"prompt": [IDS]}, 200))
    assert found == IDS[: len(found)]
    assert 20 < len(found) < 40


# -- the failures ------------------------------------------------------------------------------------------------


async def ask(service, body, **headers):
    url = f"{service.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200


def knows(service, ids, salt=None, ignore=False):
    """The replica stored these tokens' blocks, as its events would say through this router's eyes."""
    count = len(ids) // 16
    event = WireStored(
        block_hashes=tuple(range(1, count + 1)),
        parent_block_hash=None,
        token_ids=tuple(ids[: 16 * count]),
        block_size=16,
        extra_keys=((salt,), *(None,) * (count - 1)) if salt else None,
    )
    events = to_events(Batch(1.0, (event,), 0), 16, Skipped(), ignore_extra_keys=ignore)
    service.router.kv_events("r0", events, 0)


def logged(path):
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("faults", "tokens"), [(RouterFaults(), 320), (RouterFaults(body_truncate_bytes=600), 98)])
async def test_with_truncation_a_long_prompt_is_scored_on_its_beginning(fleet, router_for, tmp_path, faults, tokens):
    replicas = await fleet(1)
    log = tmp_path / "log"
    service = await router_for(replicas, policy="pure-kv-affinity", log_file=log, proxy=ProxyConfig(faults=faults))
    knows(service, IDS)
    await ask(service, {"prompt": IDS})
    await service.close()
    (row,) = logged(log)
    assert row["prompt_tokens"] == pytest.approx(tokens, abs=1)
    assert row["believed_hit_tokens"] == 16 * (tokens // 16)
    assert len(replicas[0].seen[0][3]) > 1500  # the request itself went on whole


@pytest.mark.parametrize(("faults", "believed"), [(RouterFaults(), 80), (RouterFaults(template_mismatch=True), 0)])
async def test_with_another_template_no_block_ever_matches(fleet, router_for, tmp_path, faults, believed):
    replicas = await fleet(1)
    log = tmp_path / "log"
    # The engine's template puts three tokens in front of a chat.
    replicas[0].tokenizer = lambda question: [*([1, 2, 3] if "messages" in question else []), *range(100, 180)]
    service = await router_for(replicas, policy="pure-kv-affinity", log_file=log, proxy=ProxyConfig(faults=faults))
    knows(service, [1, 2, 3, *range(100, 180)])
    await ask(service, {"messages": [{"role": "user", "content": "hello"}]})
    assert service.state()["faults"] == faults.names()
    await service.close()
    (row,) = logged(log)
    assert row["believed_hit_tokens"] == believed
    assert row["prompt_tokens"] in (80, 83)  # nothing else looks wrong


@pytest.mark.parametrize(
    ("policy", "fault", "ignore"),
    [("pure-kv-affinity", False, False), ("pure-kv-affinity", True, True), ("dynamo-kv", False, True)],
)
async def test_without_extra_keys_one_tenants_blocks_look_like_anothers(
    fleet, router_for, tmp_path, policy, fault, ignore
):
    replicas = await fleet(1)
    log = tmp_path / "log"
    proxy = ProxyConfig(faults=RouterFaults(ignore_extra_keys=fault))
    service = await router_for(replicas, policy=policy, log_file=log, proxy=proxy)
    assert service.router.heeds_salts is not ignore
    knows(service, IDS, salt="tenant-a", ignore=ignore)
    for salt in ("tenant-a", "tenant-b", None):
        await ask(service, {"prompt": IDS, "cache_salt": salt})
    await service.close()
    assert [row["believed_hit_tokens"] for row in logged(log)] == ([320, 320, 320] if ignore else [320, 0, 0])


def test_of_the_imitated_routers_dynamo_alone_hashes_tokens_alone():
    blind = [name for name in policy_names() if not Router(make_policy(name)).heeds_salts]
    assert blind == ["dynamo-approx", "dynamo-kv", "dynamo-load-aware"]


def shares(policy, *, broken, holder=None):
    """Field case BL-04: 480 requests that share a beginning, 8 replicas, nothing ends. The largest share of any, and
    the router; `holder` said that it has the beginning."""
    options = {"ties": "first"} if policy == "least-requests" else {}
    one = Router(
        make_policy(policy, options, random.Random(1)),
        [f"r{i}" for i in range(8)],
        faults=RouterFaults(untracked_load=broken),
    )
    beginning = list(range(400))
    if holder:
        hashes = tuple(local_block_hashes(beginning, 16).tolist())
        one.kv_events(holder, (Stored(hashes, None, hashes, 16),), 0)
    for number in range(480):
        text = "system prompt " * 40 + str(number)
        own = [1000 * (1 + number), *range(30)] * 10
        tokens = TokenPrompt([*beginning, *own], text)
        one.route(TurnView(request_id=f"q{number}", prompt=tokens), number)
        one.first_token(f"q{number}", number)
    return max(one.placements.values()) / 480, one


@pytest.mark.parametrize("policy", ["vllm-cache-aware", "smg-cache-aware", "least-requests"])
def test_load_that_is_never_counted_gives_everything_to_one_replica(policy):
    assert shares(policy, broken=True)[0] == 1.0
    assert shares(policy, broken=False)[0] < 0.5


@pytest.mark.parametrize("policy", ["dynamo-kv", "vllm-kv-aware", "stack-load-aware"])
def test_load_that_is_never_counted_leaves_a_policy_that_books_its_own_with_belief_alone(policy):
    share, one = shares(policy, broken=True, holder="r3")
    assert (share, set(one.placements)) == (1.0, {"r3"})
    assert shares(policy, broken=False, holder="r3")[0] < 0.5


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "clairvoyant"])
def test_a_router_that_counts_no_load_owes_none_and_frees_none(policy):
    _, one = shares(policy, broken=True)
    assert one.in_flight == 480
    assert one.own_loads() == {}
    assert all(one.policy.owed(f"r{i}") == (0, 0) for i in range(8))
    for number in range(480):
        if number % 3:
            one.finished(f"q{number}", 7, 1000)
        else:
            one.failed(f"q{number}", 1000)
    assert one.in_flight == 0
    assert all(one.policy.owed(f"r{i}") == (0, 0) for i in range(8))
    assert all((view.in_flight, view.in_flight_tokens) == (0, 0) for view in one.fleet(2000))


# -- the same on symbolic prompts --------------------------------------------------------------------------------


def test_a_symbolic_prompt_suffers_the_same():
    prompt = TokenPrompt(IDS)
    cut_prompt = faulty_prompt(prompt, RouterFaults(body_truncate_bytes=600))
    assert cut_prompt.tokens == 100
    assert list(cut_prompt.block_hashes(16)) == list(prompt.block_hashes(16))[:6]
    assert list(cut_prompt.token_ids()) == IDS[:100]
    other = faulty_prompt(prompt, RouterFaults(template_mismatch=True))
    assert other.tokens == 320
    assert not set(other.block_hashes(16)) & set(prompt.block_hashes(16))
    assert len(other.token_ids()) == 320
    assert faulty_prompt(prompt, RouterFaults(ignore_extra_keys=True)) is prompt
    assert faulty_prompt(prompt, RouterFaults(body_truncate_bytes=10**6)) is prompt
    text = faulty_prompt(HashedPrompt(32, [1, 2], 16), RouterFaults(body_truncate_bytes=96))
    assert (text.tokens, list(text.block_hashes(16)), text.text()) == (16, [1], None)


def test_a_cut_text_prompt_keeps_its_first_characters():
    prompt = faulty_prompt(faulty_prompt(TextPrompt("abc"), RouterFaults()), RouterFaults(template_mismatch=True))
    assert prompt.text() == "abc"


# -- belief against what was served --------------------------------------------------------------------------------


def test_belief_is_counted_per_rule_against_what_was_served():
    one = Router(make_policy("pure-kv-affinity"), ["r0"])
    hashes = tuple(local_block_hashes(IDS, 16).tolist())
    one.policy.observe(KvEvents("r0", (Stored(hashes[:10], None, hashes[:10], 16),), 0))
    for number, served in enumerate((160, 96, 200, None)):
        one.route(TurnView(request_id=f"q{number}", prompt=TokenPrompt(IDS)), 0)
        one.finished(f"q{number}", 1, 0, cached_tokens=served)
    (belief,) = one.beliefs.values()
    assert list(one.beliefs) == ["longest-prefix"]
    assert msgspec.structs.asdict(belief) == {
        "requests": 3, "believed_tokens": 480, "served_tokens": 456, "phantom_tokens": 64, "missed_tokens": 40,
        "stale": 0,
    }  # fmt: skip


USAGE = b'"usage":{"prompt_tokens":320,"total_tokens":321,"prompt_tokens_details":{"cached_tokens": 96}}'


@pytest.mark.parametrize(
    "chunks",
    [
        [
            b'data: {"choices":[{"text":"\\"cached_tokens\\": 7"}]}\n\n',
            b"data: {" + USAGE + b"}\n\n",
            b"data: [DONE]\n\n",
        ],
        [b'{"choices":[{"text":"' + b"x" * 9000 + b'"}],' + USAGE + b"}"],
        [b"data: {" + USAGE[:-12], USAGE[-12:] + b"}\n\ndata: [DONE]\n\n"],
    ],
)
async def test_what_was_served_is_read_from_the_end_of_the_answer(fleet, router_for, chunks):
    (replica,) = await fleet(1)

    async def answer(request, body):
        response = aiohttp.web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    replica.answer = answer
    service = await router_for([replica], policy="pure-kv-affinity")
    knows(service, IDS)
    await ask(service, {"prompt": IDS})
    assert service.state()["beliefs"] == {
        "longest-prefix": {
            "requests": 1, "believed_tokens": 320, "served_tokens": 96, "phantom_tokens": 224, "missed_tokens": 0,
            "stale": 0,
        }
    }  # fmt: skip


async def test_an_answer_without_usage_counts_for_nothing(fleet, router_for):
    replicas = await fleet(1)
    service = await router_for(replicas, policy="pure-kv-affinity")
    await ask(service, {"prompt": IDS})
    assert service.state()["beliefs"] == {}
