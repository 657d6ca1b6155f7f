"""`RouterHttpServer`: a router over HTTP, with SGLang's `/generate`, the routes of RL trainers, and the OpenAI paths.

A generation through `/generate`, and through the routes in `rl_wire/`, survives the loss of its replica. A request to
another OpenAI path is forwarded, see `http/forwarding.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.sglang.batch import split_batch
from verl_server.errors import BadInputError, ServerError, VerlServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http.bodies import error_response, json_response, parse_object, read_body
from verl_server.router.http.connections import RouterServer, admit
from verl_server.router.http.forwarding import Forwarder
from verl_server.router.metrics import router_metrics
from verl_server.router.request_checks import MEDIA_FIELDS, refuse_local_media
from verl_server.router.rl_wire.admin import ADMIN_ROUTES, AdminRoutes
from verl_server.router.rl_wire.models import ServedModels
from verl_server.router.rl_wire.replica_control import ReplicaControl
from verl_server.router.rl_wire.routes import RlRoutes
from verl_server.router.token_reports import STREAM_TOKENS, send_reports
from verl_server.tracing import continue_trace

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 << 20
MAX_PROMPTS = 4096
"""Maximum number of prompts of a request. Each of them is a request of its own for the router."""
OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no API key."""
FORWARDED_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


class RouterHttpServer:
    """HTTP handlers of one `Dispatcher`, in the dispatcher's event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        api_key: str | None,
        extra_metrics: Callable[[], str] = lambda: "",
        *,
        control: ReplicaControl | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        """`api_key` None accepts every caller. `extra_metrics` returns text that `/metrics` appends.

        `control`: what the routes of `rl_wire/admin.py` change; they need the admin key. Requests to all other routes
        may have the admin key, too: a trainer has one key.
        """
        self._dispatcher, self._api_key, self._extra_metrics = dispatcher, api_key, extra_metrics
        self._admin_api_key = admin_api_key
        self._forwarder = Forwarder(dispatcher)
        self._models = ServedModels(
            dispatcher.pool, self._forwarder.get_json, lambda: () if control is None else control.lora_names
        )
        self._admin_routes = AdminRoutes(control, self._models)
        rl_routes = RlRoutes(dispatcher, self._models)
        forward = functools.partial(self._forwarder.forward, prepare=self._models.with_adapter)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            ("POST", "/inference/v1/generate"): rl_routes.generate,
            ("POST", "/v1/completions"): functools.partial(rl_routes.completions, forward=forward),
            ("GET", "/v1/models"): rl_routes.models,
            **{("POST", path): forward for path in FORWARDED_PATHS},
            **dict.fromkeys(ADMIN_ROUTES, self._administer),
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/replicas"): self._replicas,
        }

    async def create_server(self) -> web.Server:
        """The server for a `web.ServerRunner`. An aiohttp `Application` would resolve its routes for every request."""
        self._forwarder.open()
        make = functools.partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES)
        return RouterServer(self._handle, request_factory=make)

    async def close(self) -> None:
        """Wait for running operations of a trainer, for a limited time, and close the connections to the replicas."""
        await self._admin_routes.close()
        await self._forwarder.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check the API key, call the handler of the path, and answer every error as JSON."""
        try:
            if request.path not in OPEN_PATHS:
                if not self._has_any_key(request):
                    raise _key_error(request)
                admit(request)
            handler = self._handlers.get((request.method, request.path))
            if handler is None:
                return json_response({"error": {"message": f"there is no {request.method} {request.path}"}}, 404)
            with continue_trace(request.headers):
                return await handler(request)
        except VerlServerError as error:
            return error_response(error)

    def _has_any_key(self, request: web.BaseRequest) -> bool:
        has_api_key = self._api_key is None or _has_key(request, self._api_key)
        return self._has_admin_key(request) or has_api_key

    def _has_admin_key(self, request: web.BaseRequest) -> bool:
        return self._admin_api_key is not None and _has_key(request, self._admin_api_key)

    async def _administer(self, request: web.BaseRequest) -> web.StreamResponse:
        has_admin_key = self._admin_api_key is None or self._has_admin_key(request)
        return await self._admin_routes.handle(request, has_admin_key)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = parse_object(await read_body(request))
        refuse_local_media({name: value for name, value in body.items() if name in MEDIA_FIELDS})
        stream = bool(body.pop("stream", False))
        if "text" in body:
            body["prompt"] = body.pop("text")
        prompts = body.get("input_ids") or body.get("prompt")
        if isinstance(prompts, list) and not isinstance(prompts[0], int) and len(prompts) > MAX_PROMPTS:
            raise BadInputError(f"{len(prompts)} prompts are more than {MAX_PROMPTS}: send several requests")
        body["session_id"] = body.get("session_id") or request.headers.get("x-session-id")
        reports_tokens = body.pop(STREAM_TOKENS, None)
        if (stream or reports_tokens) and split_batch(body) is not None:
            raise BadInputError("a list of prompts cannot be streamed: send one request for each prompt")
        if reports_tokens:
            return await send_reports(
                request, lambda on_tokens: self._dispatcher.generate_request(body, on_tokens=on_tokens, is_remote=True)
            )
        reply = await self._dispatcher.generate_request(body, is_remote=True)
        if not stream:
            return json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(reply) + b"\n\ndata: [DONE]\n\n")
        return response

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        snapshot = self._dispatcher.snapshot()
        serving = sum(replica.admitted for replica in snapshot.replicas)
        body = {"replicas": len(snapshot.replicas), "serving": serving, "paused": snapshot.is_paused}
        return json_response(body, 200 if serving else 503)

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = router_metrics(self._dispatcher) + self._extra_metrics().encode()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _replicas(self, _: web.BaseRequest) -> web.StreamResponse:
        return json_response([asdict(replica) for replica in self._dispatcher.snapshot().replicas])


def _has_key(request: web.BaseRequest, key: str) -> bool:
    """Whether a request has this key, as a token, as the password of a URL, or in the header `x-api-key`."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if given.startswith("Basic "):
        with contextlib.suppress(ValueError):
            given = aiohttp.BasicAuth.decode(given, encoding="utf-8").password
    given = given or request.headers.get("x-api-key", "")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def _key_error(request: web.BaseRequest) -> ServerError:
    """The error for a request without the router's key. The caller knows the router by the URL of the request."""
    return ServerError(
        f"the API key is missing or wrong: the router at http://{request.host} refused {request.path} (401). Pass "
        "the key of the router: RolloutManager.router_key, or the environment variable VERL_SERVER_API_KEY of "
        "`verl-server router`",
        status=401,
        url=f"http://{request.host}{request.path}",
        key="api_key",
    )
