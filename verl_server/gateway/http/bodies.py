"""Reading of the bodies of requests."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.known_items import KnownItems, NoObjectError, ParsedBody, derive
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.types import Json

MAX_JSON_VALUES = 1_000_000
"""Maximum number of commas and of opening brackets of a body, also in texts. The parser makes about as many values, and
stops the event loop meanwhile. A text with so many of these characters has about as many tokens."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. Raises GatewayError (413) for a body that is too long, without reading all of it."""
    chunks, size = list[bytes](), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise GatewayError(ErrorKind.TOO_LARGE, f"the request body has more than {max_bytes} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the connection was closed before the end of the body") from None
    return b"".join(chunks)


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
