"""`dynamo-kv` against the selection service of ai-dynamo 1.4.2: every cost term of every decision, and the choice."""

import contextlib
import json
import random
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

from harness.dynamo_select import environment_of, wishes_body
from harness.processes import Children, free_ports, wait_ready
from harness.tests.peers.live import plain, require
from harness.tests.peers.lockstep import BLOCK, Agreement, Op, Ours, ReplicaCache, compare, sequence, token_prompt
from routers import Router, TokenPrompt, TurnView, make_policy
from routers.policies.dynamo_options import NO_WISHES, SELECT_HEADER, Wishes

pytestmark = pytest.mark.peers

FORMULA = re.compile(
    r'Formula for worker_id=(\d+) dp_rank=0 with ([\d.]+) effective cached blocks: ([\d.]+) = .* request_id="(\w+)"'
)
NAMES = ("w0", "w1", "w2", "w3")
WEIGHTS = {"overlap_score_credit": 0.5, "prefill_load_scale": 2.0, "decode_active_request_weight": 3.0}
LOAD_AWARE = {"overlap_score_credit": 0, "use_kv_events": False, "assume_kv_reuse": False}
CASES = {  # our policy, its options, what the service is told
    "defaults": ("dynamo-kv", {}, {}),
    "decay": ("dynamo-kv:decay", {}, {"overlap_score_credit_decay": 1.0}),
    "weights": ("dynamo-kv", WEIGHTS, WEIGHTS),
    "no-reuse": ("dynamo-kv", {"assume_kv_reuse": False}, {"assume_kv_reuse": False}),
    "load-aware": ("dynamo-load-aware", {}, LOAD_AWARE),
    "no-prefill": ("dynamo-kv", {"track_prefill_tokens": False}, {"track_prefill_tokens": False}),
    "wishes": ("dynamo-kv:decay", {}, {"overlap_score_credit_decay": 1.0}),
}


def wishes_for(rng):
    """What a request may ask for itself; a decay is read by both and heeded by neither."""
    override = {
        name: value
        for name, value in {
            "overlap_score_credit": rng.choice([0.0, 0.5, 1.5]),
            "prefill_load_scale": rng.choice([0.25, 3.0]),
            "assume_kv_reuse": False,
            "track_prefill_tokens": False,
            "overlap_score_credit_decay": 7.0,
        }.items()
        if rng.random() < 0.3
    }
    found = {"router_config_override": override} if override else {}
    place = rng.random()
    if place < 0.2:
        found["pinned_worker"] = rng.choice(NAMES)
    elif place < 0.5:
        found["allowed_worker_ids"] = tuple(rng.sample(NAMES, 2))
    return Wishes(**found)


class Service:
    def __init__(self, children, monkeypatch, options, caches, batched_tokens=None):
        monkeypatch.setenv("DYN_LOG", "debug")
        for key, value in environment_of(options).items():
            monkeypatch.setenv(key, value)
        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        self.child = children.start(
            "dynamo", [sys.executable, "-P", "-m", "dynamo.select_service", "--port", str(port)]
        )
        wait_ready(self.child, f"{self.url}/health", 30)
        for k, cache in enumerate(caches):
            self.call(
                "POST",
                "/workers",
                {
                    "worker_id": k,
                    "endpoint": f"http://{cache.name}",
                    "block_size": BLOCK,
                    "model_name": "m",
                    "kv_events_endpoint": cache.endpoint,
                    **({"max_num_batched_tokens": batched_tokens} if batched_tokens else {}),
                },
            )
        wait_ready(self.child, f"{self.url}/ready", 30)

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def select(self, op, wishes=NO_WISHES):
        body = {"selection_id": op.request_id, "model_name": "m", "token_ids": op.prompt}
        body |= wishes_body(wishes, NAMES)
        return self.call("POST", "/select_and_reserve", body)

    def overlap(self, prompt, worker):
        found = self.call("POST", "/overlap_scores", {"model_name": "m", "token_ids": prompt})
        return next(w["device_blocks"] for w in found["workers"] if w["worker_id"] == worker)

    def costs(self):
        """request -> worker -> (cost, cached blocks) as the service printed them."""
        found = {}
        for worker, cached, cost, request_id in FORMULA.findall(plain(self.child.log)):
            found.setdefault(request_id, {})[NAMES[int(worker)]] = (float(cost), float(cached))
        return found


@pytest.mark.parametrize("case", CASES)
def test_every_cost_equals_the_one_that_dynamo_prints(tmp_path, monkeypatch, capsys, case):
    require("dynamo-select")
    name, options, told = CASES[case]
    context = zmq.Context()
    caches = [ReplicaCache(name, 400, context) for name in NAMES]
    found = Agreement(f"{name} ({case}) and dynamo.select_service 1.4.2")
    policy = make_policy(name, options, random.Random(1), BLOCK)
    ours = Ours(policy, {cache.name: f"http://{cache.name}" for cache in caches})
    ops = sequence(7, requests=250)
    prompts, decisions, asked = {}, {}, random.Random(3)
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, 0)
        service = Service(stack.enter_context(Children(tmp_path)), monkeypatch, told, caches)
        time.sleep(0.3)  # subscriptions reach the publishers
        for op in ops:
            if op.kind == "start":
                wishes = wishes_for(asked) if case == "wishes" else NO_WISHES
                turn, decision = ours.choose(op.request_id, token_prompt(op), headers=headers_of(wishes))
                real = NAMES[service.select(op, wishes)["worker_id"]]
                compare(found, op.request_id, decision, real)
                ours.follow(turn, decision, real)
                prompts[op.request_id], decisions[op.request_id] = op.prompt, decision
            elif op.kind == "first":
                worker = NAMES.index(ours.placed(op.request_id))
                service.call("POST", f"/reservations/{op.request_id}/prefill_complete")
                ours.first(op.request_id, caches[worker].prefill(op.request_id, prompts[op.request_id]))
                if told.get("use_kv_events", True):
                    _settled(service, prompts[op.request_id], worker)
            else:
                service.call("DELETE", f"/reservations/{op.request_id}")
                ours.end(op.request_id)
        evicted = sum(cache.engine.snapshot().evicted_blocks for cache in caches)
        _check_costs(found, decisions, service)
    with capsys.disabled():
        print(f"\n{found.line()}; {evicted} blocks evicted on the way")
    assert evicted > 100
    assert not found.wrong_scores, "\n".join(found.wrong_scores[:10])
    assert not found.different, "\n".join(found.different[:10])


def _settled(service, prompt, worker):
    """The events of a prompt have arrived once the service counts all its blocks on that worker."""
    deadline = time.monotonic() + 3
    while service.overlap(prompt, worker) < len(prompt) // BLOCK:
        assert time.monotonic() < deadline, "the service never counted the blocks that were published"
        time.sleep(0.002)


def headers_of(wishes):
    return {SELECT_HEADER: msgspec.json.encode(wishes).decode()} if wishes != NO_WISHES else None


QUEUE = [  # request, blocks of its prompt, what it asks for
    ("first", 20, NO_WISHES),
    ("plain", 4, NO_WISHES),
    ("late", 4, NO_WISHES),
    ("jumps", 4, Wishes(priority_jump=100.0)),
    ("strict", 4, Wishes(strict_priority=2)),
    ("strict-late", 4, Wishes(strict_priority=2)),
    ("stricter", 4, Wishes(strict_priority=3, priority_jump=-5.0)),
    ("jumps-back", 4, Wishes(priority_jump=-100.0)),
]


def test_a_queue_lets_requests_go_in_the_order_in_which_dynamo_does(tmp_path, monkeypatch, capsys):
    """One worker, whose prefill budget the first request fills; each prefill that ends lets one more go."""
    require("dynamo-select")
    context = zmq.Context()
    cache = ReplicaCache(NAMES[0], 400, context)
    options = {"queue_threshold": 0.0, "max_num_batched_tokens": 64}
    ours = Router(make_policy("dynamo-kv", options, random.Random(1), BLOCK), [NAMES[0]])
    told, real = [], []
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, 0)
        service = Service(
            stack.enter_context(Children(tmp_path)), monkeypatch, {"queue_threshold": 0.0}, [cache], batched_tokens=64
        )
        threads = stack.enter_context(ThreadPoolExecutor(len(QUEUE)))

        def select(op, wishes):
            service.select(op, wishes)
            real.append(op.request_id)

        for place, (name, blocks, wishes) in enumerate(QUEUE):
            ids = tuple(range(1000 * place, 1000 * place + BLOCK * blocks))
            threads.submit(select, Op("start", name, ids), wishes)
            turn = TurnView(request_id=name, prompt=TokenPrompt(list(ids)), headers=headers_of(wishes))
            ours.submit(turn, 100_000 * place, lambda decision, name=name: told.append(name))
            time.sleep(0.1)
        for ended in range(len(QUEUE)):
            _until(lambda ended=ended: len(real) > ended)
            time.sleep(0.1)
            assert len(real) == len(told) == ended + 1
            service.call("POST", f"/reservations/{real[ended]}/prefill_complete")
            ours.first_token(told[ended], 1_000_000 + ended)
    with capsys.disabled():
        print(f"\nqueue of dynamo-kv and dynamo.select_service 1.4.2: let go in the order {', '.join(real)}")
    assert told == real


def _until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the service let nobody go"
        time.sleep(0.005)


def _check_costs(found, decisions, service):
    """Of a request that was pinned nothing is printed, as nothing is compared."""
    decisions = {name: decision for name, decision in decisions.items() if decision.rule != "pinned"}
    deadline = time.monotonic() + 5
    while len(costs := service.costs()) < len(decisions) or any(
        len(costs.get(request_id, ())) < len(decision.scores) for request_id, decision in decisions.items()
    ):
        assert time.monotonic() < deadline, f"the service printed costs of {len(costs)} of {len(decisions)} decisions"
        time.sleep(0.1)
    for request_id, decision in decisions.items():
        for name, (cost, cached) in costs[request_id].items():
            found.scores += 1
            if name not in decision.scores:
                found.wrong_scores.append(f"{request_id} {name}: printed {cost}, not considered by ours")
                continue
            if abs(cost - decision.scores[name]) > 0.0006:  # three decimals are printed
                found.wrong_scores.append(
                    f"{request_id} {name}: printed {cost} ({cached} cached), ours {decision.scores[name]}"
                )
