"""The HTTP application of the gateway: routes, keys, streams and errors. FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import re
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
import zstandard
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from verl_server.errors import VerlServerError
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import ARRIVED_AT, TurnRequest, require_size
from verl_server.gateway.dialects import DIALECTS
from verl_server.gateway.dialects.base import Dialect, KnownItems, NoObjectError, ParsedBody, derive, openai_error
from verl_server.gateway.errors import ErrorKind, FailureLog, GatewayError
from verl_server.gateway.health import GatewayHealth, GatewayMetrics
from verl_server.gateway.http.connections import connection_of
from verl_server.gateway.http.openapi import add_openapi_route
from verl_server.gateway.http.routes import (
    CLIENT_HAS_GONE,
    Access,
    add_admin_routes,
    add_health_routes,
    add_model_routes,
    add_ui_routes,
    json_response,
)
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.gateway.sessions.turns import Client, Generation, Slots
from verl_server.gateway.threads import is_short_body, run_aside
from verl_server.tracing import continue_trace, span
from verl_server.trajectory.view import DecodeFn
from verl_server.types import Json

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


# -- Turn replies -----------------------------------------------------------------------------------
# Replies with a turn. Their client waits for the turn until the reply is sent or the connection closes.

PART_BYTES = 64 * 1024
"""Maximum size of the parts of a reply. The server waits for the client when it has so many bytes to send."""


class TurnReply(Response):
    """A reply with the whole turn as JSON.

    The turn is delivered if the connection is open when at most one part of the reply is left in the buffers of the
    server. Nobody can know what the client reads from the buffers of the operating system.
    """

    def __init__(self, body: bytes, generation: Generation, waiting: contextlib.ExitStack) -> None:
        """`waiting`: the client leaves the turn when it is closed."""
        super().__init__(body, media_type="application/json")
        self._parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        self._generation, self._waiting = generation, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._waiting:
            is_long = len(self._parts) > 1
            if is_long:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for part in (*self._parts, b""):  # the last send waits until the client has taken the last part
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # the client may have gone just now
            if not connection_of(scope).is_closing:
                self._generation.set_delivered()
            if is_long:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await super().__call__(scope, receive, send)


class TurnStream(StreamingResponse):
    """A stream of server-sent events."""

    def __init__(self, events: AsyncIterator[bytes], client: Client) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = scope["app"].state.metrics.open_streams.track_inprogress()
        with self._client, streams:  # also if the client closes the connection before the first event
            await run_until(connection_of(scope).closed, self.stream_response(send))


async def run_until(end: asyncio.Future[None], work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run a coroutine in this task. It is cancelled when `end` is done: then the result is None.

    A task group takes several times as long.
    """
    task, is_running = asyncio.current_task(), True
    assert task is not None

    def cancel(_: asyncio.Future[None]) -> None:
        if is_running:
            task.cancel()

    end.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if not end.done() or task.uncancel():
            raise
        return None
    finally:
        is_running = False
        end.remove_done_callback(cancel)


# -- Bodies -----------------------------------------------------------------------------------------
# Reading of the bodies of requests.

MAX_ZSTD_WINDOW = 8 << 20
"""Bytes of memory for the window of a body that is compressed with zstd, as RFC 8878 recommends."""
MAX_JSON_VALUES = 1_000_000
"""Maximum number of commas and of opening brackets of a body, also in texts. The parser makes about as many values, and
stops the event loop meanwhile. A text with so many of these characters has about as many tokens."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, decompressed.

    Raises GatewayError: 413 for a body that is too long, compressed or not, without reading all of it, and 415 for a
    `Content-Encoding` that the gateway does not know.
    """
    named = request.headers.get("content-encoding", "").lower().split(",")
    encodings = [name for each in reversed(named) if (name := each.strip()) not in ("", "identity")]
    for name in encodings:
        if name not in DECODERS:
            known = ", ".join(DECODERS)
            message = f"the Content-Encoding {name[:40]!r} is not supported; send one of {known}, or none"
            raise GatewayError(ErrorKind.UNSUPPORTED_ENCODING, message)
    chunks, size = list[bytes](), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the connection was closed before the end of the body") from None
    body = b"".join(chunks)
    for name in encodings:
        body = await run_aside(False, _decompress, name, body, max_bytes)
    return body


def _decompress(name: str, body: bytes, max_bytes: int) -> bytes:
    """A body without an encoding. Raises GatewayError. The memory is bounded by `max_bytes`."""
    try:
        content = DECODERS[name](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        message = f"the body is not valid in its Content-Encoding {name!r}: {error}"
        raise GatewayError(ErrorKind.INVALID_REQUEST, message) from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _inflate(body: bytes, max_bytes: int, window_bits: int = zlib.MAX_WBITS | 32) -> bytes:
    """`deflate` means the format of zlib. Some clients leave out its header."""
    decoder = zlib.decompressobj(window_bits)  # 32: the header says whether it is gzip or zlib
    try:
        content = decoder.decompress(body, max_bytes)
    except zlib.error:
        if window_bits < 0:
            raise
        return _inflate(body, max_bytes, -zlib.MAX_WBITS)
    if not decoder.eof and len(content) < max_bytes:
        raise EOFError("its end is missing")
    return content


def _read_zstd(body: bytes, max_bytes: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(body, read_across_frames=True) as reader:
        return reader.read(max_bytes)


DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {"gzip": _inflate, "deflate": _inflate, "zstd": _read_zstd}
"""Functions that decompress a body to at most a number of bytes, by the name of the encoding."""


def _too_large(max_bytes: int) -> GatewayError:
    return GatewayError(ErrorKind.TOO_LARGE, f"the request body has more than {max_bytes} bytes")


def parse_object(raw: bytes) -> Json:
    """The JSON object of a body. Raises the errors of `parse_body`."""
    return parse_body(raw, KnownItems()).fields


def parse_body(raw: bytes, known: KnownItems) -> ParsedBody:
    """The JSON object of a body. Raises GatewayError, before the body is parsed if it has too many values.

    `known`: the objects of earlier requests, which are not parsed again.
    """
    if len(raw) > MAX_JSON_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        message = f"the request body has more than {MAX_JSON_VALUES} commas and opening brackets"
        raise GatewayError(ErrorKind.TOO_LARGE, message)
    try:
        return known.parse(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError(ErrorKind.INVALID_REQUEST, f"the request body is not valid JSON: {error}") from None
    except NoObjectError:
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the request body must be a JSON object") from None


def require_few_parts(body: Json, config: GatewayConfig) -> None:
    """Raise GatewayError (413) for a body with more content parts than the gateway allows.

    The parts of messages, of results of tools, and of Anthropic's `system` count.
    """
    count = _count_parts({"content": body.get("system")})
    for name in ("messages", "input"):
        items = body.get(name)
        count += sum(derive(_count_parts, item) for item in items) if isinstance(items, list) else 0
    if count > (maximum := config.max_content_parts):
        raise GatewayError(ErrorKind.TOO_LARGE, f"the request has {count} content parts, and {maximum} are allowed")


def _count_parts(item: Any) -> int:
    """Number of content parts of an item in a body."""
    pending, count = [[item]], 0
    while pending:
        items = pending.pop()
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                if isinstance(parts := item.get("content"), list):
                    count += len(parts)
                    pending.append(parts)
                if isinstance(parts := item.get("output"), list):
                    count += len(parts)
                    pending.append(parts)
    return count


# -- Gateway app ------------------------------------------------------------------------------------
# `GatewayApp`: gives each request an id, a span and a line in the log, and measures its duration.
#
# The id is the header `x-request-id` of the request, or a random id. It is in the headers of the reply (`x-request-
# id`, as OpenAI writes it, and `request-id`, as Anthropic does) and in each line of the log about the request.

ID_HEADERS = ("x-request-id", "request-id")
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""An id of a client that may stand in a log and in a header."""
SESSION_PREFIX = "/session/"


class GatewayApp(FastAPI):
    """The application of the gateway. Turns bypass FastAPI's handling of requests, which takes 0.1 ms for each."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        super().__init__(
            title="verl_server gateway", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.state.metrics = self._metrics = metrics
        self._turn_routes = dict[str, Route]()
        """By path: `/v1/...` and `/session/{session_key}/v1/...`."""

    def add_turn_route(self, route: Route) -> None:
        """Add a route for turns. FastAPI's router refuses other methods than POST."""
        self.router.routes.append(route)
        self._turn_routes[route.path] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        scope["app"] = self
        if "//" in scope["path"]:  # a base URL with a slash at its end
            scope["path"] = re.sub("/{2,}", "/", scope["path"])
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
                await self._answer(scope, receive, send_with_id)
                opened.set_attribute("http.response.status_code", status)
                opened.set_attribute("http.route", route_of(scope))
        finally:
            ARRIVED_AT.reset(token)
            seconds = time.monotonic() - arrived_at
            if "dialect" in state:
                self._measure(state, status, arrived_at, seconds)
            shown = (scope["method"], route_of(scope), status or "none", seconds)
            logger.info("request %s: %s %s, status %s, %.3f s", request_id, *shown)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._find(scope) if scope["method"] == "POST" else None
        if route is None:
            await super().__call__(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> Route | None:
        path: str = scope["path"]
        if not path.startswith(SESSION_PREFIX):
            return self._turn_routes.get(path)
        key, _, rest = path.removeprefix(SESSION_PREFIX).partition("/")
        scope["path_params"] = {"session_key": key}
        return self._turn_routes.get(f"{SESSION_PREFIX}{{session_key}}/{rest}") if key else None

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


# -- Clients ----------------------------------------------------------------------------------------
# Who sends a request for a turn: its fingerprint and its retries, by which a request that is sent again is known.


def client_of(request: Request, fingerprint: bytes) -> Client:
    """The client of a request, with its digest. The official SDKs count their retries in a header."""
    headers, connection = request.headers, connection_of(request.scope)
    count = headers.get("x-stainless-retry-count", "0")
    num_retries = int(count.lstrip("0")[:4] or 0) if count.isdecimal() else 0
    has_id = bool(headers.get("idempotency-key"))
    return Client(fingerprint, num_retries=num_retries, has_id=has_id, has_left=lambda: connection.is_closing)


def fingerprint_of(dialect: Dialect, key: str, body: ParsedBody) -> bytes:
    """The digest of a request.

    The official SDKs send no id of the request, unless a program asks for it: an `Idempotency-Key` distinguishes
    several requests with the same body.
    """
    digest = hashlib.sha256(dialect.path.encode())  # CPUs have instructions for SHA-256
    digest.update(hashlib.sha256(key.encode()).digest() if key else b"")
    for name, part in {**body.parts, **dialect.identity(body.fields)}.items():
        digest.update(b"%d %d %b%b" % (len(encoded := name.encode()), len(part), encoded, part))
    return digest.digest()


# -- App --------------------------------------------------------------------------------------------

MAX_FIELD_CHARS = 200
"""Maximum number of characters of the name of a field in an error."""
MAX_REFUSED_READERS = 64
"""Number of requests without a slot whose bodies are read at a time, to know them when they are sent again. More are
refused before they are read."""


def make_app(
    store: SessionStore,
    config: GatewayConfig,
    decode: DecodeFn,
    *,
    metrics: GatewayMetrics | None = None,
    health: GatewayHealth | None = None,
) -> FastAPI:
    """The application for the sessions of `store`.

    `decode`: decodes token ids for the live page. `health` None: the engine cannot be asked.
    """
    metrics = metrics or GatewayMetrics()
    app = GatewayApp(metrics)
    app.state.failures = FailureLog()
    access = Access(store, config)
    add_health_routes(app, access, health or GatewayHealth(config.run_dir, store, None, metrics), metrics, store)
    refused_readers = Slots(MAX_REFUSED_READERS)
    for dialect in DIALECTS:
        handlers = {dialect.path: _make_handler(dialect, access, config, refused_readers)}
        if dialect.count_path is not None:
            handlers[dialect.count_path] = _make_count_handler(dialect, access, config)
        for path, handler in handlers.items():
            for prefix in ("", "/session/{session_key}"):
                app.add_turn_route(Route(prefix + path, handler, methods=["POST"], name=path))
    add_model_routes(app, access, config)
    add_openapi_route(app)

    async def read_object(request: Request) -> Json:
        return parse_object(await read_body(request, config.max_body_bytes))

    add_admin_routes(app, store, access, read_object)
    add_ui_routes(app, store, access, decode)
    app.add_exception_handler(404, _answer_unknown_path)
    app.add_exception_handler(405, _answer_wrong_method)
    app.add_exception_handler(GatewayError, _answer_error)
    app.add_exception_handler(VerlServerError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def _answer_unknown_path(request: Request, _: Exception) -> Response:
    path: str = request.scope["path"]  # `request.url` takes the beginning of `//session/KEY` for a host
    shown = _hide_keys(path)
    message = f"there is no path {shown[:MAX_FIELD_CHARS]!r}: {_cause_of(shown)}. docs/gateway.md lists the paths"
    error = GatewayError(ErrorKind.NOT_FOUND, message)
    status, body = _dialect_error(request, error)
    return json_response(body, status, _retry_headers(error))


def _hide_keys(path: str) -> str:
    """The path with KEY for what follows `session/`."""
    parts = path.split("/")
    before = ["", *parts]
    return "/".join("KEY" if name.lower() == "session" else part for name, part in zip(before, parts, strict=False))


def _dialect_error(request: Request, error: GatewayError) -> tuple[int, Json]:
    """HTTP status and body of an error for a request that no route of a dialect answers."""
    names = request.scope["path"].split("/")
    is_anthropic = "anthropic-version" in request.headers or "messages" in names
    dialect = next((each for each in DIALECTS if is_anthropic and each.path.endswith("/messages")), DIALECTS[0])
    return dialect.error(error)


def _cause_of(path: str) -> str:
    """Why there is no such path. A base URL with or without `/v1` is the most frequent mistake."""
    parts = path.removeprefix("/session/KEY").rstrip("/").split("/")[1:]
    num_versions = next((index for index, part in enumerate(parts) if part != "v1"), len(parts))
    rest = "/".join(["", *parts[num_versions:]])
    offered = [each for dialect in DIALECTS for each in (dialect.path, dialect.count_path)]
    if f"/v1{rest}" not in (*offered, "/v1/models") and not rest.startswith("/models/"):
        return "the gateway does not offer it"
    if not num_versions:
        return "the base URL must end with /v1"
    if num_versions > 1:
        return (
            "the base URL of OpenAI's clients ends with /v1, and the base URL of Anthropic's clients ends without /v1"
        )
    return "leave out the slash at its end" if path.endswith("/") else "the gateway does not offer it"


async def _answer_wrong_method(request: Request, error: Exception) -> Response:
    found = GatewayError(ErrorKind.INVALID_REQUEST, f"this path takes no {request.method[:MAX_FIELD_CHARS]}")
    return json_response(_dialect_error(request, found)[1], 405, getattr(error, "headers", None))


async def _answer_error(request: Request, error: Exception) -> Response:
    found = _logged(error, request)
    status, body = openai_error(found)
    return json_response(body, status, _retry_headers(found))


def _logged(error: Exception, request: Request) -> GatewayError:
    """The error for the agent. The log gets the path of the route: the path of the request may have a key."""
    path, session_id = route_of(request.scope), getattr(request.state, "session_id", None)
    name = f"the request {path}" if session_id is None else f"the request {path} of the session {session_id!r}"
    failures: FailureLog = request.app.state.failures
    found = failures.as_gateway_error(error, name, request.state.request_id)
    request.state.failure_status = found.kind.status
    return found


def _make_handler(
    dialect: Dialect, access: Access, config: GatewayConfig, refused_readers: Slots
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            request.state.dialect = dialect.path.removeprefix("/v1/")
            session = access.session_of(request)
            with contextlib.ExitStack() as arrival:
                try:
                    arrival.enter_context(session.arriving())
                except GatewayError:
                    if not refused_readers.is_full:
                        with refused_readers.held():
                            await _note_refusal(dialect, request, session, config)
                    raise
                session, turn_request, fingerprint = await _receive(
                    dialect, dialect.parse, request, session, access, config
                )
                client = client_of(request, fingerprint)
                generation = await session.start_turn(turn_request, client)
            if generation.num_joins > 1:
                request.app.state.metrics.attached_retries.inc()
            if turn_request.stream:
                events = _events(dialect, request, turn_request, generation, config)
                return TurnStream(events, client)
            return await _answer(dialect, request, turn_request, generation, client)
        except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
            return _error_reply(dialect, request, error)

    return handle


def _make_count_handler(
    dialect: Dialect, access: Access, config: GatewayConfig
) -> Callable[[Request], Awaitable[Response]]:
    async def count(request: Request) -> Response:
        try:
            session = access.session_of(request)
            with session.slots.held():
                session, counted, _ = await _receive(dialect, dialect.parse_count, request, session, access, config)
                return json_response(dialect.count_reply(await session.count_tokens(counted)))
        except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
            return _error_reply(dialect, request, error)

    return count


async def _note_refusal(dialect: Dialect, request: Request, session: Session, config: GatewayConfig) -> None:
    """Read a request that gets no slot, so that it is known when it is sent again."""
    raw, key = await read_body(request, config.max_body_bytes), request.headers.get("idempotency-key", "")

    def read() -> bytes:
        return fingerprint_of(dialect, key, parse_body(raw, session.known_items))

    with contextlib.suppress(GatewayError):  # a body that is no JSON object gets no turn later
        session.note_refusal(client_of(request, await run_aside(is_short_body(len(raw)), read)))


async def _receive(
    dialect: Dialect,
    parse: Callable[[Json], TurnRequest],
    request: Request,
    session: Session,
    access: Access,
    config: GatewayConfig,
) -> tuple[Session, TurnRequest, bytes]:
    """Read a request. Returns its session, what the session gets of it, and its digest."""
    raw, key = await read_body(request, config.max_body_bytes), request.headers.get("idempotency-key", "")

    def read() -> tuple[TurnRequest, bytes]:
        body = parse_body(raw, session.known_items)
        fields = dialect.resolve(body.fields, session)
        require_few_parts(fields, config)
        parsed = parse(fields)
        require_size(parsed, config)
        return dataclasses.replace(parsed, num_bytes=len(raw)), fingerprint_of(dialect, key, body)

    turn_request, fingerprint = await run_aside(is_short_body(len(raw)), read)
    if not session.is_open:  # the session has ended while the body arrived
        session = access.session_of(request)
    request.state.session_id = session.id
    images = session.images
    turn_request = await run_aside(images.is_short(turn_request), images.check, turn_request, config.max_image_pixels)
    return session, turn_request, fingerprint


def _error_reply(dialect: Dialect, request: Request, error: Exception) -> Response:
    found = _logged(error, request)
    status, body = dialect.error(found)
    return json_response(body, status, _retry_headers(found))


async def _answer(
    dialect: Dialect, request: Request, turn_request: TurnRequest, generation: Generation, client: Client
) -> Response:
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(client)
        turn = await run_until(connection_of(request.scope).closed, generation.wait())
        if turn is None:
            return Response(status_code=CLIENT_HAS_GONE)  # nobody reads it
        body = orjson.dumps(dialect.reply(turn_request, turn))
        mark_first_token(request.state)
        return TurnReply(body, generation, waiting.pop_all())


async def _events(
    dialect: Dialect, request: Request, turn_request: TurnRequest, generation: Generation, config: GatewayConfig
) -> AsyncIterator[bytes]:
    reply_id = generation.reply_id
    stream = dialect.open_stream(turn_request, reply_id)
    for event in stream.begin(generation.num_prompt_tokens):
        yield event.encode()
    try:
        async with contextlib.aclosing(generation.follow(config.keep_alive_s)) as deltas:
            async for delta in deltas:
                if delta is None:
                    yield stream.keep_alive()
                    continue
                mark_first_token(request.state)
                for event in stream.add(delta):
                    yield event.encode()
        turn = await generation.wait()
    except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
        yield stream.fail(_logged(error, request)).encode()
        return
    for event in stream.end(turn):
        yield event.encode()
    await asyncio.sleep(0)  # the client may have gone just now; uvicorn raises nothing when it cannot send
    if not connection_of(request.scope).is_closing:
        generation.set_delivered()


def _retry_headers(error: GatewayError) -> dict[str, str]:
    return {"retry-after": "1"} if error.kind.is_retryable else {"x-should-retry": "false"}
