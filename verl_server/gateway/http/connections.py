"""Connections of clients: size of heads, time in which a request must arrive, number of connections, upgrades."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import orjson
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.base import openai_error
from verl_server.gateway.errors import ErrorKind, GatewayError

MAX_WAITING_REQUESTS = 8
"""Requests that a client may send before the reply to an earlier one, until its connection is read no more."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of the head of a request: the URL and all header lines."""
EXTENSION = "verl_server.connection"
"""Name of the extension of the scope of a request that tells whether its connection closes or is closed."""
LINGER_S = 1.0
"""Seconds in which bytes of a refused head are read and dropped. A client that still sends can then read the reply."""


def protocol_of(config: GatewayConfig) -> type[asyncio.Protocol]:
    """The class of the connections of a gateway, for `uvicorn.Config(http=...)`."""

    class Connection(_Connection):
        settings = config

    return Connection


class _Connection(HttpToolsProtocol):
    """A connection that is closed if a request does not arrive in time, or if the head of a request is too long.

    uvicorn closes a connection that is idle after a reply. It waits for ever for the first request, for the rest of a
    request, and after bytes that begin no request. It has no limit for heads. It takes the body of a request with the
    header `Upgrade` for the next request.

    A client may send more requests before the reply to its first request. They wait. If the client leaves, uvicorn
    tells the last request only. This class tells the running request, and it reads on, because only reading finds the
    end of a connection. It stops reading when more than `MAX_WAITING_REQUESTS` requests wait, and uvicorn stops in a
    large body of a waiting request: the end of such a connection is found when the running request has its reply.
    """

    settings: GatewayConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection unless the head or the body of the request has arrived before."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last. `cycle` is the newest request, which may wait."""
        self._num_head_bytes = 0
        """Number of bytes since the parser has found a head or bytes of a body. Trailers after a body count too."""
        self._is_refused = False
        self._closed: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            count = self.settings.max_connections
            message = f"the gateway has {count} open connections already; send the request again later"
            transport.write(_refusal("503 Service Unavailable", ErrorKind.OVERLOADED, message))
            transport.close()
        else:
            self._expect(self.settings.head_timeout_s)

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
            self._expect(self.settings.head_timeout_s)

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
        cycle.scope["extensions"] = {EXTENSION: {"is_closing": self.transport.is_closing, "closed": self._closed}}
        self._expect(self.settings.body_timeout_s if cycle.more_body else None)
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
        self._expect(None)
        if not self._closed.done():
            self._closed.set_result(None)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after some seconds. None: do not close it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


def closed_future(scope: Scope, receive: Receive) -> asyncio.Future[None]:
    """Has a result when the connection of a request is closed. Call it when the body has been read."""
    extensions = scope.setdefault("extensions", {})
    if EXTENSION not in extensions:  # another server than `_Connection`; `receive` ends at the latest after the reply
        task = asyncio.create_task(_wait_until_closed(receive))
        extensions[EXTENSION] = {"is_closing": task.done, "closed": task}
    closed: asyncio.Future[None] = extensions[EXTENSION]["closed"]
    return closed


async def _wait_until_closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_closed(scope: Scope) -> bool:
    """Whether the connection of a request is closed or closes. The event loop tells the former only in a later step."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found is not None and (bool(found["is_closing"]()) or found["closed"].done())


def _refusal(status: str, kind: ErrorKind, message: str) -> bytes:
    """The reply for a client whose connection is closed. Its dialect is not known. `status`: with its reason phrase."""
    body = orjson.dumps(openai_error(GatewayError(kind, message))[1])
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    if kind.is_retryable:
        head += "retry-after: 1\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
