"""`RequestContext`: gives each request an id, a span and a line in the log, and measures its duration.

The id is the header `x-request-id` of the request, or a random id. It is in the headers of the reply (`x-request-id`,
as OpenAI writes it, and `request-id`, as Anthropic does) and in each line of the log about the request.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders, State

from verl_server.gateway.context import ARRIVED_AT
from verl_server.gateway.metrics import GatewayMetrics
from verl_server.tracing import continue_trace, span
from verl_server.types import Json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ID_HEADERS = ("x-request-id", "request-id")
CLIENT_HAS_GONE = 499
"""Status of a request whose client has gone before the reply."""
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""An id of a client that may stand in a log and in a header."""


class RequestContext:
    """ASGI middleware around the application of the gateway."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get("x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        arrived_at, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                reply_headers = MutableHeaders(scope=message)
                for name in ID_HEADERS:
                    reply_headers[name] = request_id
            await send(message)

        token = ARRIVED_AT.set(arrived_at)
        try:
            with continue_trace(headers), span("gateway.request", {"verl.request_id": request_id}) as opened:
                await self._app(scope, receive, send_with_id)
                opened.set_attribute("http.response.status_code", status)
                opened.set_attribute("http.route", route_of(scope))
        finally:
            ARRIVED_AT.reset(token)
            seconds = time.monotonic() - arrived_at
            if "dialect" in state:
                self._measure(state, status, arrived_at, seconds)
            shown = (scope["method"], route_of(scope), status or "none", seconds)
            logger.info("request %s: %s %s, status %s, %.3f s", request_id, *shown)

    def _measure(self, state: Json, status: int, arrived_at: float, seconds: float) -> None:
        """Count a request for a turn. A stream that ends with an error has the status of the error."""
        status = state.get("failure_status", status or CLIENT_HAS_GONE)
        self._metrics.turns.labels(state["dialect"], status).inc()
        self._metrics.turn_seconds.observe(seconds)
        if "first_token_at" in state:
            self._metrics.first_token_seconds.observe(state["first_token_at"] - arrived_at)


def request_id_of(given: str | None) -> str:
    """The id that a client has given, or a random id."""
    return given if given is not None and VALID_ID.fullmatch(given) else secrets.token_hex(16)


def mark_first_token(state: State) -> None:
    """Note the time of the first content of the turn in the reply, for the metrics. `state`: that of the request."""
    if not hasattr(state, "first_token_at"):
        state.first_token_at = time.monotonic()


def route_of(scope: Scope) -> str:
    """The path of the route of a request: the path of the request may have a key."""
    return getattr(scope.get("route"), "path", "without a route")
