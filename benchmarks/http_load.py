"""Sends HTTP requests whose bodies were encoded beforehand, from one event loop, and measures each of them.

The load is a closed loop: each of N callers has a connection and sends its next request after the reply to the previous
one. The client is a bare protocol without a library, so that it takes little of the CPU time that is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"
REPLY_TIMEOUT_S = 120.0
"""Maximum number of seconds of one request."""


@dataclass
class Burst:
    """One run of the closed load."""

    requests_per_s: float
    latencies_ms: list[float] = field(default_factory=list)
    """Latency of each request, up to the last byte of its reply."""
    cpu_ms: float = 0.0
    """CPU time of the measured process per request, all threads. 0 if it was not measured."""


class Connection(asyncio.Protocol):
    """A connection that is kept alive. One request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._reply: asyncio.Future[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._reply is None:
            return
        length = LENGTH.search(self._received, 0, end)
        is_whole = self._received.endswith(LAST_CHUNK)
        if length is not None:
            is_whole = len(self._received) >= end + 4 + int(length[1])
        if is_whole and not self._reply.done():
            self._reply.set_result(bytes(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionError("the server has closed the connection"))

    async def send(self, request: bytes) -> bytes:
        """The reply with its head. Raises RuntimeError for another status than 200, and TimeoutError."""
        if self._transport is None:
            raise ConnectionError("there is no connection")
        self._received.clear()
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            reply = await self._reply
        if not reply.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"unexpected reply: {reply[:600]!r}")
        return reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(url: str) -> Connection:
    """A connection to the server of a URL."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Connection, parts.hostname or "", parts.port or 80))[1]


def encode_head(url: str, path: str, key: str, body: bytes) -> bytes:
    """The head of a POST request."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


def body_of(reply: bytes) -> bytes:
    """The body of a reply."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    if LENGTH.search(head) is not None:
        return rest
    body = b""
    while rest:  # chunks: size, data, size, data, ...
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all of its threads, since its start. Linux."""
    return time.clock_gettime((~pid << 3) | 2)


async def run_burst(
    url: str,
    path: str,
    keys: Sequence[str],
    bodies: Sequence[bytes],
    in_flight: int,
    seconds: float,
    pid: int | None = None,
) -> Burst:
    """Send requests for `seconds`. Keys and bodies are used in turn. `pid`: process whose CPU time is measured."""
    connections = [await connect(url) for _ in range(in_flight)]
    numbers, burst = itertools.count(), Burst(0.0)

    async def call_until(deadline: float, connection: Connection) -> None:
        while (started := time.perf_counter()) < deadline:
            number = next(numbers)
            body, key = bodies[number % len(bodies)], keys[number % len(keys)]
            await connection.send(encode_head(url, path, key, body) + body)
            burst.latencies_ms.append((time.perf_counter() - started) * 1e3)

    try:
        cpu_s = 0.0 if pid is None else cpu_seconds(pid)
        started = time.perf_counter()
        await asyncio.gather(*(call_until(started + seconds, connection) for connection in connections))
        burst.requests_per_s = len(burst.latencies_ms) / (time.perf_counter() - started)
        if pid is not None:
            burst.cpu_ms = (cpu_seconds(pid) - cpu_s) * 1e3 / len(burst.latencies_ms)
    finally:
        for connection in connections:
            connection.close()
    return burst
