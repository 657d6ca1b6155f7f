"""Connections of clients: how long a request may take to arrive, and how many connections there may be."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.dialect import openai_error
from verl_server.gateway.errors import ErrorKind, GatewayError


def protocol_of(config: GatewayConfig) -> type[asyncio.Protocol]:
    """The class of the connections of a gateway, for `uvicorn.Config(http=...)`."""

    class Connection(_Connection):
        settings = config

    return Connection


class _Connection(HttpToolsProtocol):
    """A connection that is closed if a request does not arrive in time.

    uvicorn closes a connection that is idle after a reply. It waits for ever for the first request, for the rest of a
    request, and after bytes that begin no request.
    """

    settings: GatewayConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection unless the head or the body of the request has arrived before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.write(_refusal(self.settings.max_connections))
            transport.close()
        else:
            self._expect(self.settings.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._deadline is None and not self.transport.is_closing():
            self._expect(self.settings.head_timeout_s)

    def on_headers_complete(self) -> None:
        """The head of a request has arrived."""
        self._expect(self.settings.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._expect(None)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._expect(None)
        super().connection_lost(exc)

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after some seconds. None: do not close it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


def _refusal(max_connections: int) -> bytes:
    """The reply for a client whose connection is one too many. Its dialect is not known."""
    message = f"the gateway has {max_connections} open connections already; send the request again later"
    body = orjson.dumps(openai_error(GatewayError(ErrorKind.OVERLOADED, message))[1])
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
