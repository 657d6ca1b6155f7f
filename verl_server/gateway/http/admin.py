"""The admin API: create, list and end sessions, and read their records. It has a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pydantic
from fastapi import FastAPI, Request, Response

from verl_server.gateway.config import MIN_SESSION_KEY_CHARS
from verl_server.gateway.errors import ErrorKind, GatewayError, list_wrong_fields
from verl_server.gateway.http.access import Access
from verl_server.gateway.sessions.session_end import record_kinds
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.trajectory.exports import ExportFormat
from verl_server.trajectory.exports.files import export_lines
from verl_server.trajectory.recorder import load_session
from verl_server.types import Json

KEY_PATTERN = "^[!-~]+$"
"""A key can stand in a header: printable ASCII characters without spaces."""
RECORD_FORMAT = "jsonl"
"""Name of the format of the records themselves."""
RECORD_FORMATS = (RECORD_FORMAT, *ExportFormat)
"""Formats in which the record of a session can be read."""


class AdminBody(pydantic.BaseModel):
    """The body of a request. Other fields are refused: a limit with a misspelled name would limit nothing."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Body = TypeVar("Body", bound=AdminBody)


class NewSession(AdminBody):
    """Settings of a new session."""

    session_id: str | None = None
    key: str | None = pydantic.Field(default=None, min_length=MIN_SESSION_KEY_CHARS, pattern=KEY_PATTERN)
    metadata: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling_params: dict[str, Any] = {}
    expires_in_s: float | None = pydantic.Field(default=None, gt=0)


class SessionEnd(AdminBody):
    """Result of a session."""

    stop_reason: str = "done"
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    train: list[str] | None = None


def add_admin_routes(
    app: FastAPI, store: SessionStore, access: Access, read_object: Callable[[Request], Awaitable[Json]]
) -> None:
    """Add the routes under `/admin/sessions`. `read_object`: reads the JSON object of a body with a limited size."""

    async def read(request: Request, kind: type[Body]) -> Body:
        access.require_admin(request)  # before the body: without the key, nobody can fill the memory
        try:
            return kind.model_validate(await read_object(request))
        except pydantic.ValidationError as error:
            raise GatewayError(ErrorKind.INVALID_REQUEST, list_wrong_fields(error, kind.model_fields)) from None

    async def create(request: Request) -> Response:
        info, key = store.create(**dict(await read(request, NewSession)))
        return _reply({**info.public(), "key": key, "base_url": f"{request.base_url}".rstrip("/")})

    async def list_all(request: Request) -> Response:
        access.require_admin(request)
        return _reply({"sessions": [info.public() for info in store.infos()]})

    async def show(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        return _reply(store.info(session_id).public())

    async def end(request: Request, session_id: str) -> Response:
        return _reply(store.end(session_id, **dict(await read(request, SessionEnd))).public())

    async def export(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        path: Path = store.record_file(session_id)
        if not path.exists():
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        name = request.query_params.get("format", RECORD_FORMAT)
        if name == RECORD_FORMAT:
            return Response(await asyncio.to_thread(_read_whole_lines, path), media_type="application/jsonl")
        if name not in set(ExportFormat):
            raise GatewayError(ErrorKind.INVALID_REQUEST, f"'format' must be one of {', '.join(RECORD_FORMATS)}")
        model = request.query_params.get("model")
        lines = await asyncio.to_thread(_export_lines, path, ExportFormat(name), model)
        return Response(lines, media_type="application/jsonl")

    app.add_api_route("/admin/sessions", create, methods=["POST"])
    app.add_api_route("/admin/sessions", list_all, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}", show, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}/end", end, methods=["POST"])
    app.add_api_route("/admin/sessions/{session_id}/record", export, methods=["GET"])


def _read_whole_lines(path: Path) -> bytes:
    """The complete lines of a file. A session that runs may be writing the next line."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _export_lines(path: Path, kind: ExportFormat, model: str | None) -> bytes:
    """The session in another format, as JSON lines."""
    graph = load_session(path)
    record_kinds(graph)  # of a session that runs; the file gets them at the end of the session
    return b"".join(orjson.dumps(line) + b"\n" for line in export_lines(graph, kind, model))


def _reply(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
