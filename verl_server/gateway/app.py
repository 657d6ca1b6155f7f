"""The HTTP application of the gateway: routes, keys, streams and errors. FastAPI."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from verl_server.errors import VerlServerError
from verl_server.gateway.access import Access
from verl_server.gateway.admin import add_admin_routes
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.dialects import DIALECTS
from verl_server.gateway.dialects.dialect import Dialect, openai_error
from verl_server.gateway.errors import ErrorKind, GatewayError, as_gateway_error
from verl_server.gateway.models import add_model_routes
from verl_server.gateway.session import Generation, Session
from verl_server.gateway.session_store import SessionStore
from verl_server.types import Json

logger = logging.getLogger(__name__)


def make_app(store: SessionStore, config: GatewayConfig) -> FastAPI:
    """The application for the sessions of `store`."""
    app = FastAPI(title="verl_server gateway", docs_url=None, redoc_url=None)
    access = Access(store, config)
    for dialect in DIALECTS:
        handlers = {dialect.path: _make_handler(dialect, access, config)}
        if dialect.count_path is not None:
            handlers[dialect.count_path] = _make_count_handler(dialect, access, config)
        for path, handler in handlers.items():
            for prefix in ("", "/session/{session_key}"):
                app.add_api_route(prefix + path, handler, methods=["POST"], name=path)
    add_model_routes(app, access, config)
    add_admin_routes(app, store, access)
    app.add_exception_handler(GatewayError, _answer_error)
    app.add_exception_handler(VerlServerError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    status, body = openai_error(_logged(error, request))
    return json_response(body, status)


def _logged(error: Exception, request: Request) -> GatewayError:
    found = as_gateway_error(error)
    if found.kind is ErrorKind.INTERNAL:
        logger.error("the request %s failed", request.url.path, exc_info=error)
    return found


def _make_handler(dialect: Dialect, access: Access, config: GatewayConfig) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            session = access.session_of(request)
            raw = await read_body(request, config.max_body_bytes)
            turn_request = dialect.parse(parse_object(raw))
            fingerprint = hashlib.blake2b(dialect.path.encode() + raw, digest_size=16).digest()
            generation = session.start_turn(turn_request, fingerprint, is_retry=_is_retry(request.headers))
            if turn_request.stream:
                return _stream(dialect, session, turn_request, generation, config)
            return await _answer(dialect, request, turn_request, generation)
        except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
            return _error_reply(dialect, request, error)

    return handle


def _make_count_handler(
    dialect: Dialect, access: Access, config: GatewayConfig
) -> Callable[[Request], Awaitable[Response]]:
    async def count(request: Request) -> Response:
        try:
            session = access.session_of(request)
            counted = dialect.parse_count(parse_object(await read_body(request, config.max_body_bytes)))
            return json_response(dialect.count_reply(session.count_tokens(counted)))
        except Exception as error:  # noqa: BLE001 - every error is answered in the words of the dialect
            return _error_reply(dialect, request, error)

    return count


def _error_reply(dialect: Dialect, request: Request, error: Exception) -> Response:
    status, body = dialect.error(_logged(error, request))
    return json_response(body, status, _retry_headers(status))


async def _answer(dialect: Dialect, request: Request, turn_request: TurnRequest, generation: Generation) -> Response:
    gone = asyncio.create_task(_wait_until_gone(request))
    with generation:
        turn = asyncio.create_task(generation.wait())
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                return Response(status_code=499)  # nobody reads it
            result = turn.result()
        finally:
            gone.cancel()
            turn.cancel()
    generation.set_delivered()
    return json_response(dialect.reply(turn_request, result))


def _stream(
    dialect: Dialect, session: Session, request: TurnRequest, generation: Generation, config: GatewayConfig
) -> Response:
    async def events() -> AsyncIterator[bytes]:
        reply_id = hashlib.blake2b(f"{session.id}{id(generation)}".encode(), digest_size=12).hexdigest()
        with generation:
            for event in dialect.begin(request, reply_id, generation.num_prompt_tokens):
                yield event.encode()
            waiting = asyncio.ensure_future(generation.wait())
            try:
                while not waiting.done():
                    await asyncio.wait((waiting,), timeout=config.keep_alive_s)
                    if not waiting.done():
                        yield dialect.keep_alive()
                turn: AssistantTurn = waiting.result()
            except (Exception, asyncio.CancelledError) as error:
                if not waiting.done():
                    raise  # the client has gone
                failure = error if isinstance(error, Exception) else GatewayError(ErrorKind.OVERLOADED, "aborted")
                yield dialect.failure(request, as_gateway_error(failure), reply_id).encode()
                return
            finally:
                waiting.cancel()
            for event in dialect.events(request, turn, reply_id):
                yield event.encode()
            generation.set_delivered()

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. Raises GatewayError (413) for a body that is too long, without reading all of it."""
    chunks, size = list[bytes](), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise GatewayError(ErrorKind.TOO_LARGE, f"the request body has more than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(raw: bytes) -> Json:
    """The JSON object of a body. Raises GatewayError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError(ErrorKind.INVALID_REQUEST, f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise GatewayError(ErrorKind.INVALID_REQUEST, "the request body must be a JSON object")
    return body


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with JSON."""
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/json")


def _is_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


def _retry_headers(status: int) -> dict[str, str]:
    return {"retry-after": "1"} if status in (503, 529) else {"x-should-retry": "false"}
