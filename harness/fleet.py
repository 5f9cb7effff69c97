"""Starting real processes of a fleet: mock replicas, a router of ours, and proof that an arm starts cold.

Everything a replica or router is told goes through its command line, as a user would tell it; nothing here
imports the rooms' servers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec

from harness.arm import ROUTER_SEED_STREAM, Arm
from harness.errors import StartError
from harness.event_sources import ReplicaAddress, replica_that_runs
from harness.peers import all_healthy, expand_command, find_peer, peer_command, require_installed
from harness.processes import PYTHON, Child, Children, call, free_ports, get_json, wait_ready
from harness.router_entry import RouterEntry
from harness.scenario import Scenario
from harness.spread import ingress_name

READY_S = 60.0
"""A slow laptop starts eight Python processes well within this."""
HOST = "127.0.0.1"
_ENGINE_FLAGS = {"num_gpu_blocks": "--num-gpu-blocks-override"}
"""Engine options whose command-line flag in vLLM has another name than the option."""


def start_replicas(
    children: Children, scenario: Scenario, *, epoch_ns: int, seed_for: Any, log_dir: Path
) -> list[ReplicaAddress]:
    """Starts the scenario's mock replicas at once and waits until all are ready. Raises StartError."""
    if scenario.fleet.urls:
        urls = [url.rstrip("/") for url in scenario.fleet.urls]
        for name, url in zip(scenario.fleet.names, urls, strict=True):
            require_answer(f"replica {name} of fleet.urls", url)
        return [replica_that_runs(name, url) for name, url in zip(scenario.fleet.names, urls, strict=True)]
    started = [
        launch_replica(children, scenario, name, epoch_ns=epoch_ns, seed=seed_for(f"engine.{name}"), log_dir=log_dir)
        for name in scenario.fleet.names
    ]
    for child, address in started:
        wait_ready(child, f"{address.url}/health", READY_S)
    return [address for _, address in started]


def launch_replica(
    children: Children,
    scenario: Scenario,
    name: str,
    *,
    epoch_ns: int,
    seed: int,
    log_dir: Path,
    place: ReplicaAddress | None = None,
) -> tuple[Child, ReplicaAddress]:
    """Starts one mock replica, where another one was or at a place of its own, and does not wait for it."""
    if place is None:
        http, events = free_ports(2)
        place = ReplicaAddress(name, f"http://{HOST}:{http}", f"tcp://{HOST}:{events}")
    http, events = (int(address.rpartition(":")[2]) for address in (place.url, place.kv_events or ":0"))
    command = replica_command(scenario, name, http, events, epoch_ns=epoch_ns, seed=seed, log_dir=log_dir)
    return children.start(f"replica-{name}", command), place


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
    peers: Sequence[str] = (),
) -> list[str]:
    """The command line of one router process of ours; `peers` are the addresses of the other ingresses."""
    setup = entry.setup(scenario.router)
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
        "--metrics-interval-ms",
        str(setup.metrics_interval_ms),
        "--prefix-interval-ms",
        str(setup.prefix_interval_ms),
        "--ramp-s",
        str(setup.ramp_s),
    ]
    if setup.exchanges and peers:
        command += ["--peer-delay-ms", str(setup.share_delay_ms), *(word for url in peers for word in ("--peer", url))]
    for key, value in entry.options.items():
        command += ["--option", f"{key}={msgspec.json.encode(value).decode() if not isinstance(value, str) else value}"]
    for fault in scenario.router_faults(entry).names():
        command += ["--fault", fault]
    for replica in replicas:
        events = f",events={replica.kv_events}" if replica.kv_events else ""
        replay = f",replay={replica.kv_replay}" if replica.kv_replay else ""
        command += ["--replica", f"{replica.name}={replica.url}{events}{replay}"]
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
    """Starts one router and waits until it has found every replica. Returns its URL. Raises StartError, UsageError."""
    if entry.url:
        url = entry.url.rstrip("/")
        require_answer(f"router {entry.name!r}", url)
        return url
    started = _launch_router(
        children,
        "router",
        entry,
        scenario,
        replicas,
        port or free_ports(1)[0],
        epoch_ns=epoch_ns,
        seed=seed,
        log_file=log_file,
    )
    return started.wait()


def start_ingresses(
    children: Children,
    arm: Arm,
    replicas: list[ReplicaAddress],
    *,
    epoch_ns: int,
    log_dir: Path,
    port: int | None = None,
) -> dict[str, str]:
    """Starts the arm's router as often as it shall run and waits for all. `port` is that of the first; the others have
    those that follow. Returns URLs by ingress. Raises StartError, UsageError."""
    entry, setup = arm.router, arm.setup
    if setup.ingresses == 1:
        seed, log_file = arm.seed_for(ROUTER_SEED_STREAM), log_dir / "router.jsonl"
        url = start_router(
            children, entry, arm.scenario, replicas, epoch_ns=epoch_ns, seed=seed, log_file=log_file, port=port
        )
        return {ingress_name(0): url}
    ports = free_ports(setup.ingresses) if port is None else list(range(port, port + setup.ingresses))
    urls = [f"http://{HOST}:{each}" for each in ports]
    started = [
        _launch_router(
            children,
            f"router-{name}",
            entry,
            arm.scenario,
            replicas,
            ports[place],
            epoch_ns=epoch_ns,
            seed=arm.seed_for(f"{ROUTER_SEED_STREAM}.{name}" if place else ROUTER_SEED_STREAM),
            log_file=log_dir / f"router-{name}.jsonl",
            peers=[url for other, url in enumerate(urls) if other != place],
        )
        for place, name in enumerate(setup.names)
    ]
    return {name: one.wait() for name, one in zip(setup.names, started, strict=True)}


@dataclass(frozen=True, slots=True)
class _Starting:
    """A router process on its way."""

    child: Child
    url: str
    ready_path: str
    ready: Callable[[Any], bool]
    command: Sequence[str] = ()
    """Of a router whose command line is the user's, who must see what became of it."""

    def wait(self) -> str:
        try:
            wait_ready(self.child, f"{self.url}{self.ready_path}", READY_S, self.ready)
        except StartError as error:
            if not self.command:
                raise
            raise StartError(
                f"{error}; it was started as `{shlex.join(self.command)}` and is ready when {self.ready_path} (its "
                "ready_path) answers 200 on the port that it is given"
            ) from error
        return self.url


def _launch_router(
    children: Children,
    name: str,
    entry: RouterEntry,
    scenario: Scenario,
    replicas: list[ReplicaAddress],
    port: int,
    *,
    epoch_ns: int,
    seed: int,
    log_file: Path,
    peers: Sequence[str] = (),
) -> _Starting:
    """Starts one router process and does not wait for it."""
    ready_path, ready = "/router/health", _always
    if entry.peer:
        peer, _, variant = entry.peer.partition(":")
        preset = find_peer(peer)
        require_installed(preset)
        command = peer_command(
            peer, variant or None, entry.args, port, replicas, host=HOST, block_size=scenario.engine.block_size,
            model=scenario.load.model, log_file=log_file, epoch_ns=epoch_ns,
        )  # fmt: skip
        ready_path, ready = preset.ready_path, partial(all_healthy, replicas=replicas)
    elif entry.command:
        values = {
            "host": HOST,
            "port": str(port),
            "metrics_port": str(free_ports(1)[0]),
            "block_size": str(scenario.engine.block_size),
            "model": scenario.load.model,
        }
        command = expand_command((*entry.command, *entry.args), replicas, values)
        ready_path = entry.ready_path
    else:
        command = router_command(
            entry, scenario, replicas, port, epoch_ns=epoch_ns, seed=seed, log_file=log_file, peers=peers
        )
    shown = command if entry.command else ()
    return _Starting(children.start(name, command), f"http://{HOST}:{port}", ready_path, ready, shown)


def _always(body: Any) -> bool:
    return True


def clear_caches(replicas: list[ReplicaAddress]) -> int | None:
    """Empties the caches that fresh processes would not have, and counts what the fleet still holds: an arm starts
    cold at 0 blocks. None if some engine cannot tell."""
    total: int | None = 0
    for replica in replicas:
        with suppress(OSError):  # an engine without development routes keeps what it has
            call("POST", f"{replica.url}/reset_prefix_cache")
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
