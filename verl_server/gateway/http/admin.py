"""The admin API: create, list and end sessions, and read their records. It has a key of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pydantic
from fastapi import FastAPI, Request, Response

from verl_server.gateway.config import MIN_SESSION_KEY_CHARS
from verl_server.gateway.errors import ErrorKind, GatewayError, list_wrong_fields
from verl_server.gateway.health import GatewayHealth, GatewayMetrics
from verl_server.gateway.http.access import Access
from verl_server.gateway.sessions.session_store import SessionStore, record_kinds
from verl_server.gateway.threads import call_in_thread
from verl_server.trajectory.exports import ExportFormat, export_lines
from verl_server.trajectory.recorder import load_session
from verl_server.types import Json

# -- Exports ----------------------------------------------------------------------------------------
# `SessionExports`: the records of sessions in all formats. The conversion of a long record takes seconds.

RECORD_FORMAT = "jsonl"
"""Name of the format of the records themselves."""
RECORD_FORMATS = (RECORD_FORMAT, *ExportFormat)
"""Formats in which the record of a session can be read."""


class SessionExports:
    """Reads one record and converts one record at a time: many exports do not slow down all turns.

    They run in daemon threads, which do not hold up the end of the gateway.
    """

    def __init__(self) -> None:
        self._reading, self._converting = asyncio.Semaphore(1), asyncio.Semaphore(1)

    async def get(
        self, file: Path, kind: str, model: str | None, has_left: Callable[[], Awaitable[bool]]
    ) -> bytes | None:
        """A record as JSON lines. None if the client has left before its record was read.

        `kind`: one of `RECORD_FORMATS`. `model`: name of the model in the lines. Raises the errors of `load_session`.
        """
        is_converted = kind != RECORD_FORMAT
        async with self._converting if is_converted else self._reading:
            if await has_left():
                return None
            if is_converted:
                return await call_in_thread(_convert, file, ExportFormat(kind), model)
            return await call_in_thread(_read_whole_lines, file)


def _read_whole_lines(file: Path) -> bytes:
    """The complete lines of a file. A session that runs may be writing the next line."""
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _convert(file: Path, kind: ExportFormat, model: str | None) -> bytes:
    """The session in another format, as JSON lines."""
    graph = load_session(file)
    record_kinds(graph)  # of a session that runs; the file gets them at the end of the session
    return b"".join(orjson.dumps(line) + b"\n" for line in export_lines(graph, kind, model))


# -- Admin ------------------------------------------------------------------------------------------

MAX_LISTED_SESSIONS = 10_000
"""Maximum number of sessions of a reply: a few megabytes."""
KEY_PATTERN = "^[!-~]+$"
"""A key can stand in a header: printable ASCII characters without spaces."""


class AdminBody(pydantic.BaseModel):
    """The body of a request. Other fields are refused: a limit with a misspelled name would limit nothing."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Body = TypeVar("Body", bound=AdminBody)
Model = TypeVar("Model", bound=pydantic.BaseModel)


class NewSession(AdminBody):
    """Settings of a new session."""

    session_id: str | None = None
    key: str | None = pydantic.Field(default=None, min_length=MIN_SESSION_KEY_CHARS, pattern=KEY_PATTERN)
    metadata: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    sampling_params: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    expires_in_s: float | None = pydantic.Field(default=None, gt=0)


class SessionEnd(AdminBody):
    """Result of a session."""

    stop_reason: str = "done"
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    train: list[str] | None = None


class SessionQuery(pydantic.BaseModel):
    """Which sessions are listed. The fields of the query of `GET /admin/sessions`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    limit: int = pydantic.Field(default=1000, ge=1, le=MAX_LISTED_SESSIONS)
    """Maximum number of sessions."""
    after: str | None = None
    """Id of a session. Only sessions that were created later are listed."""
    open: bool | None = None
    """True for sessions that accept requests only, False for sessions that have ended only."""


def list_sessions(store: SessionStore, query: SessionQuery) -> Json:
    """A page of the sessions, in the order of their creation.

    `next` is the value of `after` for the next page, or null at the end. Raises GatewayError (404) for an unknown
    session.
    """
    infos = iter(store.infos())
    if query.after is not None:
        last = store.info(query.after)
        next(info for info in infos if info is last)
    if query.open is not None:
        infos = (info for info in infos if (info.ended_at is None) == query.open)
    page = list(itertools.islice(infos, query.limit))
    has_more = next(infos, None) is not None
    return {"sessions": [info.public() for info in page], "next": page[-1].id if has_more else None}


def add_admin_routes(
    app: FastAPI, store: SessionStore, access: Access, read_object: Callable[[Request], Awaitable[Json]]
) -> None:
    """Add the routes under `/admin/sessions`. `read_object`: reads the JSON object of a body with a limited size."""

    exports = SessionExports()

    async def read(request: Request, kind: type[Body]) -> Body:
        access.require_admin(request)  # before the body: without the key, nobody can fill the memory
        return _checked(kind, await read_object(request))

    async def create(request: Request) -> Response:
        info, key = store.create(**dict(await read(request, NewSession)))
        return _reply({**info.public(), "key": key, "base_url": f"{request.base_url}".rstrip("/")})

    async def list_all(request: Request) -> Response:
        access.require_admin(request)
        return _reply(list_sessions(store, _checked(SessionQuery, dict(request.query_params))))

    async def show(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        return _reply(store.info(session_id).public())

    async def end(request: Request, session_id: str) -> Response:
        return _reply((await store.end(session_id, **dict(await read(request, SessionEnd)))).public())

    async def export(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        path: Path = store.record_file(session_id)
        if not path.exists():
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        name = request.query_params.get("format", RECORD_FORMAT)
        if name not in RECORD_FORMATS:
            raise GatewayError(ErrorKind.INVALID_REQUEST, f"'format' must be one of {', '.join(RECORD_FORMATS)}")
        lines = await exports.get(path, name, request.query_params.get("model"), request.is_disconnected)
        if lines is None:
            return Response(status_code=499)  # nobody reads it
        return Response(lines, media_type="application/jsonl")

    app.add_api_route("/admin/sessions", create, methods=["POST"])
    app.add_api_route("/admin/sessions", list_all, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}", show, methods=["GET"])
    app.add_api_route("/admin/sessions/{session_id}/end", end, methods=["POST"])
    app.add_api_route("/admin/sessions/{session_id}/record", export, methods=["GET"])


def _checked(kind: type[Model], fields: Json) -> Model:
    """The fields of a request. Raises GatewayError (400) that names the wrong fields."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise GatewayError(ErrorKind.INVALID_REQUEST, list_wrong_fields(error, kind.model_fields)) from None


def _reply(body: Json) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


# -- Health -----------------------------------------------------------------------------------------
# The routes for health and metrics. Only `/health`, which generates a token, needs the key of the admin.

LIVE_PATHS = ("/health/liveliness", "/health/liveness")
"""Paths that answer while the event loop runs. LiteLLM has both names."""
READY_PATH, PING_PATH, METRICS_PATH = "/health/readiness", "/health", "/metrics"


def add_health_routes(
    app: FastAPI, access: Access, health: GatewayHealth, metrics: GatewayMetrics, store: SessionStore
) -> None:
    """Add the health routes and `/metrics`."""

    async def alive() -> Response:
        return _health_reply({"status": "healthy"})

    async def ready() -> Response:
        reasons = await health.reasons()
        return _health_reply({"status": "not ready" if reasons else "ready", "reasons": reasons}, is_good=not reasons)

    async def ping(request: Request) -> Response:
        access.require_admin(request)
        report = await health.examine()
        return _health_reply(report, is_good=report["status"] == "healthy")

    async def show_metrics() -> Response:
        metrics.sessions_open.set(store.num_open)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    for path in LIVE_PATHS:
        app.add_api_route(path, alive, methods=["GET"])
    app.add_api_route(READY_PATH, ready, methods=["GET"])
    app.add_api_route(PING_PATH, ping, methods=["GET"])
    app.add_api_route(METRICS_PATH, show_metrics, methods=["GET"])


def _health_reply(body: Json, *, is_good: bool = True) -> Response:
    headers = {} if is_good else {"retry-after": "1"}
    return Response(orjson.dumps(body), 200 if is_good else 503, headers, "application/json")
