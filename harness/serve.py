"""`routebench serve`: a fleet and a router that stay up for experiments by hand, and leave nothing behind."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from harness.arm import Arm
from harness.errors import ProcessLost, StartError, UsageError
from harness.event_sources import ReplicaAddress
from harness.fleet import HOST, start_ingresses, start_replicas
from harness.processes import Children
from harness.scenario import Scenario

POLL_S = 0.5


class _Stop(Exception):
    """SIGTERM, turned into an orderly end."""


def _on_term(number: int, frame: FrameType | None) -> None:
    raise _Stop


def serve_command(scenario: Scenario, *, port: int | None) -> int:
    """Serves until Ctrl-C or SIGTERM (exit code 0). Raises StartError if a process ends by itself."""
    entry = scenario.routers[0]
    for each in range(port, port + entry.setup(scenario.router).ingresses) if port is not None else ():
        require_free(each)
    if entry.url:
        raise UsageError(
            f"router {entry.name!r} already runs at {entry.url}: serve starts routers of ours, name one "
            "with --router (see `routebench routers`)"
        )
    say = Console(highlight=False, soft_wrap=True)  # addresses and commands are for pasting
    arm = Arm(scenario, entry, 0)
    before = signal.signal(signal.SIGTERM, _on_term)
    try:
        with tempfile.TemporaryDirectory(prefix="routebench-serve-") as logs, Children(Path(logs)) as children:
            epoch_ns = time.monotonic_ns()
            folder = Path(logs)
            say.print(f"starting {len(scenario.fleet.names)} replicas and router {entry.name} ...")
            replicas = start_replicas(children, scenario, epoch_ns=epoch_ns, seed_for=arm.seed_for, log_dir=folder)
            ingresses = start_ingresses(children, arm, replicas, epoch_ns=epoch_ns, log_dir=folder, port=port)
            _print_addresses(say, scenario, list(ingresses.values()), replicas)
            while True:
                children.require_alive()
                time.sleep(POLL_S)
    except (KeyboardInterrupt, _Stop):
        say.print("\nstopped; nothing is left running")
        return 0
    except ProcessLost as lost:
        raise StartError(f"{lost}; the rest has been stopped: start it again") from lost
    finally:
        signal.signal(signal.SIGTERM, before)


def require_free(port: int, host: str = HOST) -> None:
    """Raises UsageError if something listens on the port already or it may not be used."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"port {port} on {host} cannot be used ({getattr(error, 'strerror', None) or error}): "
                "name another with --port, or leave it out for a free one"
            ) from error


def _print_addresses(say: Console, scenario: Scenario, urls: list[str], replicas: list[ReplicaAddress]) -> None:
    url = urls[0]
    for each in urls:
        say.print(f"router    {scenario.routers[0].name}: {each}  (state: {each}/router/state)")
    for replica in replicas:
        events = f", KV events {replica.kv_events}" if replica.kv_events else ""
        say.print(f"replica   {replica.name}: {replica.url}{events}")
    say.print(f"backends  {','.join(replica.url for replica in replicas)}  (for a router of yours)")
    if heard := [replica.kv_events for replica in replicas if replica.kv_events]:
        say.print(f"events    {','.join(heard)}")
    say.print(
        "try it:\n"
        f"  curl -N {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{scenario.load.model}", "prompt": "hello", "max_tokens": 16, "stream": true}}\''
    )
    say.print("Ctrl-C stops everything.")
