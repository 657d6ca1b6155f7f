"""Reading of the bodies of requests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import zstandard
from fastapi import Request
from starlette.requests import ClientDisconnect

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.known_items import KnownItems, NoObjectError, ParsedBody, derive
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.worker_threads import run_aside
from verl_server.types import Json

MAX_ZSTD_WINDOW = 8 << 20
"""Bytes of memory for the window of a body that is compressed with zstd, as RFC 8878 recommends."""
MAX_JSON_VALUES = 1_000_000
"""Maximum number of commas and of opening brackets of a body, also in texts. The parser makes about as many values, and
stops the event loop meanwhile. A text with so many of these characters has about as many tokens."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, decompressed.

    Raises GatewayError: 413 for a body that is too long, compressed or not, without reading all of it, and 415 for a
    `Content-Encoding` that the gateway does not know.
    """
    named = request.headers.get("content-encoding", "").lower().split(",")
    encodings = [name for each in reversed(named) if (name := each.strip()) not in ("", "identity")]
    for name in encodings:
        if name not in DECODERS:
            known = ", ".join(DECODERS)
            message = f"the Content-Encoding {name[:40]!r} is not supported; send one of {known}, or none"
            raise GatewayError(ErrorKind.UNSUPPORTED_ENCODING, message)
    chunks, size = list[bytes](), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the connection was closed before the end of the body") from None
    body = b"".join(chunks)
    for name in encodings:
        body = await run_aside(False, _decompress, name, body, max_bytes)
    return body


def _decompress(name: str, body: bytes, max_bytes: int) -> bytes:
    """A body without an encoding. Raises GatewayError. The memory is bounded by `max_bytes`."""
    try:
        content = DECODERS[name](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        message = f"the body is not valid in its Content-Encoding {name!r}: {error}"
        raise GatewayError(ErrorKind.INVALID_REQUEST, message) from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _inflate(body: bytes, max_bytes: int, window_bits: int = zlib.MAX_WBITS | 32) -> bytes:
    """`deflate` means the format of zlib. Some clients leave out its header."""
    decoder = zlib.decompressobj(window_bits)  # 32: the header says whether it is gzip or zlib
    try:
        content = decoder.decompress(body, max_bytes)
    except zlib.error:
        if window_bits < 0:
            raise
        return _inflate(body, max_bytes, -zlib.MAX_WBITS)
    if not decoder.eof and len(content) < max_bytes:
        raise EOFError("its end is missing")
    return content


def _read_zstd(body: bytes, max_bytes: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(body, read_across_frames=True) as reader:
        return reader.read(max_bytes)


DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {"gzip": _inflate, "deflate": _inflate, "zstd": _read_zstd}
"""Functions that decompress a body to at most a number of bytes, by the name of the encoding."""


def _too_large(max_bytes: int) -> GatewayError:
    return GatewayError(ErrorKind.TOO_LARGE, f"the request body has more than {max_bytes} bytes")


def parse_object(raw: bytes) -> Json:
    """The JSON object of a body. Raises the errors of `parse_body`."""
    return parse_body(raw, KnownItems()).fields


def parse_body(raw: bytes, known: KnownItems) -> ParsedBody:
    """The JSON object of a body. Raises GatewayError, before the body is parsed if it has too many values.

    `known`: the objects of earlier requests, which are not parsed again.
    """
    if len(raw) > MAX_JSON_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        message = f"the request body has more than {MAX_JSON_VALUES} commas and opening brackets"
        raise GatewayError(ErrorKind.TOO_LARGE, message)
    try:
        return known.parse(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError(ErrorKind.INVALID_REQUEST, f"the request body is not valid JSON: {error}") from None
    except NoObjectError:
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the request body must be a JSON object") from None


def require_few_parts(body: Json, config: GatewayConfig) -> None:
    """Raise GatewayError (413) for a body with more content parts than the gateway allows.

    The parts of messages, of results of tools, and of Anthropic's `system` count.
    """
    count = _count_parts({"content": body.get("system")})
    for name in ("messages", "input"):
        items = body.get(name)
        count += sum(derive(_count_parts, item) for item in items) if isinstance(items, list) else 0
    if count > (maximum := config.max_content_parts):
        raise GatewayError(ErrorKind.TOO_LARGE, f"the request has {count} content parts, and {maximum} are allowed")


def _count_parts(item: Any) -> int:
    """Number of content parts of an item in a body."""
    pending, count = [[item]], 0
    while pending:
        items = pending.pop()
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                if isinstance(parts := item.get("content"), list):
                    count += len(parts)
                    pending.append(parts)
                if isinstance(parts := item.get("output"), list):
                    count += len(parts)
                    pending.append(parts)
    return count
