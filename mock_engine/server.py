"""The HTTP server of one replica: its routes, and what every answer has whichever route made it.

Headers, error bodies, the API key, request ids and HTTP metrics are dealt with here once, in one middleware around
all routes. Every error that a route may raise ends as the JSON that a vLLM server answers.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
import traceback
from collections.abc import Awaitable, Callable
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Middleware

from mock_engine.bodies import encode_json, error_body
from mock_engine.errors import ConfigError, RequestError
from mock_engine.generation import RECEIVED_US, Generation
from mock_engine.protocol import clean
from mock_engine.replica import Replica
from mock_engine.routes_control import ControlRoutes
from mock_engine.routes_text import TextRoutes

KEEP_ALIVE_S = 5.0  # idle connections, as VLLM_HTTP_TIMEOUT_KEEP_ALIVE
BODY_BYTES_MAX = 1 << 30
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
    return app


def _edge(replica: Replica) -> Middleware:
    keys = frozenset(f"Bearer {key}" for key in replica.options.api_keys)
    now_us = replica.clock.now_us

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[RECEIVED_US] = now_us()
        started = time.perf_counter()
        if keys and request.path.startswith(GUARDED) and request.headers.get("Authorization") not in keys:
            response: web.StreamResponse = _json_response({"error": "Unauthorized"}, 401)
        else:
            response = await _answered(request, handler)
        _count(replica, request, response, time.perf_counter() - started)
        return response

    return edge


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _json_response(error_body(error.message, error.type, error.param, error.status), error.status)
    except web.HTTPNotFound:
        return _json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return _json_response({"detail": "Method Not Allowed"}, 405, {"allow": allowed})
    except web.HTTPException as error:
        return _json_response({"detail": error.reason}, error.status)
    except ConnectionError:
        raise  # the client has left; nobody is there to be told
    except Exception as error:
        traceback.print_exc()
        return _json_response(error_body(str(error), "InternalServerError", None, 500), 500)


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
        if response.content_length == 0:
            headers.pop("Content-Type", None)
        if echo_ids:
            headers["X-Request-Id"] = clean(request.headers.get("X-Request-Id", "")) or uuid4().hex

    return add


class Server:
    """Listens for one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._runner = web.AppRunner(
            make_app(replica),
            access_log=None,
            handler_cancellation=True,  # a client that leaves cancels its handler, which frees its blocks
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=1.0,
        )

    async def start(self) -> None:
        options, port = self._replica.options, self._replica.port
        await self._runner.setup()
        sock = _listening_socket(options.host, port)
        site = web.SockSite(
            self._runner, sock, ssl_context=_tls(options.ssl_certfile, options.ssl_keyfile), backlog=BACKLOG
        )
        await site.start()
        self._replica.start()

    async def stop(self) -> None:
        self._replica.abort_all(counted=False)
        await self._runner.cleanup()
        self._replica.close()


def _listening_socket(host: str | None, port: int) -> socket.socket:
    """On all interfaces of both families if no host is given, of IPv4 alone where there is no other."""
    try:
        if host is None and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
        return socket.create_server((host or "", port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port}: {error.strerror or error}; choose another --port or stop "
            f"what uses it"
        ) from error


def _tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    if certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile {certfile}: {error}; give a PEM certificate and its key") from error
    return context
