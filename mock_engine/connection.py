"""One client's connection, with the manners of the server that vLLM runs on where aiohttp's own differ.

What is no HTTP gets uvicorn's plain 400 and a closed connection, and no traceback in the log: what a client breaks is
not a fault of ours. Bodies are taken as they come, because that server never unpacks a content encoding, and a header
may be as long as vLLM allows. The odd thing is that the 400 is written past aiohttp, which would answer such a client
in HTTP/1.0 and in words of its own.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import Any, NoReturn

from aiohttp import web

HEADER_BYTES_MAX = 4 * 1024 * 1024  # vLLM's default for --h11-max-incomplete-event-size
HEADERS_MAX = 65_536
NO_HTTP = b"Invalid HTTP request received."


class Connection(web.RequestHandler):
    """`server` is aiohttp's: what it knows of the application and of its other connections."""

    __slots__ = ()

    def __init__(self, server: web.Server, keepalive_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is wanted, which aiohttp allows but does not declare
            keepalive_timeout=keepalive_s,
            auto_decompress=False,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
        )

    def data_received(self, data: bytes) -> None:
        """A body that turns out broken while its handler waits for the rest: aiohttp would let both wait for ever."""
        super().data_received(data)
        request = self._current_request
        broken = bool(self._messages) and getattr(self._messages[-1][0], "status", None) == 400
        if broken and request is not None and not request.content.is_eof() and self.transport is not None:
            self.transport.write(_refusal())
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> NoReturn:
        """Every fault of a handler is answered inside the application, so two kinds come here: what is no HTTP, and
        clients that are gone."""
        broken = status == 400 or isinstance(exc, web.RequestPayloadError)
        if broken and self.transport is not None and not request.writer.output_size:
            self.transport.write(_refusal())
        raise ConnectionResetError("the client broke the connection") from exc

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


def _refusal() -> bytes:
    head = (
        f"HTTP/1.1 400 Bad Request\r\ndate: {formatdate(usegmt=True)}\r\nserver: uvicorn\r\n"
        f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(NO_HTTP)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + NO_HTTP
