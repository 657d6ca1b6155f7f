"""`RouterHttpServer`: a router over HTTP, with SGLang's `/generate` for agent loops and the OpenAI paths.

A generation through `/generate` survives the loss of its replica. A request to an OpenAI path is forwarded unchanged:
it is sent to another replica as long as no byte of an answer has arrived. Later, the loss of its replica breaks the
caller's connection.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.sglang.batch import split_batch
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
from verl_server.router.attempt_runner import FILES_RETRY_S, Failures
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.metrics import router_metrics
from verl_server.router.placement.routed_replica import RoutedReplica, Slot, unless_lost
from verl_server.router.request_checks import (
    CHARACTERS_PER_TOKEN,
    MAX_SERVER_DEATHS,
    MEDIA_FIELDS,
    check_forwarded_body,
    is_out_of_files,
    refuse_local_media,
    was_received,
)
from verl_server.router.token_reports import STREAM_TOKENS, send_reports
from verl_server.server.ports import open_socket
from verl_server.tracing import continue_trace, trace_headers
from verl_server.types import Json

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 << 20
CONNECT_TIMEOUT_S = 2.0
IDLE_CONNECTION_S = 2.0
"""Seconds that an idle connection to a replica is kept."""
MAX_FORWARDED_DEATHS = 4
"""Number of servers that may end while they run one forwarded request, even if other requests ran there, too."""
OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no API key."""
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
RELAYED_HEADERS = ("Content-Type", "Content-Encoding")
"""Headers of a replica's answer that the caller receives."""
#: HTTP status for each error class; the first class that matches decides.
ERROR_STATUSES: tuple[tuple[type[VerlServerError], int], ...] = (
    (BadInputError, 400), (ServerBusyError, 429), (NotReadyError, 503), (DeadlineError, 504), (ShutDownError, 503),
    (ServerDiedError, 502), (ServerError, 502),
)  # fmt: skip


class RouterHttpServer:
    """HTTP handlers of one `Dispatcher`, in the dispatcher's event loop."""

    def __init__(
        self, dispatcher: Dispatcher, api_key: str | None, extra_metrics: Callable[[], str] = lambda: ""
    ) -> None:
        """`api_key` None accepts every caller. `extra_metrics` returns text that `/metrics` appends."""
        self._dispatcher, self._api_key, self._extra_metrics = dispatcher, api_key, extra_metrics
        self._session: aiohttp.ClientSession | None = None
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            **{("POST", path): self._forward for path in OPENAI_PATHS},
            ("GET", "/v1/models"): self._forward,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/replicas"): self._replicas,
        }

    async def create_server(self) -> web.Server:
        """The server for a `web.ServerRunner`. An aiohttp `Application` would resolve its routes for every request."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=open_socket)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        make = functools.partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES)
        return web.Server(self._handle, request_factory=make, handler_cancellation=True, access_log=None)

    async def close(self) -> None:
        """Close the connections to the replicas."""
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check the API key, call the handler of the path, and answer every error as JSON."""
        try:
            if request.path not in OPEN_PATHS and not self._is_authorized(request):
                raise _key_error(request)
            handler = self._handlers.get((request.method, request.path))
            if handler is None:
                return _json_response({"error": {"message": f"there is no {request.method} {request.path}"}}, 404)
            with continue_trace(request.headers):
                return await handler(request)
        except VerlServerError as error:
            status = next((code for kind, code in ERROR_STATUSES if isinstance(error, kind)), 500)
            replica_status = error.details.get("status")
            if isinstance(replica_status, int) and replica_status >= 400:
                status = replica_status
            return _json_response(_error_body(error), status)

    def _is_authorized(self, request: web.BaseRequest) -> bool:
        if self._api_key is None:
            return True
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = given or request.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self._api_key.encode())

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = _parse_object(await request.read())
        refuse_local_media({name: value for name, value in body.items() if name in MEDIA_FIELDS})
        stream = bool(body.pop("stream", False))
        if "text" in body:
            body["prompt"] = body.pop("text")
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
            return _json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(reply) + b"\n\ndata: [DONE]\n\n")
        return response

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        """Forward a request unchanged to a replica, and its answer to the caller."""
        body = await request.read()
        if request.method == "POST":
            check_forwarded_body(_parse_object(body))
        session_id, failures = request.headers.get("x-session-id"), Failures()
        while True:
            async with self._dispatcher.lease_slot(
                session_id, len(body) // CHARACTERS_PER_TOKEN, failures.tried, failures.is_retry
            ) as slot:
                lost = asyncio.ensure_future(slot.replica.lost.wait())
                try:
                    answer = await unless_lost(lost, self._send(slot.replica, request, body))
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                    delay_s = self._handle_failure(slot, error, failures)
                else:
                    lost.add_done_callback(functools.partial(_close_if_lost, answer))
                    async with answer:
                        return await self._relay(answer, request, slot)
                finally:
                    lost.cancel()
            await asyncio.sleep(delay_s)

    def _handle_failure(self, slot: Slot, error: Exception, failures: Failures) -> float:
        """Record that a replica did not answer. Returns the number of seconds before the next attempt.

        Raises ServerError after `max_attempts` failed attempts, and ServerDiedError when the request ends servers.
        """
        pool, failures.is_retry = self._dispatcher.pool, True
        lacks_files = is_out_of_files(error)
        failures.count += not (lacks_files and pool.has_other_requests)
        if lacks_files:
            pool.limit_running_requests(slot)
        else:
            failures.tried.add(slot.replica)
            pool.record_error(slot)
            pool.mark_unreachable(slot.replica)
            if was_received(error) and not slot.replica.is_removed:
                failures.deaths += 1
                failures.deaths_alone += slot.has_run_alone
        if failures.deaths_alone >= MAX_SERVER_DEATHS or failures.deaths >= MAX_FORWARDED_DEATHS:
            raise ServerDiedError(
                f"the request was given up, because {failures.deaths} servers ended while they ran it: {error}"
            ) from error
        if failures.count >= self._dispatcher.config.max_attempts:
            raise ServerError(f"no replica answered in {failures.count} attempts: {error}") from error
        return FILES_RETRY_S if lacks_files else 0.0

    async def _send(self, replica: RoutedReplica, request: web.BaseRequest, body: bytes) -> aiohttp.ClientResponse:
        assert self._session is not None
        api_key = replica.server.api_key
        # Without an encoding from the caller, aiohttp would ask for a compressed answer.
        encoding = request.headers.get("Accept-Encoding", "identity")
        headers = {"Content-Type": request.content_type, "Accept-Encoding": encoding, **trace_headers()}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        return await self._session.request(
            request.method,
            replica.server.base_url + request.path_qs,
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def _relay(self, answer: aiohttp.ClientResponse, request: web.BaseRequest, slot: Slot) -> web.StreamResponse:
        """Pass a replica's answer on to the caller, chunk by chunk."""
        headers = {name: answer.headers[name] for name in RELAYED_HEADERS if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        pool = self._dispatcher.pool
        try:
            async for chunk in answer.content.iter_any():
                if answer.status < 500:
                    pool.record_progress(slot, slot.tokens)
                try:
                    with slot.waits_for_caller():
                        await response.write(chunk)
                except ConnectionError:  # the caller has left, which is no error of the replica
                    if answer.status >= 500:
                        pool.record_error(slot)
                    return response
        except aiohttp.ClientError:
            pool.record_error(slot)
            if request.transport is not None:
                request.transport.abort()  # the caller must not take an incomplete answer for a complete one
        else:
            (pool.record_finish if answer.status < 500 else pool.record_error)(slot)
        return response

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        replicas = self._dispatcher.snapshot().replicas
        serving = sum(replica.admitted for replica in replicas)
        return _json_response({"replicas": len(replicas), "serving": serving}, 200 if serving else 503)

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = router_metrics(self._dispatcher) + self._extra_metrics().encode()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _replicas(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json_response([asdict(replica) for replica in self._dispatcher.snapshot().replicas])


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


def _json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error_body(error: VerlServerError) -> Json:
    """An error as JSON: `type`, `message` and `details` of `to_wire`, and `retryable`."""
    return {"error": {**to_wire(error), "retryable": error.retryable}}


def _parse_object(raw: bytes) -> Json:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadInputError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInputError(f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def _close_if_lost(answer: aiohttp.ClientResponse, lost: asyncio.Future[Any]) -> None:
    if not lost.cancelled():
        answer.close()
