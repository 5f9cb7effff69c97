"""The client side of the proxy: connections to replicas, and what goes wrong with them in this package's words.

No limit on connections and none on a request's duration: a router that queues in its own connection pool would be
measured instead of its policy. Idle connections are dropped before vLLM's server closes them (5 s), because a request
sent into a closing connection is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from routers.errors import BrokenError, RefusedError, UpstreamError

CONNECT_TIMEOUT_S = 5.0
IDLE_CONNECTION_S = 3.0  # below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE of 5 s
HEADER_BYTES_MAX = 1 << 17

# RFC 9110 section 7.6.1, and the length, which is written anew for the body that is passed on.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_REQUEST_ONLY = frozenset({"host", "content-length", "expect"})


def make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
    )


def request_headers(raw: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """A client's headers as they go on to a replica."""
    return _end_to_end(raw, _HOP_BY_HOP | _REQUEST_ONLY)


def response_headers(raw: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """A replica's headers as they go back to the client."""
    return _end_to_end(raw, _HOP_BY_HOP)


def _end_to_end(raw: Iterable[tuple[bytes, bytes]], dropped: frozenset[str]) -> CIMultiDict[str]:
    pairs = [(name.decode("latin-1"), _value(value)) for name, value in raw]
    named = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
        if token.strip()
    }
    return CIMultiDict((name, value) for name, value in pairs if name.lower() not in dropped | named)


def _value(raw: bytes) -> str:
    """A value that is no UTF-8 is read as Latin-1: the library writes UTF-8 and would drop what it cannot encode."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def plain(value: str) -> str:
    """A header's value as the server library gives it, where bytes that are no UTF-8 are lone surrogates, as text that
    can be hashed, logged and sent on."""
    return value if value.isascii() else _value(value.encode("utf-8", "surrogateescape"))


async def send(
    session: aiohttp.ClientSession, method: str, base: str, target: str, headers: CIMultiDict[str], body: bytes
) -> aiohttp.ClientResponse:
    """Send and wait for the response head. `target` goes out byte for byte as the client wrote it."""
    try:
        return await session.request(
            method, URL(base + target, encoded=True), headers=headers, data=body or None, allow_redirects=False
        )
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise as_upstream_error(error) from error


def as_upstream_error(error: BaseException) -> UpstreamError:
    """Any error of the client library as Refused (nothing was sent) or Broken (something may have been)."""
    text = str(error) or type(error).__name__
    if isinstance(error, UpstreamError):
        return error
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL | aiohttp.ConnectionTimeoutError):
        return RefusedError(f"no connection: {text}")
    if isinstance(error, asyncio.TimeoutError):
        return BrokenError(f"no answer in time: {text}")
    return BrokenError(f"connection failed: {text}")
