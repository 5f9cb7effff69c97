"""Real routers as data: how each is started in front of our replicas, and what it needs to be told.

A preset is a command template and a few facts; nothing here starts a process. Whoever does calls `peer_command` and
waits until `preset.ready_path` answers with a body that `all_healthy` accepts. A template's words may hold `{port}`,
`{worker_urls}`, `{kv_event_endpoints}` and the other names of `PLACEHOLDERS`. One word becomes one argument, lists with
commas, but for the names that end with `_each`. The odd thing: a scenario's own arguments come last, because each of
these programs lets the last win.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness.errors import UsageError, choose_from
from harness.processes import free_ports

PEERS_EXTRA = "pip install 'routebench[peers]'"
PLACEHOLDERS = {
    "host": "address to listen on",
    "port": "port to listen on",
    "metrics_port": "a second free port, for routers that must publish their own metrics somewhere",
    "worker_urls": "URLs of all replicas, with commas between them",
    "worker_urls_each": "the same, one argument each; a word of its own",
    "kv_event_endpoints": "ZeroMQ addresses of all replicas' KV events, with commas between them",
    "kv_event_endpoints_each": "the same, one argument each; a word of its own",
    "block_size": "the engines' KV block size in tokens",
    "model": "the model name that the replicas serve",
    "python": "the interpreter that runs us",
}
LOOPBACK = "127.0.0.1"
_EACH = "_each"
_WORD = re.compile(r"\{([a-z_]+)\}")

Template = tuple[str, ...]


class Replica(Protocol):
    """Where one replica is reached; `kv_events` is None for one that publishes nothing."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def kv_events(self) -> str | None: ...


class PeerPreset(msgspec.Struct, frozen=True, kw_only=True):
    """One real router. Templates are filled by `peer_command`."""

    name: str
    about: str
    package: str
    """What the extra installs, pinned to the release that the spec sheets describe."""
    module: str
    """An importable name that is there when the package is."""
    command: Template
    each_replica: Template = ()
    """Repeated for every replica; may also hold `{name}`, `{url}`, `{kv_events}` and `{replica}`, which is
    `NAME=URL[,events=ENDPOINT]`."""
    policy_flag: str | None = None
    """The option that names the routing policy; a variant (`vllm-router:kv_aware`) is its value."""
    policies: tuple[str, ...] = ()
    event_policies: tuple[str, ...] = ()
    """Policies that hear KV events, for which these are added:"""
    event_args: Template = ()
    event_args_each_replica: Template = ()
    variants: Mapping[str, Template] = {}
    """Variants that are not a policy but a set of arguments."""
    ready_path: str
    apis: tuple[str, ...] = ("completions-ids", "completions-text", "chat")
    """Which of the scenario's `load.api` it can carry."""
    may_ask_for_ids: bool = True
    """False where `return_token_ids` in a request changes how it is routed; a run must then not verify answers so."""
    keeps_log: bool = False
    """Takes `--log-file` and `--epoch-ns` and logs decisions as our own router does."""

    @property
    def choices(self) -> tuple[str, ...]:
        """What may stand behind the colon."""
        return (*self.policies, *self.variants)

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None and _has(self.module)

    @property
    def install_line(self) -> str:
        return f"{PEERS_EXTRA}  (or: pip install {self.package})"


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


PEERS: dict[str, PeerPreset] = {
    "vllm-router": PeerPreset(
        name="vllm-router",
        about="vLLM's router (Rust): token trees, KV events, rings; its default policy is cache_aware",
        package="vllm-router==0.1.17",
        module="vllm_router",
        command=(
            *("{python}", "-P", "-m", "vllm_router.launch_router", "--host", "{host}", "--port", "{port}"),
            *("--prometheus-host", "{host}", "--prometheus-port", "{metrics_port}", "--log-level", "warning"),
            *("--worker-urls", "{worker_urls_each}"),
        ),
        policy_flag="--policy",
        policies=(
            "cache_aware",
            "consistent_hash",
            "kv_aware",
            "power_of_two",
            "random",
            "round_robin",
            "sticky_least_loaded",
        ),
        event_policies=("kv_aware",),
        event_args=("--kv-event-model", "{model}", "--kv-event-block-size", "{block_size}"),
        event_args_each_replica=("--kv-event-source", "{url}={kv_events}"),
        may_ask_for_ids=False,  # kv_aware credits no prefix to a completion with a field that it does not know
        ready_path="/readiness",
    ),
    "sglang-router": PeerPreset(
        name="sglang-router",
        about="SGLang's model gateway (Rust): one tree of prompt text for all workers; default policy cache_aware",
        package="sglang-router==0.3.2",
        module="sglang_router",
        command=(
            *("{python}", "-P", "-m", "sglang_router.launch_router", "--host", "{host}", "--port", "{port}"),
            *("--prometheus-host", "{host}", "--prometheus-port", "{metrics_port}", "--log-level", "warn"),
            *("--worker-urls", "{worker_urls_each}"),
        ),
        policy_flag="--policy",
        policies=("cache_aware", "manual", "power_of_two", "random", "round_robin"),
        ready_path="/readiness",
        apis=("completions-text", "chat"),
    ),
    "dynamo-select": PeerPreset(
        name="dynamo-select",
        about="NVIDIA Dynamo's selection service, asked by a thin proxy of ours for every request",
        package="ai-dynamo==1.4.2",
        module="dynamo.select_service",
        command=(
            *("{python}", "-P", "-m", "harness.dynamo_proxy", "--host", "{host}", "--port", "{port}"),
            *("--block-size", "{block_size}", "--model", "{model}"),
        ),
        each_replica=("--replica", "{replica}"),
        variants={
            "decay": ("--option", "overlap_score_credit_decay=1"),
            "no-overlap": ("--option", "overlap_score_credit=0"),
        },
        ready_path="/router/health",
        keeps_log=True,
    ),
}


def find_peer(name: str) -> PeerPreset:
    """The preset of that name. Raises UsageError that lists what there is."""
    preset = PEERS.get(name)
    if preset is None:
        raise UsageError(f"no preset named {name!r} for a real router: {choose_from(name, PEERS)}")
    return preset


def require_installed(preset: PeerPreset) -> None:
    """Raises UsageError with the line that installs it."""
    if not preset.installed:
        raise UsageError(f"router {preset.name!r} is not installed in this environment: {preset.install_line}")


def all_healthy(body: Any, replicas: Sequence[Replica]) -> bool:
    """Whether the answer of `ready_path` says that the router has found every replica."""
    found = body.get("healthy_workers", len(replicas)) if isinstance(body, dict) else len(replicas)
    return isinstance(found, int) and found >= len(replicas)


def peer_command(
    name: str,
    variant: str | None,
    args: Sequence[str],
    port: int,
    replicas: Sequence[Replica],
    *,
    host: str = LOOPBACK,
    block_size: int = 16,
    model: str = "mock-model",
    metrics_port: int | None = None,
    log_file: Path | None = None,
    epoch_ns: int | None = None,
) -> list[str]:
    """The command line of a preset. `variant` is what stands behind the colon, `args` what the scenario adds.

    Raises UsageError for an unknown variant, a policy named twice, or a policy that needs events nobody publishes.
    """
    preset = find_peer(name)
    extra, policy = _variant(preset, variant, args)
    words = list(preset.command)
    template_each = [preset.each_replica]
    if policy in preset.event_policies:
        deaf = [replica.name for replica in replicas if replica.kv_events is None]
        if deaf:
            raise UsageError(
                f"router {name}:{policy} routes by KV events and {', '.join(deaf)} publishes none: "
                "use replicas of ours or engines that name their events on GET /kv_event_sources, or another policy"
            )
        words += preset.event_args
        template_each.append(preset.event_args_each_replica)
    values = {
        "host": host,
        "port": str(port),
        "metrics_port": str(metrics_port or free_ports(1)[0]),
        "block_size": str(block_size),
        "model": model,
    }
    command = expand_command(words, replicas, values)
    for template in template_each:
        for replica in replicas:
            command += expand_command(template, [replica], {**values, **_of(replica)})
    command += expand_command(extra, replicas, values)
    if preset.keeps_log:
        command += ["--log-file", str(log_file)] if log_file is not None else []
        command += ["--epoch-ns", str(epoch_ns)] if epoch_ns is not None else []
    return [*command, *expand_command(args, replicas, values)]


def expand_command(template: Sequence[str], replicas: Sequence[Replica], values: Mapping[str, str]) -> list[str]:
    """Fills a template, a preset's or a user's own.

    Raises UsageError for a name in braces that is none; other braces, as in JSON, are left alone.
    """
    lists = {
        "worker_urls": [replica.url for replica in replicas],
        "kv_event_endpoints": [replica.kv_events for replica in replicas if replica.kv_events is not None],
    }
    known = {"python": sys.executable, **values, **{key: ",".join(items) for key, items in lists.items()}}

    def fill(match: re.Match[str]) -> str:
        name = match[1].removesuffix(_EACH)
        if name in lists and name != match[1]:
            raise UsageError(
                f"{match[0]} in a router's command becomes several arguments, so it is a word of its own: write "
                f"{{{name}}} for one word with commas"
            )
        if match[1] in known:
            return known[match[1]]
        names = {*known, *(f"{key}{_EACH}" for key in lists)}
        raise UsageError(f"{match[0]} in a router's command stands for nothing: {choose_from(match[1], names)}")

    command: list[str] = []
    for word in template:
        whole = _WORD.fullmatch(word)
        if whole and whole[1].endswith(_EACH) and whole[1].removesuffix(_EACH) in lists:
            command += lists[whole[1].removesuffix(_EACH)]
        else:
            command.append(_WORD.sub(fill, word))
    return command


def _of(replica: Replica) -> dict[str, str]:
    events = f",events={replica.kv_events}" if replica.kv_events is not None else ""
    return {
        "name": replica.name,
        "url": replica.url,
        "kv_events": replica.kv_events or "",
        "replica": f"{replica.name}={replica.url}{events}",
    }


def _variant(preset: PeerPreset, variant: str | None, args: Sequence[str]) -> tuple[Template, str | None]:
    """(arguments that the variant stands for, the policy in force if that is known)."""
    given = _given_policy(preset.policy_flag, args)
    if variant is None:
        return (), given
    if variant not in preset.choices:
        raise UsageError(f"router {preset.name!r} has no variant {variant!r}: {choose_from(variant, preset.choices)}")
    if variant in preset.variants:
        return preset.variants[variant], given
    if given is not None:
        raise UsageError(
            f"router {preset.name}:{variant} is also given {preset.policy_flag} {given}: name the policy once"
        )
    assert preset.policy_flag is not None
    return (preset.policy_flag, variant), variant


def _given_policy(flag: str | None, args: Sequence[str]) -> str | None:
    """The policy that a scenario's own arguments name."""
    found = None
    for i, word in enumerate(args):
        if flag is not None and word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif flag is not None and word == flag and i + 1 < len(args):
            found = args[i + 1]
    return found
