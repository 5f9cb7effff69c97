"""`python -m mock_engine`: serves one replica, or several on consecutive ports, until it is told to stop.

Exit code 0 after SIGINT or SIGTERM, 2 with one line on stderr when it cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Sequence

from mock_engine.clock import Clock
from mock_engine.config import EngineConfig
from mock_engine.errors import ConfigError
from mock_engine.flags import ASYNC_NOTE, parse_flags
from mock_engine.options import ServerOptions
from mock_engine.replica import Replica
from mock_engine.server import Server

GC_THRESHOLD = 20_000  # new objects before a collection; none of the hot paths makes cycles


async def serve(options: ServerOptions, config: EngineConfig) -> None:
    clock = Clock(options.epoch_ns, options.speedup)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # a platform without signal handlers in the loop
            loop.add_signal_handler(number, stop.set)
    servers: list[Server] = []
    replicas: list[Replica] = []
    try:
        for at in range(options.replicas_per_process):
            replica = Replica(options, config, port=options.port + at, clock=clock)
            try:
                servers.append(Server(replica))
            except ConfigError:
                replica.close()
                raise
            replicas.append(replica)
        await asyncio.gather(*(_start(*pair, options, config) for pair in zip(servers, replicas, strict=True)))
        _calm_collector()
        await stop.wait()
    finally:
        for server in servers:
            await server.stop()


async def _start(server: Server, replica: Replica, options: ServerOptions, config: EngineConfig) -> None:
    await server.start()
    print(_greeting(replica, options, config), flush=True)


def _calm_collector() -> None:
    """Takes what lives as long as the process (blocks, vocabulary) out of garbage collection: looking through it again
    and again would hold tokens back for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def _greeting(replica: Replica, options: ServerOptions, config: EngineConfig) -> str:
    scheme = "https" if options.ssl_certfile else "http"
    events = ", ".join(publisher.endpoint for publisher in replica.publishers) or "off"
    return (
        f"{replica.name}: {scheme}://{options.host or '127.0.0.1'}:{replica.port} serves {replica.models.first} as "
        f"{replica.preset.name}, {config.num_gpu_blocks} blocks of {config.block_size} tokens, KV events {events}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options, config = parse_flags(sys.argv[1:] if argv is None else argv)
        if options.async_scheduling:
            print(ASYNC_NOTE, file=sys.stderr)
        asyncio.run(serve(options, config))
    except ConfigError as error:
        print(f"python -m mock_engine: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
