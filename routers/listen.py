"""The HTTP server of a router process: every request whole, its head as long as an engine's server takes it.

The odd thing is what it leaves to the handler: no decompression, no size limit and no routes, so that a reverse proxy
can pass on what came; a client that leaves cancels its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from routers.errors import StartError
from routers.quiet import ClientErrors, server_logger
from routers.upstream import HEADER_BYTES_MAX


async def listen(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    host: str,
    port: int,
    stack: contextlib.AsyncExitStack,
    client_errors: ClientErrors,
) -> int:
    """Serves until `stack` is closed; the port, which a `port` of 0 asks for. Raises StartError."""

    def whole_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=1 << 40)

    server = web.Server(
        handle,
        request_factory=whole_request,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=server_logger(client_errors),
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
    )
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except UnicodeError as error:
        raise StartError(f"cannot listen on {host!r}, which is no name of a host: give another --host") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"{host}:{port} is taken by another process: give another --port") from error
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror or error}): give another --host") from error
    return int(runner.addresses[0][1])
