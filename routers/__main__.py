"""`python -m routers`: one router in front of replicas that run already.

Only this file may end the process. A wrong argument, an unknown policy or a taken port is one line on stderr that
says what to change, and exit code 2; SIGINT and SIGTERM end it cleanly with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from routers.config import TIME_S_MAX, parse_option
from routers.deciding import PolicyWatch
from routers.errors import RoutersError, StartError
from routers.faults import FAULTS, parse_faults
from routers.peers import PeerLoads
from routers.promises import told
from routers.proxy import ProxyConfig
from routers.ramp import Ramp
from routers.registry import make_policy, policy_help, policy_names, refuse_oracle
from routers.service import ReplicaAddress, Service, ServiceConfig
from routers.view import Signal

_EPILOG = """\
policies:
{policies}

Options of a policy are set with --option key=value; a wrong key lists the right ones.
A policy of your own is --policy my_file.py:MyClass.

example, two vLLM replicas that publish KV events:
  python -m routers --policy dynamo-kv --port 8080 \\
    --replica r0=http://127.0.0.1:8000,events=tcp://127.0.0.1:5557 \\
    --replica r1=http://127.0.0.1:8001,events=tcp://127.0.0.1:5558

Point any OpenAI client at http://127.0.0.1:8080/v1; look at http://127.0.0.1:8080/router/state.
"""

BLOCK_SIZE_MAX = 1 << 20


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise StartError(f"{message} (see --help)")


def parse_replica(text: str) -> ReplicaAddress:
    """`NAME=URL[,events=ENDPOINT[,replay=ENDPOINT]]`."""
    form = "write it as NAME=http://HOST:PORT[,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT]]"
    name, separator, rest = text.partition("=")
    url, *extras = rest.split(",")
    if not separator or not name or not _is_url(url):
        raise StartError(f"--replica {text!r} names no replica: {form}")
    found: dict[str, str] = {}
    for extra in extras:
        key, separator, value = extra.partition("=")
        if key not in ("events", "replay") or "://" not in value or key in found:
            raise StartError(f"--replica {text!r}: {extra!r} is not understood: {form}")
        found[key] = value
    if "replay" in found and "events" not in found:
        raise StartError(f"--replica {text!r} replays events it does not subscribe to: add events=tcp://HOST:PORT")
    return ReplicaAddress(name, url.rstrip("/"), found.get("events"), found.get("replay"))


def _is_url(text: str) -> bool:
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # half an IPv6 address, or a port beyond all ports
        return False


def _plain(text: str) -> bool:
    """Whether the system can take it as a name: half a character or a zero byte it cannot."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def build_parser() -> argparse.ArgumentParser:
    names = policy_names()
    width = max(map(len, names)) + 2
    policies = "\n".join(f"  {name:<{width}}{policy_help(name)}" for name in names)
    parser = _Parser(
        prog="python -m routers",
        description="Route OpenAI-style requests to LLM replicas by a policy, streaming answers through unchanged.",
        epilog=_EPILOG.format(policies=policies),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults, proxy = ServiceConfig(), ProxyConfig()
    parser.add_argument(
        "--replica",
        action="append",
        metavar="NAME=URL[,events=...]",
        default=[],
        help="a replica, its URL, and where it publishes KV events (events=) and replays them (replay=); repeat it",
    )
    parser.add_argument("--policy", default=defaults.policy, metavar="NAME[:variant]", help="default: %(default)s")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the policy; repeat it"
    )
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=defaults.port, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--block-size",
        type=int,
        default=defaults.block_size,
        help="the engines' KV block size in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--session-header",
        default=proxy.session_header,
        help="header that carries the session id (default: %(default)s; a body's session_id is second choice)",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=proxy.retries_max,
        metavar="N",
        help="other replicas to try when one takes no connection or breaks it before it answers (default: %(default)s)",
    )
    parser.add_argument(
        "--health-interval-ms",
        type=int,
        default=defaults.health_interval_ms,
        help="how often replicas that are down are asked for /health; 0: none is ever taken out (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-interval-ms",
        type=int,
        default=defaults.metrics_interval_ms,
        help="how often policies that need it read /metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix-interval-ms",
        type=int,
        default=defaults.prefix_interval_ms,
        help="how often policies that need it read /prefix_cache_state (default: %(default)s)",
    )
    parser.add_argument(
        "--ramp-s",
        type=float,
        default=defaults.ramp_s,
        metavar="S",
        help="let a replica that joins later, or was down, in bit by bit, from 10 %% of turns to all in S seconds "
        "(default: off)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="another router of this kind before the same replicas, to exchange load with; repeat it (default: none)",
    )
    parser.add_argument(
        "--peer-delay-ms",
        type=float,
        default=defaults.peer_delay_ms,
        metavar="MS",
        help="age at which what a peer said counts, on top of the transport's own (default: %(default)s)",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=N]",
        help=f"commit a fault that routers in the field commit: {', '.join(FAULTS)}; repeat it (default: none)",
    )
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="append one JSON line per request here")
    parser.add_argument(
        "--epoch-ns",
        type=int,
        metavar="N",
        help="value of the monotonic clock, in ns, that is instant 0 of the log (default: the start)",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of ties and draws (default: %(default)s)")
    return parser


def read_arguments(arguments: Sequence[str]) -> ServiceConfig:
    given = build_parser().parse_args(arguments)
    replicas = tuple(parse_replica(text) for text in given.replica)
    names = [replica.name for replica in replicas]
    for name in names:
        if names.count(name) > 1:
            raise StartError(f"--replica {name} is given twice: give every replica a name of its own")
    if not replicas:
        raise StartError("no replica to route to: give at least one --replica NAME=http://HOST:PORT")
    if not 0 <= given.port <= 65535:
        raise StartError(f"--port {given.port} is no port: give one from 1 to 65535, or 0 for any free one")
    for flag in ("metrics_interval_ms", "prefix_interval_ms"):
        if getattr(given, flag) < 1:
            name = flag.replace("_", "-")
            raise StartError(f"--{name} {getattr(given, flag)} cannot work: give at least 1")
    for flag in ("retries", "health_interval_ms"):
        if getattr(given, flag) < 0:
            raise StartError(f"--{flag.replace('_', '-')} {getattr(given, flag)} cannot work: give 0 for none, or more")
    for flag in ("metrics_interval_ms", "prefix_interval_ms", "health_interval_ms", "peer_delay_ms"):
        if not abs(getattr(given, flag)) <= 1000 * TIME_S_MAX:
            raise StartError(f"--{flag.replace('_', '-')} cannot work: give a time of at most {1000 * TIME_S_MAX:.0f}")
    if given.block_size > BLOCK_SIZE_MAX:
        raise StartError(f"--block-size cannot work: engines' blocks are far smaller than {BLOCK_SIZE_MAX} tokens")
    if given.epoch_ns is not None and not abs(given.epoch_ns) < 1 << 63:
        raise StartError("--epoch-ns cannot work: no clock counts so far; give a value of the monotonic clock")
    for flag in ("host", "log_file"):
        if not _plain(str(getattr(given, flag))):
            raise StartError(f"--{flag.replace('_', '-')} has characters that no name can have: leave them out")
    for url in given.peer:
        if not _is_url(url):
            raise StartError(f"--peer {url!r} is no router's URL: give http://HOST:PORT")
    if given.peer_delay_ms and not given.peer:
        raise StartError(f"--peer-delay-ms {given.peer_delay_ms:g} delays nothing: give --peer http://HOST:PORT, too")
    config = ServiceConfig(
        policy=given.policy,
        options=dict(parse_option(text) for text in given.option),
        replicas=replicas,
        host=given.host,
        port=given.port,
        block_size=given.block_size,
        seed=given.seed,
        log_file=given.log_file,
        epoch_ns=given.epoch_ns,
        metrics_interval_ms=given.metrics_interval_ms,
        prefix_interval_ms=given.prefix_interval_ms,
        health_interval_ms=given.health_interval_ms,
        ramp_s=given.ramp_s,
        peers=tuple(url.rstrip("/") for url in given.peer),
        peer_delay_ms=given.peer_delay_ms,
        proxy=ProxyConfig(
            session_header=given.session_header,
            retries_max=given.retries,
            faults=parse_faults(given.fault),
        ),
    )
    # Refuse now what would fail later.
    refuse_oracle(make_policy(config.policy, config.options, block_size=config.block_size), config.policy)
    Ramp(config.ramp_s)
    PeerLoads(round(1000 * config.peer_delay_ms))
    return config


async def serve(config: ServiceConfig) -> None:
    """Until SIGINT or SIGTERM."""
    service = Service(config)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # event loops that cannot: Ctrl-C still ends them
            loop.add_signal_handler(number, stop.set)
    try:
        await service.start()
        names = ", ".join(f"{replica.name}={replica.url}" for replica in config.replicas)
        print(f"router {config.policy} on http://{config.host}:{service.port} -> {names}", file=sys.stderr, flush=True)
        deaf = [replica.name for replica in config.replicas if replica.events is None]
        if deaf and Signal.KV_EVENTS in service.router.needs:
            print(
                f"router {config.policy} routes by KV events and hears none of {', '.join(deaf)}: "
                f"add events=tcp://HOST:PORT to --replica",
                file=sys.stderr,
                flush=True,
            )
        gc.freeze()
        running = loop.create_task(service.run())
        stopping = loop.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if running.done():
            running.result()
        running.cancel()
    finally:
        await service.close()


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with PolicyWatch(lambda said: print(f"warning: {said}", file=sys.stderr, flush=True)):
            config = read_arguments(sys.argv[1:] if arguments is None else arguments)
            try:
                asyncio.run(serve(config))
            except SystemExit as left:  # nothing of ours does that to a running loop
                print(f"routers: policy {config.policy}: {told(left)}: its code must change", file=sys.stderr)
                return 2
    except (RoutersError, OSError) as error:
        print(f"routers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
