"""The HTTP application of the gateway: routes, keys, streams and errors. FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from verl_server.errors import VerlServerError
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import TurnRequest, require_size
from verl_server.gateway.dialects import DIALECTS
from verl_server.gateway.dialects.dialect import Dialect, openai_error
from verl_server.gateway.errors import ErrorKind, FailureLog, GatewayError
from verl_server.gateway.health import GatewayHealth
from verl_server.gateway.http.access import Access
from verl_server.gateway.http.admin import add_admin_routes
from verl_server.gateway.http.bodies import parse_body, parse_object, read_body, require_few_parts
from verl_server.gateway.http.clients import client_of, fingerprint_of, read_fingerprint
from verl_server.gateway.http.connections import closed_future, is_closed
from verl_server.gateway.http.health import add_health_routes
from verl_server.gateway.http.models import add_model_routes
from verl_server.gateway.http.openapi import add_openapi_route
from verl_server.gateway.http.request_context import mark_first_token, route_of
from verl_server.gateway.http.turn_replies import TurnReply, TurnStream, wait_for_first
from verl_server.gateway.http.turn_routes import GatewayApp, TurnRoute
from verl_server.gateway.http.ui.routes import add_ui_routes
from verl_server.gateway.metrics import GatewayMetrics
from verl_server.gateway.sessions.generation import Client, Generation
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.gateway.sessions.slots import Slots
from verl_server.gateway.worker_threads import is_short_body, run_aside
from verl_server.trajectory.view.token_texts import DecodeFn
from verl_server.types import Json

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
    routes, refused_readers = list[TurnRoute](), Slots(MAX_REFUSED_READERS)
    for dialect in DIALECTS:
        handlers = {dialect.path: _make_handler(dialect, access, config, refused_readers)}
        if dialect.count_path is not None:
            handlers[dialect.count_path] = _make_count_handler(dialect, access, config)
        for path, handler in handlers.items():
            for prefix in ("", "/session/{session_key}"):
                routes.append(TurnRoute(prefix + path, handler, methods=["POST"], name=path))
    app.add_turn_routes(routes)
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
    """The path with KEY for what follows `session/`. Everybody may send a path: it is split, and not searched."""
    shown, is_key = list[str](), False
    for part in path.split("/"):
        if part or not is_key:
            shown.append("KEY" if is_key else part)
            is_key = not is_key and part.lower() == "session"
    return "/".join(shown)


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
            session, key = access.session_of(request), request.headers.get("idempotency-key", "")
            with contextlib.ExitStack() as arrival:
                try:
                    arrival.enter_context(session.arriving())
                except GatewayError:
                    if not refused_readers.is_full:
                        with refused_readers.held():
                            raw = await read_body(request, config.max_body_bytes)
                            is_short = is_short_body(len(raw))
                            with contextlib.suppress(GatewayError):  # a body that is no JSON gets no turn later
                                known = session.known_items
                                fingerprint = await run_aside(is_short, read_fingerprint, dialect, key, raw, known)
                                session.note_refusal(client_of(request, fingerprint))
                    raise
                raw = await read_body(request, config.max_body_bytes)
                is_short = is_short_body(len(raw))
                turn_request, fingerprint = await run_aside(is_short, _parse_turn, dialect, key, raw, session, config)
                if not session.is_open:  # the session has ended while the body arrived
                    session = access.session_of(request)
                request.state.session_id = session.id
                turn_request = await _with_readable_images(turn_request, session, config)
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
                raw = await read_body(request, config.max_body_bytes)
                is_short = is_short_body(len(raw))
                counted = await run_aside(is_short, _parse_count, dialect, raw, session, config)
                if not session.is_open:
                    session = access.session_of(request)
                request.state.session_id = session.id
                counted = await _with_readable_images(counted, session, config)
                return json_response(dialect.count_reply(await session.count_tokens(counted)))
        except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
            return _error_reply(dialect, request, error)

    return count


def _parse_turn(
    dialect: Dialect, key: str, raw: bytes, session: Session, config: GatewayConfig
) -> tuple[TurnRequest, bytes]:
    """The request for a turn, and its digest. `key`: the idempotency key of the request."""
    body = parse_body(raw, session.known_items)
    fields = dialect.resolve(body.fields, session)
    return _parse(dialect.parse, fields, raw, session, config), fingerprint_of(dialect, key, body)


def _parse_count(dialect: Dialect, raw: bytes, session: Session, config: GatewayConfig) -> TurnRequest:
    return _parse(dialect.parse_count, parse_body(raw, session.known_items).fields, raw, session, config)


def _parse(
    parse: Callable[[Json], TurnRequest], body: Json, raw: bytes, session: Session, config: GatewayConfig
) -> TurnRequest:
    require_few_parts(body, config)
    request = parse(body)
    require_size(request, config)
    return dataclasses.replace(request, num_bytes=len(raw))


async def _with_readable_images(request: TurnRequest, session: Session, config: GatewayConfig) -> TurnRequest:
    images = session.images
    return await run_aside(images.is_short(request), images.check, request, config.max_image_pixels)


def _error_reply(dialect: Dialect, request: Request, error: Exception) -> Response:
    found = _logged(error, request)
    status, body = dialect.error(found)
    return json_response(body, status, _retry_headers(found))


async def _answer(
    dialect: Dialect, request: Request, turn_request: TurnRequest, generation: Generation, client: Client
) -> Response:
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(client)
        await wait_for_first(generation.task, closed_future(request.scope, request.receive))
        if not generation.task.done():
            return Response(status_code=499)  # nobody reads it
        body = orjson.dumps(dialect.reply(turn_request, await generation.wait()))
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
    if not is_closed(request.scope):
        generation.set_delivered()


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with JSON."""
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/json")


def _retry_headers(error: GatewayError) -> dict[str, str]:
    return {"retry-after": "1"} if error.kind.is_retryable else {"x-should-retry": "false"}
