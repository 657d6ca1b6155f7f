"""The admin API: create, list and end sessions, and read their records. It has a key of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pydantic
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse

from verl_server.gateway.access import Access
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.session_store import SessionStore
from verl_server.types import Json


class NewSession(pydantic.BaseModel):
    """Settings of a new session."""

    session_id: str | None = None
    metadata: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling_params: dict[str, Any] = {}
    expires_in_s: float | None = pydantic.Field(default=None, gt=0)


class SessionEnd(pydantic.BaseModel):
    """Result of a session."""

    stop_reason: str = "done"
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}


def add_admin_routes(app: FastAPI, store: SessionStore, access: Access) -> None:
    """Add the routes under `/admin/sessions`."""

    async def create(request: Request, settings: NewSession) -> Json:
        access.require_admin(request)
        info, key = store.create(**settings.model_dump())
        return {**info.public(), "key": key, "base_url": f"{request.base_url}".rstrip("/")}

    async def list_all(request: Request) -> Json:
        access.require_admin(request)
        return {"sessions": [info.public() for info in store.infos()]}

    async def show(request: Request, session_id: str) -> Json:
        access.require_admin(request)
        return store.info(session_id).public()

    async def end(request: Request, session_id: str, result: SessionEnd) -> Json:
        access.require_admin(request)
        values = (result.reward, *result.rewards.values())
        if not all(value is None or math.isfinite(value) for value in values):
            raise GatewayError(ErrorKind.INVALID_REQUEST, "rewards must be finite numbers")
        return store.end(session_id, **result.model_dump()).public()

    async def export(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        path: Path = store.record_file(session_id)
        if not path.exists():
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        return FileResponse(path, media_type="application/jsonl")

    app.add_api_route("/admin/sessions", create, methods=["POST"])
    app.add_api_route("/admin/sessions", list_all, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}", show, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}/end", end, methods=["POST"])
    app.add_api_route("/admin/sessions/{session_id}/record", export, methods=["GET"])
