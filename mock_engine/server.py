"""The HTTP server of one replica: its routes, and what every answer has whichever route made it.

Headers, error bodies, the API key, request ids and HTTP metrics are dealt with here once, in one middleware around
all routes. Every error that a route may raise ends as the JSON that a vLLM server answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
import traceback
from collections.abc import Awaitable, Callable
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Middleware

from mock_engine.bodies import encode_json, error_body
from mock_engine.connection import Connection
from mock_engine.errors import ConfigError, RequestError
from mock_engine.generation import Generation
from mock_engine.injection import FAULTY_ROUTES
from mock_engine.options import ServerOptions
from mock_engine.protocol import clean
from mock_engine.replica import Replica
from mock_engine.request_keys import RECEIVED_US
from mock_engine.routes_control import ControlRoutes
from mock_engine.routes_mock import MockRoutes
from mock_engine.routes_text import TextRoutes

BODY_BYTES_MAX = 1 << 30
REBIND_PAUSE_S = 0.01
PREFLIGHT_METHOD = "Access-Control-Request-Method"
CORS_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
BACKLOG = 2048  # connections that wait to be accepted
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # need the API key, if there is one
UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})  # by HTTP metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(replica: Replica) -> web.Application:
    app = web.Application(middlewares=[_edge(replica)], client_max_size=BODY_BYTES_MAX)
    app.on_response_prepare.append(_common_headers(replica))
    generation = Generation(replica)
    app.router.add_post("/v1/completions", generation.completions)
    app.router.add_post("/v1/chat/completions", generation.chat)
    TextRoutes(replica, generation).add(app)
    ControlRoutes(replica).add(app)
    MockRoutes(replica).add(app)
    return app


def _edge(replica: Replica) -> Middleware:
    keys = frozenset(replica.options.api_keys)
    now_us = replica.clock.now_us

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[RECEIVED_US] = now_us()
        started = time.perf_counter()
        response: web.StreamResponse
        if request.method == "OPTIONS" and "Origin" in request.headers and PREFLIGHT_METHOD in request.headers:
            response = _preflight(request)
        elif keys and request.path.startswith(GUARDED) and _bearer(request) not in keys:
            response = _json_response({"error": "Unauthorized"}, 401)
        else:
            response = await _answered(replica, request, handler)
        _count(replica, request, response, time.perf_counter() - started)
        return response

    return edge


def _bearer(request: web.Request) -> str | None:
    """The key that a request brings; the scheme's name may be written in any case."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None


def _preflight(request: web.Request) -> web.Response:
    """What a browser asks before it lets a page of another origin ask us: everything is allowed, as in vLLM."""
    headers = {"Access-Control-Allow-Methods": CORS_METHODS, "Access-Control-Max-Age": "600"}
    wanted = request.headers.get("Access-Control-Request-Headers")
    if wanted is not None:
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(text="OK", headers=headers)


async def _answered(replica: Replica, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.path in FAULTY_ROUTES and request.method == "POST":
            replica.faults.arrival(request)
        return await handler(request)
    except RequestError as error:
        return _json_response(error_body(error.message, error.type, error.param, error.status), error.status)
    except web.HTTPNotFound:
        return await _elsewhere(request) or _json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return _json_response({"detail": "Method Not Allowed"}, 405, {"allow": allowed})
    except web.HTTPException as error:
        return _json_response({"detail": error.reason}, error.status)
    except (ConnectionError, web.RequestPayloadError):
        raise  # the client has left, or its body is no HTTP; the connection deals with it
    except Exception as error:
        traceback.print_exc()
        return _json_response(error_body(str(error), "InternalServerError", None, 500), 500)


async def _elsewhere(request: web.Request) -> web.Response | None:
    """Where the same path exists without its last slash, or with one, the client is sent there."""
    path = request.path
    other = path.rstrip("/") if path.endswith("/") else f"{path}/"
    if not other:
        return None
    found = await request.app.router.resolve(request.clone(rel_url=request.rel_url.with_path(other)))
    if isinstance(found.http_exception, web.HTTPNotFound):
        return None
    query = f"?{request.query_string}" if request.query_string else ""
    return web.Response(status=307, headers={"Location": f"{request.scheme}://{request.host}{other}{query}"})


def _json_response(body: object, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(body), status=status, content_type="application/json", headers=headers)


def _count(replica: Replica, request: web.Request, response: web.StreamResponse, seconds: float) -> None:
    resource = request.match_info.route.resource
    handler = "none" if resource is None else resource.canonical
    if handler in UNCOUNTED:
        return
    size = 0 if response.content_length is None else response.content_length
    replica.metrics.http.add(handler, request.method, response.status, seconds, request.content_length or 0, size)


def _common_headers(replica: Replica) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    echo_ids = replica.options.enable_request_id_headers

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        headers = response.headers
        headers["Server"] = "uvicorn"
        if response.status != 401:
            headers["Vary"] = "Origin"
            if "Origin" in request.headers:
                headers["Access-Control-Allow-Origin"] = "*"
        if response.content_length == 0:
            headers.pop("Content-Type", None)
        if echo_ids:
            headers["X-Request-Id"] = clean(request.headers.get("X-Request-Id", "")) or uuid4().hex

    return add


class Server:
    """Listens for one replica, or refuses to for a while."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._runner = web.AppRunner(
            make_app(replica),
            handler_cancellation=True,  # a client that leaves cancels its handler, which frees its blocks
            shutdown_timeout=1.0,
        )
        options = replica.options
        self._tls = _tls(options)
        self._sock: socket.socket | None = _bound_socket(options.host, replica.port)  # ours, but refuses connections
        self._listener: asyncio.Server | None = None
        self._refuses_until_s = 0.0
        self._refusing: asyncio.Task[None] | None = None
        replica.faults.outside = self

    async def start(self) -> None:
        await self._runner.setup()
        slow_ms = self._replica.options.faults.slow_start_ms
        if slow_ms:
            self._replica.faults.note("slow_start", slow_start_ms=slow_ms)
            await asyncio.sleep(self._replica.clock.wall_us(slow_ms * 1000) / 1e6)
        await self._listen()
        self._replica.start()
        faults = self._replica.faults
        for action in faults.plan.at_start:
            faults.trigger(action)

    async def _listen(self) -> None:
        assert self._sock is not None
        sock, self._sock = self._sock, None
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._connection, sock=sock, ssl=self._tls, backlog=BACKLOG)
        except OSError as error:
            raise _unusable(self._replica.options.host, self._replica.port, error) from error

    def _connection(self) -> Connection:
        assert self._runner.server is not None
        return Connection(self._runner.server, self._replica.options.keep_alive_s)

    async def stop(self) -> None:
        if self._refusing is not None:
            self._refusing.cancel()
        self._replica.abort_all(counted=False)
        self._close_listener()
        await self._runner.cleanup()
        if self._sock is not None:
            self._sock.close()
        self._replica.close()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- faults ----------------------------------------------------------------------------------------------------

    def refuse(self, wall_s: float) -> None:
        """Closes the port to new connections; those that are open live on."""
        loop = asyncio.get_running_loop()
        self._refuses_until_s = max(self._refuses_until_s, loop.time() + wall_s)
        if self._refusing is None or self._refusing.done():
            self._refusing = loop.create_task(self._refuse())

    async def _refuse(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            self._close_listener()
            self._sock = await self._own_again()
        while loop.time() < self._refuses_until_s:
            await asyncio.sleep(self._refuses_until_s - loop.time())
        await self._listen()

    async def _own_again(self) -> socket.socket:
        """The port once more; its old socket may need a moment to go."""
        while True:
            try:
                return _bound_socket(self._replica.options.host, self._replica.port)
            except ConfigError:
                await asyncio.sleep(REBIND_PAUSE_S)

    def restart(self, keep: object | None) -> None:
        """Cuts every connection but `keep`'s and lets the replica begin anew at the same address."""
        served = self._runner.server
        for connection in list(served.connections) if served is not None else ():
            transport = connection.transport
            if transport is not None and transport is not keep and isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        self._replica.restart()
        slow_ms = self._replica.faults.plan.faults.slow_start_ms
        if slow_ms:
            self._replica.faults.note("slow_start", slow_start_ms=slow_ms)
            self.refuse(self._replica.clock.wall_us(slow_ms * 1000) / 1e6)


def _bound_socket(host: str | None, port: int) -> socket.socket:
    """A socket at the address that does not listen yet. Without a host on all interfaces of both families, of IPv4
    alone where there is no other."""
    try:
        if host is None and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return _bind(socket.AF_INET6, "::", port)
        return _bind(socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET, host or "", port)
    except OSError as error:
        raise _unusable(host, port, error) from error


def _unusable(host: str | None, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host or '*'}:{port}: {error.strerror or error}; choose another --port or stop what uses it"
    )


def _bind(family: int, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two processes have one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile}: {error}; give a PEM file with certificate and key, or the key "
            f"with --ssl-keyfile"
        ) from error
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {options.ssl_ca_certs}: {error}; give a PEM file") from error
    return context
