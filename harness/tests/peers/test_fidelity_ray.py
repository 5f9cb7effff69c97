"""`ray-consistent-hash` and `ray-prefix-affinity` against the router classes of Ray 2.60.0 themselves, decision by
decision, without a cluster."""

import random
from types import SimpleNamespace

import pytest

from harness.tests.peers.lockstep import BLOCK, Agreement, Ours, sequence
from routers import FleetView, ReplicaAdded, ReplicaRemoved, ReplicaView, TextPrompt, TurnView, make_policy

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def ray():
    reason = "Ray is not installed: pip install 'ray[serve]==2.60.0' mmh3"
    return SimpleNamespace(
        router=pytest.importorskip("ray.serve.experimental.consistent_hash_router", reason=reason),
        common=pytest.importorskip("ray.serve._private.common", reason=reason),
    )


class RayRing:
    """Ray's router with its replicas given by hand: ring, ranking and choice are its own code."""

    def __init__(self, ray):
        self._ray = ray
        self._deployment = ray.common.DeploymentID(name="llm")
        self._router = object.__new__(ray.router.ConsistentHashRouter)
        self._router._deployment_id = self._deployment
        self._router._num_virtual_nodes = ray.router.DEFAULT_NUM_VIRTUAL_NODES
        self._router._num_fallback_replicas = ray.router.DEFAULT_NUM_FALLBACK_REPLICAS

    def set(self, names):
        ids = {self._ray.common.ReplicaID(unique_id=name, deployment_id=self._deployment): name for name in names}
        self._router._replicas = {replica_id: SimpleNamespace(name=name) for replica_id, name in ids.items()}
        self._router._rebuild_ring(frozenset(ids))

    async def choose(self, session_id, request_id, full):
        """The first of the ranked replicas that takes the request; None when all that may be tried are full."""
        metadata = SimpleNamespace(session_id=session_id, internal_request_id=request_id)
        pending = SimpleNamespace(metadata=metadata, routing_context=SimpleNamespace())
        ranks = await self._router.choose_replicas(list(self._router._replicas.values()), pending)
        return next((rank[0].name for rank in ranks if rank[0].name not in full), None)


async def test_the_ring_places_as_ray_does_through_changes_and_full_replicas(ray, capsys):
    rng = random.Random(23)
    real, ours = RayRing(ray), make_policy("ray-consistent-hash", {}, random.Random(0), BLOCK)
    found = Agreement("ray-consistent-hash and Ray 2.60.0 ConsistentHashRouter")
    nobody, names = 0, []

    def change(joined=(), left=()):
        for name in joined:
            names.append(name)
            ours.observe(ReplicaAdded(name, 0))
        for name in left:
            names.remove(name)
            ours.observe(ReplicaRemoved(name, 0))
        real.set(names)

    change(joined=[f"replica-{k}" for k in range(5)])
    for k in range(2000):
        if k % 400 == 200:
            change(joined=[f"late-{k}"])
        elif k % 400 == 399:
            change(left=[rng.choice(names)])
        session = f"session-{rng.randrange(300)}" if rng.random() < 0.8 else None
        full = set(rng.sample(names, rng.choice([0, 0, 0, 1, 2, 4])))
        fleet = FleetView([ReplicaView(name=name) for name in names if name not in full])
        mine = ours.choose(TurnView(request_id=f"q{k}", session_id=session), fleet)
        theirs = await real.choose(session, f"q{k}", full)
        if theirs is None:  # Ray waits and tries again, ours leaves the ring
            nobody += 1
            assert mine.rule == "no-owner"
        elif mine.replica == theirs:
            found.same += 1
        else:
            found.different.append(f"q{k}: Ray {theirs}, ours {mine.replica} ({mine.reason})")
    with capsys.disabled():
        print(f"\n{found.line()}; {nobody} times all that Ray may try were full")
    assert not found.different, "\n".join(found.different[:10])


class LocalActor:
    """A Ray actor handle whose calls happen at once, here."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._target, name))


class RayPrefix:
    """Ray's prefix router over its own tree; queue lengths are given by hand."""

    def __init__(self, ray, monkeypatch, names, **options):
        package = "ray.llm._internal.serve.routing_policies.prefix_aware"
        module = pytest.importorskip(f"{package}.prefix_aware_router", reason="pip install 'ray[serve]==2.60.0'")
        tree = pytest.importorskip(f"{package}.prefix_tree").PrefixTree()
        monkeypatch.setattr(module.ray, "get", lambda value: value)
        deployment = ray.common.DeploymentID(name="llm")
        self.ids = {name: ray.common.ReplicaID(unique_id=name, deployment_id=deployment) for name in names}
        self.queues = dict.fromkeys(names, 0)
        by_id = {replica_id: name for name, replica_id in self.ids.items()}
        self._router = object.__new__(module.PrefixCacheAffinityRouter)
        self._router.initialize_state(tree_actor=LocalActor(tree), **options)
        self._router._replicas = {
            replica_id: SimpleNamespace(replica_id=replica_id, max_ongoing_requests=10**9, name=name)
            for replica_id, name in by_id.items()
        }
        self._router._use_replica_queue_len_cache = True
        self._router._replica_queue_len_cache = SimpleNamespace(get=lambda key: self.queues[by_id[key]])
        tree.add_tenants([replica_id.to_full_id_str() for replica_id in by_id], 0.0)

    async def group(self, text):
        """Names among which the shortest queue is taken; none where Ray falls back to its pair."""
        (group,) = await self._router._prefix_match_best_replicas(_pending(text), list(self._router._replicas.values()))
        return [replica.name for replica in group]

    def routed(self, text, name):
        self._router.on_request_routed(_pending(text), self.ids[name], None)


def _pending(text):
    return SimpleNamespace(args=[SimpleNamespace(prompt=text)])


@pytest.mark.parametrize("threshold", [None, 2])
async def test_the_prefix_router_places_as_ray_does(ray, monkeypatch, capsys, threshold):
    names = [f"replica-{k}" for k in range(4)]
    options = {} if threshold is None else {"imbalanced_threshold": threshold}
    real = RayPrefix(ray, monkeypatch, names, **options)
    ours = Ours(make_policy("ray-prefix-affinity", options, random.Random(3), BLOCK), dict.fromkeys(names))
    found = Agreement(f"ray-prefix-affinity and Ray 2.60.0 PrefixCacheAffinityRouter, imbalanced_threshold {threshold}")
    pairs = 0
    for op in sequence(29, requests=600, sessions=12, in_flight=9):
        if op.kind == "start":
            text = " ".join(f"wörd{token}" for token in op.prompt)
            turn, decision = ours.choose(op.request_id, TextPrompt(text))
            group = await real.group(text)
            shortest = [name for name in group if real.queues[name] == min(real.queues[n] for n in group)]
            if not group:
                pairs += 1
                assert decision.rule in ("imbalanced", "pair"), f"{op.request_id}: Ray draws a pair, ours {decision}"
            elif decision.replica == shortest[0]:
                found.same += 1
            elif decision.replica in shortest:
                found.tied += 1
            else:
                found.different.append(f"{op.request_id}: Ray {group}, ours {decision.replica} ({decision.reason})")
            chosen = shortest[0] if group else decision.replica
            ours.follow(turn, decision, chosen)
            real.routed(text, chosen)
            real.queues[chosen] += 1
        elif op.kind == "first":
            ours.first(op.request_id)
        else:
            real.queues[ours.placed(op.request_id)] -= 1
            ours.end(op.request_id)
    with capsys.disabled():
        print(f"\n{found.line()}; {pairs} times both drew a pair at random")
    assert (pairs > 0) == (threshold is not None)
    assert not found.different, "\n".join(found.different[:10])
