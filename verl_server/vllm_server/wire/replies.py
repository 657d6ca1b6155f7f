"""Replies of the routes of this folder, and the status and the body of an error."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.types import Json

#: The status of each kind of error; the adapter turns it into the same error again.
_STATUS: tuple[tuple[type[VerlServerError], int], ...] = (
    (UnsupportedError, 501),
    (ServerBusyError, 409),
    (NotReadyError, 503),
    (BadInputError, 400),
)


def json_reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def status_of(error: VerlServerError) -> int:
    """The HTTP status for an error. 500 for a failure of the server."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: VerlServerError, status: int) -> Json:
    return {"error": {"message": error.message, "type": type(error).__name__, "code": status}}


def error_reply(error: VerlServerError) -> Response:
    status = status_of(error)
    return json_reply(error_body(error, status), status)
