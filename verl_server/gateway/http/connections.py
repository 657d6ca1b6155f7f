"""Connections of clients: how long a request may take to arrive, and how many connections there may be."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.dialect import openai_error
from verl_server.gateway.errors import ErrorKind, GatewayError

MAX_WAITING_REQUESTS = 8
"""Requests that a client may send before the reply to an earlier one, until its connection is read no more."""


def protocol_of(config: GatewayConfig) -> type[asyncio.Protocol]:
    """The class of the connections of a gateway, for `uvicorn.Config(http=...)`."""

    class Connection(_Connection):
        settings = config

    return Connection


class _Connection(HttpToolsProtocol):
    """A connection that is closed if a request does not arrive in time.

    uvicorn closes a connection that is idle after a reply. It waits for ever for the first request, for the rest of a
    request, and after bytes that begin no request.

    A client may send more requests before the reply to its first request. They wait. If the client leaves, uvicorn
    tells the last request only. This class tells the running request, and it reads on, because only reading finds the
    end of a connection. It stops reading after `MAX_WAITING_REQUESTS` requests, and uvicorn stops in a large body of a
    waiting request: the end of such a connection is found when the running request has its reply.
    """

    settings: GatewayConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection unless the head or the body of the request has arrived before."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last. `cycle` is the newest request, which may wait."""

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
        self._expect(None)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_WAITING_REQUESTS:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Answer a request. The time for its body begins now, also if the request has waited."""
        self._running = cycle
        self._expect(self.settings.body_timeout_s if cycle.more_body else None)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._expect(None)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._expect(None)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
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
