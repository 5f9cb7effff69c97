"""Starting real processes of a fleet: mock replicas, a router of ours, and proof that an arm starts cold.

Everything a replica or router is told goes through its command line, as a user would tell it; nothing here
imports the rooms' servers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec

from harness.errors import StartError
from harness.peers import all_healthy, expand_command, find_peer, peer_command, require_installed
from harness.processes import PYTHON, Child, Children, free_ports, get_json, post, wait_ready
from harness.router_entry import RouterEntry
from harness.scenario import Scenario

READY_S = 60.0
"""A slow laptop starts eight Python processes well within this."""
HOST = "127.0.0.1"
_ENGINE_FLAGS = {"num_gpu_blocks": "--num-gpu-blocks-override"}
"""Engine options whose command-line flag in vLLM has another name than the option."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where one replica is reached; `kv_events` is None for an engine that is not ours."""

    name: str
    url: str
    kv_events: str | None = None


def start_replicas(
    children: Children, scenario: Scenario, *, epoch_ns: int, seed_for: Any, log_dir: Path
) -> list[ReplicaAddress]:
    """Starts the scenario's mock replicas at once and waits until all are ready. Raises StartError."""
    if scenario.fleet.urls:
        given = [ReplicaAddress(f"r{i}", url.rstrip("/")) for i, url in enumerate(scenario.fleet.urls)]
        for replica in given:
            require_answer(f"replica {replica.name} of fleet.urls", replica.url)
        return given
    names = scenario.fleet.names
    ports = free_ports(2 * len(names))
    started: list[tuple[Child, ReplicaAddress]] = []
    for i, name in enumerate(names):
        http, events = ports[2 * i], ports[2 * i + 1]
        command = replica_command(
            scenario, name, http, events, epoch_ns=epoch_ns, seed=seed_for(f"engine.{name}"), log_dir=log_dir
        )
        child = children.start(f"replica-{name}", command)
        started.append((child, ReplicaAddress(name, f"http://{HOST}:{http}", f"tcp://{HOST}:{events}")))
    for child, address in started:
        wait_ready(child, f"{address.url}/health", READY_S)
    return [address for _, address in started]


def replica_command(
    scenario: Scenario, name: str, port: int, events_port: int, *, epoch_ns: int, seed: int, log_dir: Path
) -> list[str]:
    """The command line of one replica; every engine option is given, so that no default can differ."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
    command = [
        *PYTHON,
        "-m",
        "mock_engine",
        "--host",
        HOST,
        "--port",
        str(port),
        "--served-model-name",
        scenario.load.model,
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--kv-events-config",
        msgspec.json.encode(events).decode(),
        "--mock-preset",
        scenario.preset_ref,
        "--mock-name",
        name,
        "--mock-log-dir",
        str(log_dir),
        "--mock-epoch-ns",
        str(epoch_ns),
        "--mock-seed",
        str(seed),
    ]
    command += scenario.faults.engine_flags(name)
    for option, value in msgspec.to_builtins(scenario.engine).items():
        flag = _ENGINE_FLAGS.get(option, "--" + option.replace("_", "-"))
        if isinstance(value, bool):
            command.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            command += [flag, str(value)]
    return command


def router_command(
    entry: RouterEntry,
    scenario: Scenario,
    replicas: list[ReplicaAddress],
    port: int,
    *,
    epoch_ns: int,
    seed: int,
    log_file: Path,
    host: str = HOST,
) -> list[str]:
    """The command line of one router process of ours."""
    command = [
        *PYTHON,
        "-m",
        "routers",
        "--policy",
        entry.policy_name,
        "--host",
        host,
        "--port",
        str(port),
        "--block-size",
        str(scenario.engine.block_size),
        "--session-header",
        scenario.load.session_header,
        "--log-file",
        str(log_file),
        "--epoch-ns",
        str(epoch_ns),
        "--seed",
        str(seed),
    ]
    for key, value in entry.options.items():
        command += ["--option", f"{key}={msgspec.json.encode(value).decode() if not isinstance(value, str) else value}"]
    command += scenario.faults.router_flags()
    for replica in replicas:
        events = f",events={replica.kv_events}" if replica.kv_events else ""
        command += ["--replica", f"{replica.name}={replica.url}{events}"]
    return command


def start_router(
    children: Children,
    entry: RouterEntry,
    scenario: Scenario,
    replicas: list[ReplicaAddress],
    *,
    epoch_ns: int,
    seed: int,
    log_file: Path,
    port: int | None = None,
) -> str:
    """Starts the router and waits until it has found every replica. Returns its URL. Raises StartError, UsageError."""
    if entry.url:
        url = entry.url.rstrip("/")
        require_answer(f"router {entry.name!r}", url)
        return url
    port = port or free_ports(1)[0]
    ready_path, ready = "/router/health", _always
    if entry.peer:
        name, _, variant = entry.peer.partition(":")
        preset = find_peer(name)
        require_installed(preset)
        command = peer_command(
            name, variant or None, entry.args, port, replicas, host=HOST, block_size=scenario.engine.block_size,
            model=scenario.load.model, log_file=log_file, epoch_ns=epoch_ns,
        )  # fmt: skip
        ready_path, ready = preset.ready_path, partial(all_healthy, replicas=replicas)
    elif entry.command:
        values = {
            "host": HOST,
            "port": str(port),
            "block_size": str(scenario.engine.block_size),
            "model": scenario.load.model,
        }
        command = expand_command((*entry.command, *entry.args), replicas, values)
        ready_path = entry.ready_path
    else:
        command = router_command(entry, scenario, replicas, port, epoch_ns=epoch_ns, seed=seed, log_file=log_file)
    child = children.start("router", command)
    url = f"http://{HOST}:{port}"
    wait_ready(child, f"{url}{ready_path}", READY_S, ready)
    return url


def _always(body: Any) -> bool:
    return True


def clear_caches(replicas: list[ReplicaAddress]) -> int | None:
    """Empties the caches that fresh processes would not have, and counts what the fleet still holds: an arm starts
    cold at 0 blocks. None if some engine cannot tell."""
    total: int | None = 0
    for replica in replicas:
        with suppress(OSError):  # an engine without development routes keeps what it has
            post(f"{replica.url}/reset_prefix_cache")
        try:
            held = get_json(f"{replica.url}/mock/state")["cached_blocks"]
        except (OSError, KeyError, TypeError):
            total = None
        else:
            total = total + held if total is not None else None
    return total


def require_answer(what: str, url: str) -> None:
    """Raises StartError if nothing speaks HTTP at an address that is said to be in use."""
    try:
        get_json(f"{url}/health")
    except HTTPError:
        return  # an answer, if not a healthy one: the run will show it
    except OSError as error:
        raise StartError(
            f"{what}: no answer at {url} ({getattr(error, 'reason', error)}): start it first or correct its address"
        ) from error
