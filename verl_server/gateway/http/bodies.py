"""Reading of the bodies of requests."""

from __future__ import annotations

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from verl_server.gateway.dialects.fields import require_recordable
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
    """The JSON object of a body. Raises GatewayError, before the body is parsed if it has too many values."""
    if len(raw) > MAX_JSON_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        message = f"the request body has more than {MAX_JSON_VALUES} commas and opening brackets"
        raise GatewayError(ErrorKind.TOO_LARGE, message)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError(ErrorKind.INVALID_REQUEST, f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the request body must be a JSON object")
    require_recordable("body", body)
    return body
