"""Bodies of a router's requests and replies as JSON, and the HTTP status of each error. Pure functions."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from verl_server.adapter.json_body import without_half_characters
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    TornWeightsError,
    UnsupportedError,
    VerlServerError,
    to_wire,
)
from verl_server.types import Json

BODY_TIMEOUT_S = 300.0
"""Seconds in which the body of a request must arrive."""
MAX_LEVELS = 100
"""Maximum number of lists and objects within each other in a body: code that follows must not exhaust its stack."""
#: HTTP status for each error class; the first class that matches decides.
ERROR_STATUSES: tuple[tuple[type[VerlServerError], int], ...] = (
    (BadInputError, 400), (ServerBusyError, 429), (NotReadyError, 503), (DeadlineError, 504), (ShutDownError, 503),
    (ServerDiedError, 502), (ServerError, 502), (UnsupportedError, 501), (TornWeightsError, 503),
)  # fmt: skip


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_status(error: VerlServerError) -> int:
    """The HTTP status of an error: that of the replica, if a replica has answered with one."""
    replica_status = error.details.get("status")
    if isinstance(replica_status, int) and replica_status >= 400:
        return replica_status
    return next((code for kind, code in ERROR_STATUSES if isinstance(error, kind)), 500)


def error_response(error: VerlServerError) -> web.Response:
    """An error as JSON: `type`, `message` and `details` of `to_wire`, and `retryable`."""
    return json_response({"error": {**to_wire(error), "retryable": error.retryable}}, error_status(error))


async def read_body(request: web.BaseRequest) -> bytes:
    """The body of a request. Raises BadInputError for a compressed one (415), and for one that arrives slowly (408)."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the router takes no compressed bodies; send the body without Content-Encoding: {encoding[:40]}"
        raise BadInputError(message, status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return without_half_characters(await request.read())
    except TimeoutError:
        raise BadInputError(f"the body has not arrived within {BODY_TIMEOUT_S:g} s", status=408) from None


def parse_object(raw: bytes) -> Json:
    """The JSON object in a request's body. Raises BadInputError for another body, and for one of too many levels."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInputError(f"the request body must be a JSON object, got {type(body).__name__}")
    level: list[Any] = [body]
    for _ in range(MAX_LEVELS):
        values = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in values if type(item) in (dict, list)]
        if not level:
            return body
    raise BadInputError(f"the request body has more than {MAX_LEVELS} levels of lists and objects")
