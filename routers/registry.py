"""Where a policy's name leads: the visible dict below, the entry point group `routebench.policies`, or `file.py:Class`.

There is no fourth way, and no name means two things: an entry point that takes a built-in name is an error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from routers.config import Options, make_options
from routers.errors import OptionError, RoutersError
from routers.policies.affinity import PureKvAffinity
from routers.policies.base import BasePolicy
from routers.policies.blend import AffinityLoadScore, ReportedPrefixesPolicy
from routers.policies.dynamo import DynamoKv
from routers.policies.dynamo_presets import DynamoApprox, DynamoLoadAware
from routers.policies.gateway import SglangCacheAware, SmgCacheAware, VllmCacheAware
from routers.policies.llmd import LlmdApproxPrefix, LlmdPrecisePrefix
from routers.policies.load import LeastRequests, LeastTokens, PowerOfTwo, RandomChoice, RoundRobin
from routers.policies.prefix import PrefixHash
from routers.policies.ray import RayPrefixAffinity
from routers.policies.references import Clairvoyant, LowestCompletedQps
from routers.policies.rings import RayConsistentHash, VllmConsistentHash
from routers.policies.session import SessionModulo, SessionRing, SessionRingValve
from routers.policies.stack import StackLoadAware, StackPrefixAware
from routers.policies.sticky import StickyLeastLoaded, VerlStickyInflight
from routers.policies.vllm import VllmKvAware
from routers.promises import check_class, check_needs, defined_at, told
from routers.view import Policy, Signal

ENTRY_POINTS = "routebench.policies"

POLICIES: dict[str, type[BasePolicy]] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
    "power-of-two": PowerOfTwo,
    "session-modulo": SessionModulo,
    "session-ring": SessionRing,
    "session-ring-valve": SessionRingValve,
    "ray-consistent-hash": RayConsistentHash,
    "vllm-consistent-hash": VllmConsistentHash,
    "sticky-least-loaded": StickyLeastLoaded,
    "verl-sticky-inflight": VerlStickyInflight,
    "prefix-hash": PrefixHash,
    "ray-prefix-affinity": RayPrefixAffinity,
    "sglang-cache-aware": SglangCacheAware,
    "smg-cache-aware": SmgCacheAware,
    "vllm-cache-aware": VllmCacheAware,
    "stack-prefix-aware": StackPrefixAware,
    "llmd-approx-prefix": LlmdApproxPrefix,
    "dynamo-approx": DynamoApprox,
    "reported-prefixes": ReportedPrefixesPolicy,
    "pure-kv-affinity": PureKvAffinity,
    "dynamo-kv": DynamoKv,
    "dynamo-load-aware": DynamoLoadAware,
    "vllm-kv-aware": VllmKvAware,
    "llmd-precise-prefix": LlmdPrecisePrefix,
    "stack-load-aware": StackLoadAware,
    "affinity-load-score": AffinityLoadScore,
    "clairvoyant": Clairvoyant,
    "lowest-completed-qps": LowestCompletedQps,
}


def register_policy(name: str, policy: type[BasePolicy]) -> None:
    """Add one from inside the process. A name that is taken stays with its owner."""
    if name in POLICIES:
        raise OptionError(f"policy name {name!r} is taken by {POLICIES[name].__name__}: give yours another name")
    POLICIES[name] = policy


def make_policy(
    name: str, options: Mapping[str, Any] | None = None, rng: random.Random | None = None, block_size: int = 16
) -> Policy:
    """`name` is `NAME`, `NAME:variant`, `file.py:Class`, or a name from the entry points.

    A policy's own options win over its variant's. Without `rng` ties are drawn from a generator seeded with 0.
    """
    kind, variant = find_policy(name)
    merged = {**variant, **(options or {})}
    chosen = make_options(getattr(kind, "Options", Options), merged, name)
    try:
        policy = kind(chosen, rng=rng if rng is not None else random.Random(0), block_size=block_size)
    except (RoutersError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a policy that exits must not look like a run that ended well
        raise OptionError(
            f"policy {name!r} cannot be made: {told(error, _file_of(kind))}; its __init__ "
            f"({defined_at(kind, '__init__')}) is called as __init__(options, rng=..., block_size=...)"
        ) from error
    check_needs(policy, name)
    return policy


def find_policy(name: str) -> tuple[type[BasePolicy], Mapping[str, Any]]:
    """The class a name stands for, and the options of its variant."""
    left, separator, right = name.rpartition(":")
    if separator and left.endswith(".py"):
        return _from_file(Path(left), right), {}
    if name.endswith(".py"):
        raise OptionError(f"policy {name!r} names a file but no class in it: write it as {name}:ClassName")
    left, _, variant = name.partition(":")
    kind = POLICIES.get(left) or _from_entry_point(left)
    if kind is None:
        raise OptionError(
            f"no policy named {left!r}: choose one of {', '.join(policy_names())}, "
            f"or give a class of your own as file.py:Class"
        )
    if not variant:
        return kind, {}
    variants = getattr(kind, "variants", {})
    if variant not in variants:
        choice = f"choose one of {', '.join(variants)}" if variants else f"it has none; write {left!r} alone"
        raise OptionError(f"policy {left!r} has no variant {variant!r}: {choice}")
    return kind, variants[variant]


def policy_names() -> list[str]:
    """Built-in names and those of installed entry points."""
    return [*POLICIES, *sorted(point.name for point in _entry_points() if point.name not in POLICIES)]


def policy_help(name: str) -> str:
    """One line on what the policy does."""
    kind, _ = find_policy(name)
    return getattr(kind, "about", "") or (kind.__doc__ or "").strip().partition("\n")[0] or "no description"


def refuse_oracle(policy: Policy, name: str) -> None:
    """For whoever drives a policy live: raises OptionError if only a simulation can serve it."""
    if Signal.ORACLE in policy.needs:
        raise OptionError(
            f"policy {name!r} knows true lengths and caches, which only a simulation can tell: "
            f"run it with --mode sim, or take another one here"
        )


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def _from_entry_point(name: str) -> type[BasePolicy] | None:
    for point in _entry_points():
        if point.name == name:
            try:
                found = point.load()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise OptionError(
                    f"policy {name!r} is announced by an entry point ({point.value}) that does not load: "
                    f"{told(error)}; reinstall its package"
                ) from error
            return _checked(found, f"entry point {name} = {point.value}")
    return None


def _from_file(path: Path, class_name: str) -> type[BasePolicy]:
    if not path.is_file():
        raise OptionError(f"policy file {path} does not exist: give its path from the working directory")
    module_name = f"routebench_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file that exits must not look like a run that ended well
        raise OptionError(f"policy file {path} fails when loaded: {told(error, str(path))}; mend it") from error
    if not hasattr(module, class_name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "choose")]
        own = [key for key in classes if getattr(module, key).__module__ == module_name]
        choice = f"choose one of {', '.join(own)}" if own else "it has no class with choose(turn, fleet) at all"
        raise OptionError(f"policy file {path} has no class {class_name!r}: {choice}")
    return _checked(getattr(module, class_name), f"{path}:{class_name}")


def _checked(found: object, where: str) -> type[BasePolicy]:
    check_class(found, where)
    return cast(type[BasePolicy], found)


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)
