"""The routes for turns. They bypass FastAPI's handling of requests, which takes 0.1 ms for each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_server.gateway.http.request_context import RequestContext
from verl_server.gateway.metrics import GatewayMetrics

SESSION_PREFIX = "/session/"


class TurnRoute(Route):
    """A route of the router for a path of turns. `TurnRoutes` handles nearly all requests before the router."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # as routes of FastAPI do; the log has the path of the route
        await super().handle(scope, receive, send)


class GatewayApp(FastAPI):
    """The application of the gateway: FastAPI's behind `RequestContext` and `TurnRoutes`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        super().__init__(
            title="verl_server gateway", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.state.metrics = metrics
        self._entry: ASGIApp = super().__call__

    def add_turn_routes(self, routes: Sequence[TurnRoute]) -> None:
        """Add the routes for turns. Called once."""
        self.router.routes += routes
        self._entry = RequestContext(TurnRoutes(super().__call__, routes), self.state.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        scope["app"] = self
        if "//" in scope.get("path", ""):  # a base URL with a slash at its end
            scope["path"] = re.sub("/{2,}", "/", scope["path"])
        await self._entry(scope, receive, send)


class TurnRoutes:
    """ASGI application that answers POST requests to the paths of turns. Another application answers all others."""

    def __init__(self, app: ASGIApp, routes: Sequence[TurnRoute]) -> None:
        """`app`: the other application. `routes`: with the paths `/v1/...` and `/session/{session_key}/v1/...`."""
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        route = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> TurnRoute | None:
        path: str = scope["path"]
        if not path.startswith(SESSION_PREFIX):
            return self._routes.get(path)
        key, _, rest = path.removeprefix(SESSION_PREFIX).partition("/")
        scope["path_params"] = {"session_key": key}
        return self._routes.get(f"{SESSION_PREFIX}{{session_key}}/{rest}") if key else None
