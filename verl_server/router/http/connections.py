"""Connections of a router's callers: a time in which the first request must arrive, and a limit of their number."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from verl_server.server.open_files import open_file_limit, raise_open_file_limit

HEAD_TIMEOUT_S = 30.0
"""Seconds in which the head of the first request must arrive on a connection."""
IDLE_TIMEOUT_S = 75.0
"""Seconds after a reply in which the next request must arrive: more than the 60 seconds of load balancers."""


class RouterServer(web.Server):
    """An HTTP server whose connections leave open files for those to the replicas.

    When there are too many connections, the oldest one that has sent no key is closed for a new one: callers without
    a key cannot keep the others out. Without such a connection the new one is refused (503).
    """

    def __init__(self, handler: Any, **settings: Any) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # `read_body` refuses compressed bodies
            keepalive_timeout=IDLE_TIMEOUT_S,
            **settings,
        )
        raise_open_file_limit()
        self.max_connections = open_file_limit() // 2
        self.num_connections = 0
        self.strangers: dict[_Connection, asyncio.TimerHandle] = {}
        """Connections without a key, the oldest one first, and what closes those without a request."""

    def __call__(self) -> web.RequestHandler:
        """The protocol of one connection."""
        return _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class _Connection(web.RequestHandler):
    def __init__(self, server: RouterServer, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._server = server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        server = self._server
        server.num_connections += 1
        if server.num_connections > server.max_connections:
            if not server.strangers:
                transport.write(_refusal(server.max_connections))
                transport.close()
                return
            next(iter(server.strangers)).abort()
        server.strangers[self] = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._server.strangers and (self._messages or self._current_request is not None):
            self._server.strangers[self].cancel()  # the head of a request has arrived

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.num_connections -= 1
        self.admit()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self.admit()
        if self.transport is not None:
            self.transport.abort()

    def admit(self) -> None:
        """The connection is no stranger's any more."""
        if (timer := self._server.strangers.pop(self, None)) is not None:
            timer.cancel()


def admit(request: web.BaseRequest) -> None:
    """Keep the connection of a request that has a key when there are too many."""
    if isinstance(request.protocol, _Connection):
        request.protocol.admit()


def _refusal(maximum: int) -> bytes:
    body = orjson.dumps({"error": {"message": f"the router has {maximum} open connections already", "retryable": True}})
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + body
