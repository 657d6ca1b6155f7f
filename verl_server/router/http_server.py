"""The router as an HTTP server: SGLang's `/generate` for agent loops, the OpenAI paths for other programs.

A generation by `/generate` survives the loss of its replica. What goes through the OpenAI paths is passed on as it
is: tried elsewhere as long as no byte of an answer has come, and broken off when its replica is lost after that.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
    to_wire,
)
from verl_server.router.dispatcher import CHARACTERS_A_TOKEN, Dispatcher, together
from verl_server.router.metrics import router_metrics
from verl_server.router.policy import VersionRequirement
from verl_server.router.resumable_generation import one_by_one

Json = dict[str, Any]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_BODY = 256 << 20
CONNECT_S = 2.0
OPEN_PATHS = ("/health", "/metrics")
"""Asked without a key."""
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
#: Fields of a request to `/generate` that are the router's own.
OWN_FIELDS = ("session_id", "weight_version", "min_weight_version", "timeout_s")
#: The status for an error; the first that fits.
STATUSES: tuple[tuple[type[VerlServerError], int], ...] = (
    (BadInputError, 400), (ServerBusyError, 429), (NotReadyError, 503), (DeadlineError, 504), (ShutDownError, 503),
    (ServerDiedError, 502), (ServerError, 502),
)  # fmt: skip


class RouterServer:
    """Handlers over one `Dispatcher`, in its event loop."""

    def __init__(self, core: Dispatcher, api_key: str | None) -> None:
        self._core, self._api_key = core, api_key
        self._session: aiohttp.ClientSession | None = None
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            **{("POST", path): self._forward for path in OPENAI_PATHS},
            ("GET", "/v1/models"): self._forward,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/replicas"): self._replicas,
        }
        self.fleet_metrics = ""
        """Of the fleet behind it, in Prometheus' text format."""

    async def server(self) -> web.Server:
        """For a `web.ServerRunner`, in the running loop. (An `Application` resolves its routes for every request.)"""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        make = functools.partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY)
        return web.Server(self._handle, request_factory=make, handler_cancellation=True, access_log=None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Keys first, and every error as JSON."""
        try:
            path = request.path
            if self._api_key is not None and path not in OPEN_PATHS:
                given = request.headers.get("Authorization", "").removeprefix("Bearer ")
                given = given or request.headers.get("x-api-key", "")
                if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._api_key.encode()):
                    return _json({"error": {"message": "the API key is missing or wrong"}}, 401)
            handler = self._handlers.get((request.method, path))
            if handler is None:
                return _json({"error": {"message": f"there is no {request.method} {path}"}}, 404)
            return await handler(request)
        except VerlServerError as error:
            status = next((code for kind, code in STATUSES if isinstance(error, kind)), 500)
            own = error.details.get("status")
            return _json(_error(error), own if isinstance(own, int) and own >= 400 else status)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = _object(await request.read())
        own = {name: body.pop(name, None) for name in OWN_FIELDS}
        stream = bool(body.pop("stream", False))
        request_id = body.pop("rid", None)
        if "text" in body:
            body["prompt"] = body.pop("text")
        session_id = own["session_id"] or request.headers.get("x-session-id")
        need = VersionRequirement(own["weight_version"], own["min_weight_version"])
        options: Json = {"session_id": session_id, "need": need, "timeout_s": own["timeout_s"], "linger": True}
        bodies = one_by_one(body)
        if bodies is not None:
            ids = request_id if isinstance(request_id, list) else [None] * len(bodies)
            if stream or len(ids) != len(bodies):
                raise BadInputError("a list of prompts takes a list of as many rids, and no stream")
            calls = (self._core.generate(one, request_id=rid, **options) for one, rid in zip(bodies, ids, strict=True))
            return _json(await together(calls))
        reply = await self._core.generate(body, request_id=request_id, **options)
        if not stream:
            return _json(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(reply) + b"\n\ndata: [DONE]\n\n")
        return response

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        session_id = request.headers.get("x-session-id")
        tried = 0
        while True:
            async with self._core.place(session_id, len(body) // CHARACTERS_A_TOKEN) as replica:
                tried += 1
                headers = {"Content-Type": request.content_type, **_bearer(replica.engine.api_key)}
                url = replica.engine.base_url + request.path_qs
                assert self._session is not None
                try:
                    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
                    answer = await self._session.request(request.method, url, data=body, headers=headers, timeout=limit)
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    self._core.lost(replica)
                    if tried >= self._core.config.max_attempts:
                        raise ServerError(f"no replica answered: {error}") from error
                    continue
                async with answer:
                    response = web.StreamResponse(
                        status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "")}
                    )
                    await response.prepare(request)
                    try:
                        async for chunk in answer.content.iter_any():
                            replica.progress_at = time.monotonic()
                            await response.write(chunk)
                    except aiohttp.ClientError:
                        if request.transport is not None:
                            request.transport.abort()  # half an answer must not look like a whole one
                    return response

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        serving = sum(one.load.admitted for one in self._core.replicas.values())
        return _json({"replicas": len(self._core.replicas), "serving": serving}, 200 if serving else 503)

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = router_metrics(self._core) + self.fleet_metrics.encode()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _replicas(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(table(self._core))


def table(core: Dispatcher) -> list[Json]:
    """The replicas as the router sees them."""
    return [
        {
            "name": one.name,
            "admitted": one.load.admitted,
            "suspect": one.load.suspect,
            "weight_version": one.load.version,
            "requests": len(one.tokens),
            "tokens": sum(one.tokens.values()),
        }
        for one in core.replicas.values()
    ]


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(error: VerlServerError) -> Json:
    wire = to_wire(error)
    return {"error": {"type": wire["type"], "message": wire["message"], "retryable": type(error).retryable}}


def _object(raw: bytes) -> Json:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInputError(f"the body must be an object, got {type(body).__name__}")
    return body


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
