"""Connections of clients: size of heads, time in which a request must arrive, number of connections, upgrades."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httptools
import orjson
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.base import openai_error
from verl_server.gateway.errors import ErrorKind, GatewayError

MAX_WAITING_REQUESTS = 8
"""Requests that a client may send before the reply to an earlier one, until its connection is read no more."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of the head of a request: the URL and all header lines."""
CONNECTION = "connection"
"""Key of the connection in the state of each of its requests."""
LINGER_S = 1.0
"""Seconds in which bytes of a refused head are read and dropped. A client that still sends can then read the reply."""


def server_settings(app: ASGIApp, config: GatewayConfig, grace_s: int) -> uvicorn.Config:
    """The settings of the HTTP server of a gateway. `grace_s`: seconds in which replies may be sent at the end."""
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, config),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,  # nothing depends on the address of a client
        timeout_keep_alive=config.idle_timeout_s,
        timeout_graceful_shutdown=grace_s,
    )


class Connection(HttpToolsProtocol):
    """A connection that is closed if a request does not arrive in time, or if the head of a request is too long.

    uvicorn closes a connection that is idle after a reply. It waits for ever for the first request, for the rest of a
    request, and after bytes that begin no request. It has no limit for heads. It takes the body of a request with the
    header `Upgrade` for the next request.

    A client may send more requests before the reply to its first request. They wait. If the client leaves, uvicorn
    tells the last request only, and the reply to the running request would fail. uvicorn also reads no more then, but
    only reading finds the end of a connection. This class reads until more than `MAX_WAITING_REQUESTS` requests wait,
    or a large body of a waiting request: the end of such a connection is found when the running request has its reply.
    """

    def __init__(self, settings: GatewayConfig, *, app_state: Any, **others: Any) -> None:
        super().__init__(app_state={**app_state, CONNECTION: self}, **others)
        self._settings = settings
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection unless the head or the body of the request has arrived before."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last. `cycle` is the newest request, which may wait."""
        self._num_head_bytes = 0
        """Number of bytes since the parser has found a head or bytes of a body. Trailers after a body count too."""
        self._is_refused = False
        self.closed: asyncio.Future[None] = self.loop.create_future()
        """Has a result when the connection is closed."""

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed or closes. The event loop sets `closed` only in a later step."""
        return self.transport.is_closing() or self.closed.done()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            count = self._settings.max_connections
            message = f"the gateway has {count} open connections already; send the request again later"
            transport.write(_refusal("503 Service Unavailable", ErrorKind.OVERLOADED, message))
            transport.close()
        else:
            self._expect(self._settings.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self._is_refused and not self.transport.is_closing():
            size = MAX_HEAD_BYTES + 1 - self._num_head_bytes
            self._parse(rest[:size])
            rest = rest[size:]
        if self._is_refused:
            return
        if not self._is_answering() and self._deadline is None and not self.transport.is_closing():
            self._expect(self._settings.head_timeout_s)

    def _parse(self, data: memoryview) -> None:
        """Give bytes to the parser. The head of a request to change the protocol is parsed again without `Upgrade`."""
        self._num_head_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data, head = data[upgrade.args[0] :], self._head_without_upgrade()
                    self.parser = httptools.HttpRequestParser(
                        self
                    )  # the old one may ignore what follows, as after `close`
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                    self.parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter: the method is CONNECT
            if self._is_answering():
                self.transport.close()
            else:
                self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has read. A server may ignore `Upgrade` (RFC 9110, section 7.8)."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _is_answering(self) -> bool:
        """Whether a request has no complete reply yet. A reply to other bytes would stand within its reply."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_head(self) -> None:
        self._is_refused = True
        if self._is_answering():
            self.transport.close()
            return
        message = f"the URL and the headers of the request have more than {MAX_HEAD_BYTES} bytes"
        self.transport.write(_refusal("431 Request Header Fields Too Large", ErrorKind.TOO_LARGE, message))
        self.transport.write_eof()
        self._expect(LINGER_S)

    def on_headers_complete(self) -> None:
        """The head of a request has arrived."""
        self._num_head_bytes = 0
        if self.parser.should_upgrade():
            return  # `_parse` parses the head again
        self._expect(None)
        super().on_headers_complete()
        self.headers = []  # for trailers after the body: they are no headers of the request
        if 0 < len(self.pipeline) <= MAX_WAITING_REQUESTS:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Answer a request. The time for its body begins now, also if the request has waited."""
        self._running = cycle
        self._expect(self._settings.body_timeout_s if cycle.more_body else None)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Bytes of the body of a request have arrived."""
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._num_head_bytes = 0
        if self.parser.should_upgrade():
            return
        self._expect(None)
        super().on_message_complete()
        if len(self.pipeline) <= MAX_WAITING_REQUESTS:
            self.flow.resume_reading()  # uvicorn stops after a large part of a body, and goes on when it is read

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        super().connection_lost(exc)
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        self._expect(None)
        self.app_state = {}  # it refers to this object
        if not self.closed.done():
            self.closed.set_result(None)

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after some seconds. None: do not close it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


def connection_of(scope: Scope) -> Connection:
    """The connection of a request."""
    connection: Connection = scope["state"][CONNECTION]
    return connection


def _refusal(status: str, kind: ErrorKind, message: str) -> bytes:
    """The reply for a client whose connection is closed. Its dialect is not known. `status`: with its reason phrase."""
    body = orjson.dumps(openai_error(GatewayError(kind, message))[1])
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    if kind.is_retryable:
        head += "retry-after: 1\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
