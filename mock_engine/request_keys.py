"""Names of what rides on an HTTP request inside this server, in the form that the installed aiohttp wants."""

from __future__ import annotations

from typing import Any

from aiohttp import web


def _plain_key(name: str, kind: type) -> str:
    """How aiohttp named what rides on a request before it had typed keys."""
    return name


request_key: Any = getattr(web, "RequestKey", _plain_key)

RECEIVED_US: Any = request_key("received_us", int)  # set by the outermost middleware
