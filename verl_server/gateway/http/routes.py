"""All routes but those for turns: the admin API, health, metrics, models, exports and the live page. And keys."""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
import pydantic
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers

from verl_server.errors import BadInputError
from verl_server.gateway.config import MIN_SESSION_KEY_CHARS, GatewayConfig
from verl_server.gateway.errors import ErrorKind, GatewayError, list_wrong_fields
from verl_server.gateway.health import GatewayHealth, GatewayMetrics
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionInfo, SessionStore, record_kinds
from verl_server.gateway.threads import OneAtATime
from verl_server.ranks.placement import is_loopback
from verl_server.trajectory.exports import ExportFormat, export_lines
from verl_server.trajectory.recorder import load_session
from verl_server.trajectory.view import DecodeFn, make_session_view, render_page, visible
from verl_server.types import Json

CLIENT_HAS_GONE = 499
"""Status of a request whose client has gone before the reply. Nobody reads it."""

# -- Access -----------------------------------------------------------------------------------------
# `Access`: which session a request belongs to, by its key, and whether it may use the admin API.

OPEN_SESSION = OPEN_KEY = "open"
"""Id of the session of requests without a key in the open mode, and a key for clients that must send one."""


class Access:
    """Checks the keys of requests."""

    def __init__(self, store: SessionStore, config: GatewayConfig) -> None:
        self._store, self._config = store, config

    def session_of(self, request: Request) -> Session:
        """The session of a request. Its key is in the path, a Bearer token, or the header `x-api-key`.

        Raises GatewayError: 401 without the key of a session, 403 for a session that has ended and for a page of
        another origin without a key, 404 for a path with the id of another session than that of the key.
        """
        in_path = request.path_params.get("session_key")
        keys = keys_of(request.headers)
        if in_path is not None and (session_id := self._store.find_by_key(in_path)) is not None:
            return self._store.session(session_id)
        session_id = self._find_session(keys)
        if session_id is None and self._needs_no_key(*keys, in_path):
            _require_own_origin(request.headers)
            session_id = self._find_open_session()
        if session_id is None:
            if self.is_admin(request):
                message = (
                    "this is the key of the admin API; create a session with POST /admin/sessions and send its key"
                )
                raise GatewayError(ErrorKind.AUTHENTICATION, message)
            raise GatewayError(
                ErrorKind.AUTHENTICATION,
                "the key of the session is missing or wrong; send it as `Authorization: Bearer KEY`, as `x-api-key`, "
                "or in the path: /session/KEY/v1/...",
            )
        if in_path is not None and in_path != session_id:
            raise GatewayError(ErrorKind.NOT_FOUND, "there is no such session for this key")
        return self._store.session(session_id)

    def readable_sessions(self, request: Request) -> list[str]:
        """Ids of the sessions that the key of a request may read: all with the admin key, or that of the key.

        A session that has ended can be read. Raises GatewayError: 401 for a wrong key, 403 for a page of another
        origin without a key.
        """
        keys = keys_of(request.headers)
        if (session_id := self._find_session(keys)) is not None:
            return [session_id]
        if self._needs_no_key(*keys):
            _require_own_origin(request.headers)
            return [info.id for info in self._store.infos() if info.id == OPEN_SESSION]
        if not self.is_admin(request):
            message = "the key is missing or wrong; enter the admin key or the key of a session"
            raise GatewayError(ErrorKind.AUTHENTICATION, message)
        return [info.id for info in self._store.infos()]

    def _find_session(self, keys: Sequence[str]) -> str | None:
        """Id of the session of the first key that is one of a session."""
        found = (self._store.find_by_key(key) for key in keys)
        return next((session_id for session_id in found if session_id is not None), None)

    def _find_open_session(self) -> str:
        """Id of the session of requests without a key, which is created. Raises GatewayError (403) if it has ended."""
        try:
            info = self._store.info(OPEN_SESSION)
        except GatewayError:
            info, _ = self._store.create(OPEN_SESSION, can_expire=False)
        if info.ended_at is not None:
            raise GatewayError(
                ErrorKind.PERMISSION,
                f"the session {OPEN_SESSION!r} of requests without a key has ended ({info.stop_reason}); "
                "create a session and send its key, or use another folder",
            )
        return info.id

    def _needs_no_key(self, *sent: str | None) -> bool:
        """Whether the open mode serves a request that has sent these keys and no others."""
        return self._config.is_open and set(sent) <= {None, OPEN_KEY}

    def is_admin(self, request: Request) -> bool:
        """Whether the request has the key of the admin API."""
        keys, expected = keys_of(request.headers), self._config.admin_key
        return expected is not None and any(hmac.compare_digest(key.encode(), expected.encode()) for key in keys)

    def require_admin(self, request: Request) -> None:
        """Raise GatewayError (401) unless the request has the key of the admin API."""
        if not self.is_admin(request):
            raise GatewayError(ErrorKind.AUTHENTICATION, "the key of the admin API is missing or wrong")


def _require_own_origin(headers: Headers) -> None:
    """Raise GatewayError (403) for a request without a key that a page of another origin can have sent.

    A browser sends such requests for each page that the user opens, also to the loopback address. A page can also give
    the loopback address a name of its own (DNS rebinding): then `Host` has this name.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    cure = "create a session and send its key"
    if not _is_loopback_host(host):
        message = f"requests without a key need a loopback address or localhost as Host; {cure}"
        raise GatewayError(ErrorKind.PERMISSION, message)
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        message = f"requests without a key are refused for pages of another Origin than the gateway's; {cure}"
        raise GatewayError(ErrorKind.PERMISSION, message)


def _is_loopback_host(host: str) -> bool:
    """Whether the header `Host`, a name or an address with or without a port, means this machine."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def keys_of(headers: Headers) -> list[str]:
    """The keys that a request carries: a program may send a key of its own beside that of the session."""
    found = dict[bytes, str]()
    for name, value in reversed(headers.raw):  # of a header that is sent twice, the first counts
        if name in (b"authorization", b"x-api-key", b"api-key"):
            found[name] = value.decode("latin-1")
    kind, _, token = found.get(b"authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    keys = (bearer, found.get(b"x-api-key"), found.get(b"api-key"))  # the latter is the header of Azure's clients
    return [key for key in keys if key]


# -- Exports ----------------------------------------------------------------------------------------
# The records of sessions in all formats. The conversion of a long record takes seconds.

RECORD_FORMAT = "jsonl"
"""Name of the format of the records themselves."""
RECORD_FORMATS = (RECORD_FORMAT, *ExportFormat)
"""Formats in which the record of a session can be read."""


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

    reading, converting = OneAtATime(), OneAtATime()

    async def read(request: Request, kind: type[Body]) -> Body:
        access.require_admin(request)  # before the body: without the key, nobody can fill the memory
        return _checked(kind, await read_object(request))

    async def create(request: Request) -> Response:
        info, key = store.create(**dict(await read(request, NewSession)))
        return json_response({**info.public(), "key": key, "base_url": f"{request.base_url}".rstrip("/")})

    async def list_all(request: Request) -> Response:
        access.require_admin(request)
        return json_response(list_sessions(store, _checked(SessionQuery, dict(request.query_params))))

    async def show(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        return json_response(store.info(session_id).public())

    async def end(request: Request, session_id: str) -> Response:
        return json_response((await store.end(session_id, **dict(await read(request, SessionEnd)))).public())

    async def export(request: Request, session_id: str) -> Response:
        access.require_admin(request)
        path: Path = store.record_file(session_id)
        if not path.exists():
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        name = request.query_params.get("format", RECORD_FORMAT)
        if name not in RECORD_FORMATS:
            raise GatewayError(ErrorKind.INVALID_REQUEST, f"'format' must be one of {', '.join(RECORD_FORMATS)}")
        if name == RECORD_FORMAT:
            lines = await reading.call(request.is_disconnected, _read_whole_lines, path)
        else:
            kind, model = ExportFormat(name), request.query_params.get("model")
            lines = await converting.call(request.is_disconnected, _convert, path, kind, model)
        if lines is None:
            return Response(status_code=CLIENT_HAS_GONE)  # nobody reads it
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


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with JSON."""
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/json")


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
    return json_response(body) if is_good else json_response(body, 503, {"retry-after": "1"})


# -- Models -----------------------------------------------------------------------------------------
# The routes for names of models, and the root, which Claude Code asks for.

CREATED_AT = "2026-01-01T00:00:00Z"


def add_model_routes(app: FastAPI, access: Access, config: GatewayConfig) -> None:
    """Add `/v1/models` and `/`."""

    async def models(request: Request) -> Json:
        access.session_of(request)
        return list_models(config.model_names, request.headers)

    async def model(request: Request) -> Json:
        """A model by its name, or the list without a name. The gateway accepts every name."""
        if not (name := request.path_params["name"]):
            return await models(request)
        access.session_of(request)
        return _model(name, request.headers)

    async def root() -> Response:
        return Response()

    for prefix in ("", "/session/{session_key}"):
        app.add_api_route(f"{prefix}/v1/models", models, methods=["GET"])
        app.add_api_route(f"{prefix}/v1/models/{{name:path}}", model, methods=["GET"])
        app.add_api_route(f"{prefix}/", root, methods=["GET", "HEAD"])


def list_models(names: tuple[str, ...], headers: Mapping[str, str]) -> Json:
    """The names of the model, as Anthropic writes them for its clients, and otherwise as OpenAI does."""
    models = [_model(name, headers) for name in names]
    if "anthropic-version" in headers:
        return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": models}


def _model(name: str, headers: Mapping[str, str]) -> Json:
    if "anthropic-version" in headers:
        return {"type": "model", "id": name, "display_name": name, "created_at": CREATED_AT}
    return {"id": name, "object": "model", "created": 0, "owned_by": "verl_server"}


# -- Pages ------------------------------------------------------------------------------------------
# The rendered pages of sessions. Rendering takes seconds for a long record.

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record that is shown."""
MAX_SHOWN_TOKENS = 1_000_000
"""Maximum number of tokens of a record that is shown."""
CURE = "`verl-server trajectory show --html` writes the page of a longer record"


def tag_of(file: Path) -> str | None:
    """Changes with the file. None without a file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'


def _render(file: Path, decode: DecodeFn) -> bytes:
    """The page of a record, which may be written at the same time. Raises GatewayError if it cannot be shown."""
    if file.stat().st_size > MAX_RECORD_BYTES:
        raise GatewayError(ErrorKind.TOO_LARGE, f"the record has more than {MAX_RECORD_BYTES >> 20} MiB; {CURE}")
    try:
        graph = load_session(file)
        if sum(len(node.token_ids) for node in graph.nodes) > MAX_SHOWN_TOKENS:
            raise GatewayError(ErrorKind.TOO_LARGE, f"the record has more than {MAX_SHOWN_TOKENS} tokens; {CURE}")
        record_kinds(graph)  # of a session that runs; the file gets them at the end of the session
        return render_page(make_session_view(graph, decode)).encode()
    except BadInputError as error:
        raise GatewayError(ErrorKind.INTERNAL, f"the record cannot be read: {error.message}") from None


# -- Live page -----------------------------------------------------------------------------------------

MAX_SHOWN_SESSIONS = 500
"""Number of sessions that the page lists: the latest ones."""
NO_STORE = {"Cache-Control": "no-store"}
"""The page has texts of agents, which stay out of the browser's disk cache."""


def add_ui_routes(app: FastAPI, store: SessionStore, access: Access, decode: DecodeFn) -> None:
    """Add `/ui` and what it reads. The key of the admin API shows all sessions, the key of a session this session.

    `decode`: decodes token ids with special tokens.
    """
    pages = OneAtATime()

    async def page() -> Response:
        return Response(_page(), media_type="text/html", headers={"Content-Security-Policy": _page_policy()})

    async def sessions(request: Request) -> Response:
        infos = [store.info(session_id) for session_id in access.readable_sessions(request)]
        is_admin = access.is_admin(request)
        latest = sorted(infos, key=lambda info: -info.created_at)[:MAX_SHOWN_SESSIONS]
        return json_response({"sessions": [_row(store, info, is_admin) for info in latest]}, headers=NO_STORE)

    async def session(request: Request, session_id: str) -> Response:
        if session_id not in access.readable_sessions(request):
            raise GatewayError(ErrorKind.NOT_FOUND, "there is no such session for this key")
        file = store.record_file(session_id)
        if (tag := tag_of(file)) is None:
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        if (html := await pages.call(request.is_disconnected, _render, file, decode)) is None:
            return Response(status_code=CLIENT_HAS_GONE)
        return Response(html, media_type="text/html", headers={**NO_STORE, "ETag": tag})

    app.add_api_route("/ui", page, methods=["GET"])
    app.add_api_route("/ui/sessions", sessions, methods=["GET"])
    app.add_api_route("/ui/sessions/{session_id}", session, methods=["GET"])


def _row(store: SessionStore, info: SessionInfo, is_admin: bool) -> Json:
    """A session. Its agent, which has the key of the session, sees no metadata: the expected answer, for example."""
    file = store.record_file(info.id)
    return {
        "id": info.id,
        "created_at": info.created_at,
        "is_open": info.ended_at is None,
        "stop_reason": visible(info.stop_reason or ""),
        "reward": info.reward,
        "metadata": visible(orjson.dumps(info.metadata).decode())[:500] if is_admin else "{}",
        "kilobytes": -(-file.stat().st_size // 1000) if file.exists() else None,
    }


@functools.cache
def _page() -> bytes:
    return (Path(__file__).parent / "live.html").read_bytes()


@functools.cache
def _page_policy() -> str:
    """The content security policy: only the page's own script runs, and it sends requests to the gateway only."""
    scripts: Sequence[bytes] = re.findall(rb"<script>(.*?)</script>", _page(), re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
