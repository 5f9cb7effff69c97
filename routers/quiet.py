"""What the HTTP server logs: errors of ours with their traceback, and nothing that a client can cause at will.

A client may send what is no HTTP, stop in the middle of a body, or leave while it is written to. None of it is news
about this router, so it is counted and left out of the log; a traceback there always means a bug.
"""

from __future__ import annotations

import logging

from aiohttp import http_exceptions, web

_CLIENT_ERRORS = (http_exceptions.HttpProcessingError, web.RequestPayloadError, ConnectionError, EOFError)


class ClientErrors(logging.Filter):
    """`count`: errors of clients, at whatever level the server would have told them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _CLIENT_ERRORS):
            self.count += 1
            return False
        return record.levelno >= logging.ERROR


def server_logger(errors: ClientErrors) -> logging.Logger:
    """One for one server: not registered by name, so that two services of one process count apart."""
    logger = logging.Logger("routers.http", logging.DEBUG)
    logger.parent = logging.getLogger()
    logger.addFilter(errors)
    return logger
