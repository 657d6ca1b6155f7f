"""The routes for health and metrics. Only `/health`, which generates a token, needs the key of the admin."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request, Response

from verl_server.gateway.health import GatewayHealth
from verl_server.gateway.http.access import Access
from verl_server.gateway.metrics import GatewayMetrics
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.types import Json

LIVE_PATHS = ("/health/liveliness", "/health/liveness")
"""Paths that answer while the event loop runs. LiteLLM has both names."""
READY_PATH, PING_PATH, METRICS_PATH = "/health/readiness", "/health", "/metrics"


def add_health_routes(
    app: FastAPI, access: Access, health: GatewayHealth, metrics: GatewayMetrics, store: SessionStore
) -> None:
    """Add the health routes and `/metrics`."""

    async def alive() -> Response:
        return _reply({"status": "healthy"})

    async def ready() -> Response:
        reasons = await health.reasons()
        return _reply({"status": "not ready" if reasons else "ready", "reasons": reasons}, is_good=not reasons)

    async def ping(request: Request) -> Response:
        access.require_admin(request)
        report = await health.examine()
        return _reply(report, is_good=report["status"] == "healthy")

    async def show_metrics() -> Response:
        metrics.sessions_open.set(store.num_open)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    for path in LIVE_PATHS:
        app.add_api_route(path, alive, methods=["GET"])
    app.add_api_route(READY_PATH, ready, methods=["GET"])
    app.add_api_route(PING_PATH, ping, methods=["GET"])
    app.add_api_route(METRICS_PATH, show_metrics, methods=["GET"])


def _reply(body: Json, *, is_good: bool = True) -> Response:
    headers = {} if is_good else {"retry-after": "1"}
    return Response(orjson.dumps(body), 200 if is_good else 503, headers, "application/json")
