"""Admin routes of the router process, nearly all under `/router/`: health, state, the fleet, and what peers say.

    GET    /router/health                     200
    GET    /router/state                      everything that is known and counted
    GET    /router/replicas                   the fleet
    POST   /router/replicas                   {"name", "url", "events"?, "replay"?} joins it, or drains no more
    POST   /router/replicas/NAME/drain        takes no new turns; those in flight go on
    DELETE /router/replicas/NAME              leaves it; those in flight go on to their end all the same
    POST   /router/peers                      the load of another ingress
    POST   /finish_session?session_id=ID      a session has ended (vllm-router's route, hence not under /router/)

A wrong request is 400, an unknown replica 404, one that is there already 409, each with what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
from aiohttp import web

from routers.errors import FleetError, StartError, WireError
from routers.peer_link import read_message
from routers.proxy import error_response

if TYPE_CHECKING:
    from routers.service import Service

ROUTES = "/router/health, /router/state, /router/replicas, /router/replicas/NAME/drain, /router/peers"


class ReplicaAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one replica is: its HTTP URL, and where it publishes and replays KV events, if it does."""

    name: str
    url: str
    events: str | None = None
    replay: str | None = None

    def check(self) -> None:
        """Raises StartError for what cannot be reached, whoever listens there."""
        if not self.name or urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise StartError(f"replica {self.name!r} at {self.url!r} names none: give name and url=http://HOST:PORT")
        for endpoint in (self.events, self.replay):
            if endpoint is not None and "://" not in endpoint:
                raise StartError(f"replica {self.name}: {endpoint!r} is no ZeroMQ address: give tcp://HOST:PORT")
        if self.replay is not None and self.events is None:
            raise StartError(f"replica {self.name} replays events it does not publish: give events, too")


_ADDRESS = msgspec.json.Decoder(ReplicaAddress)


async def answer(service: Service, request: web.BaseRequest) -> web.Response:
    """One admin request."""
    method, parts = request.method, request.raw_path.partition("?")[0].strip("/").split("/")[1:]
    if request.path == "/finish_session":
        return _finish_session(service, request)
    try:
        match parts:
            case ["health"]:
                return _json({"status": "ok"}) if method == "GET" else _wrong_method(request, "GET")
            case ["state"]:
                return _json(service.state()) if method == "GET" else _wrong_method(request, "GET")
            case ["peers"]:
                return await _peers(service, request) if method == "POST" else _wrong_method(request, "POST")
            case ["replicas"]:
                if method == "POST":
                    return await _join(service, request)
                return _json(service.fleet()) if method == "GET" else _wrong_method(request, "GET and POST")
            case ["replicas", name, "drain"]:
                if method != "POST":
                    return _wrong_method(request, "POST")
                service.drain_replica(unquote(name))
                return _json(service.fleet())
            case ["replicas", name]:
                if method != "DELETE":
                    return _wrong_method(request, "DELETE")
                service.remove_replica(unquote(name))
                return _json(service.fleet())
    except (StartError, WireError) as error:
        return error_response(400, f"router: {error}", "BadRequestError")
    except FleetError as error:
        return error_response(404, f"router: {error}", "NotFoundError")
    return error_response(404, f"router: no {request.path}: there are {ROUTES}", "NotFoundError")


async def _join(service: Service, request: web.BaseRequest) -> web.Response:
    try:
        address = _ADDRESS.decode(await request.read())
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f'no replica ({error}): send {{"name": "r4", "url": "http://HOST:PORT"}}') from error
    address.check()
    try:
        service.add_replica(address)
    except FleetError as error:
        return error_response(409, f"router: {error}", "ConflictError")
    return _json(service.fleet(), 201)


async def _peers(service: Service, request: web.BaseRequest) -> web.Response:
    peers = service.router.peers
    if peers is None:
        return error_response(409, "router: this one shares no load: start it with --peer", "ConflictError")
    message, loads = read_message(await request.read())
    peers.hear(message.router, loads, service.now_us(), sequence=message.sequence, incarnation=message.incarnation)
    service.router.let_go(service.now_us())
    return _json({"status": "ok"})


def _finish_session(service: Service, request: web.BaseRequest) -> web.Response:
    if request.method != "POST":
        return _wrong_method(request, "POST")
    session_id = request.query.get("session_id")
    if not session_id:
        text = "router: /finish_session names no session: add ?session_id=ID"
        return error_response(400, text, "BadRequestError")
    service.router.session_ended(session_id, service.now_us())
    return _json({"status": "ok"})


def _wrong_method(request: web.BaseRequest, right: str) -> web.Response:
    return error_response(405, f"router: {request.path} answers {right} only", "MethodNotAllowedError")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
