"""`RouterHttpServer`: a router over HTTP, with SGLang's `/generate`, the routes of RL trainers, and the OpenAI paths.

A generation through `/generate`, and through the routes in `vllm_wire/`, survives the loss of its replica. A request to
another OpenAI path is forwarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_server.adapter.sglang.requests import split_batch
from verl_server.errors import BadInputError, ServerDiedError, ServerError, VerlServerError
from verl_server.router.dispatcher import FILES_RETRY_S, Dispatcher, Failures
from verl_server.router.replica import GenerationServer, RoutedReplica, Slot, unless_lost
from verl_server.router.request_checks import (
    CHARACTERS_PER_TOKEN,
    MAX_SERVER_DEATHS,
    MEDIA_FIELDS,
    check_forwarded_body,
    error_response,
    is_out_of_files,
    json_response,
    parse_object,
    read_body,
    refuse_local_media,
    was_received,
)
from verl_server.router.resumable_generation import STREAM_TOKENS, send_reports
from verl_server.router.vllm_wire.admin import ADMIN_ROUTES, AdminRoutes
from verl_server.router.vllm_wire.control import ReplicaControl
from verl_server.router.vllm_wire.generate import RlRoutes
from verl_server.router.vllm_wire.models import ServedModels
from verl_server.server.launch import open_socket
from verl_server.server.process import open_file_limit, raise_open_file_limit
from verl_server.tracing import continue_trace, trace_headers
from verl_server.types import Json, without_half_characters

if TYPE_CHECKING:
    from verl_server.router.dispatcher import Dispatcher


# -- Metrics ----------------------------------------------------------------------------------------
# Metrics of one router, in the text format of Prometheus.

COUNTER_HELP = {
    "requests": "Calls that started a generation, or continued a generation after an abort",
    "finished": "Generations that finished",
    "failed": "Generations that ended with an error",
    "refused": "Requests refused because no replica serves the required weights, or none serves at all",
    "attached": "Calls that received a running generation or a stored result with the same request id",
    "continued": "Lost attempts after which a generation continued from the tokens received so far",
    "restarted": "Lost attempts after which a generation started again without tokens",
    "saved_tokens": "Output tokens that were kept when a replica was lost",
    "output_tokens": "Output tokens of finished generations",
    "prompt_tokens": "Prompt tokens of finished generations",
    "cached_tokens": "Prompt tokens of finished generations that a prefix cache provided",
}
"""Help text of each field of `RouterCounters`."""
GAUGE_HELP = {
    "running_requests": "Requests that run on the replica",
    "tokens_in_flight": "Tokens of the requests that run on the replica",
    "admitted": "1 if the router sends requests to the replica",
    "suspect": "1 if the replica made no progress for a long time, or failed several times in a row",
    "weight_version": "Version of the weights that the replica serves",
}
"""Help text of each gauge, a field of `ReplicaSnapshot`."""


class _RouterCollector(Collector):
    """Reads the metrics of a router whenever they are requested."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        snapshot = self._dispatcher.snapshot()
        for name, value in asdict(snapshot.counters).items():
            yield CounterMetricFamily(f"verl_router_{name}", COUNTER_HELP[name], value=value)
        for name, text, gauge in (
            ("queued_requests", "Requests that wait for a replica", snapshot.queued_requests),
            ("stored_results", "Finished results that a repeated request id still receives", snapshot.stored_results),
            ("paused", "1 while all requests wait until a trainer resumes the router", snapshot.is_paused),
        ):
            yield GaugeMetricFamily(f"verl_router_{name}", text, value=gauge)
        for name, text in GAUGE_HELP.items():
            family = GaugeMetricFamily(f"verl_replica_{name}", text, labels=["replica"])
            for replica in snapshot.replicas:
                family.add_metric([replica.name], float(getattr(replica, name)))
            yield family


def router_metrics(dispatcher: Dispatcher) -> bytes:
    """The metrics of a router, in the text format of Prometheus."""
    return metrics_text(_RouterCollector(dispatcher))


def metrics_text(collector: Collector) -> bytes:
    """The metrics of one collector, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


# -- Forwarding -------------------------------------------------------------------------------------
# `Forwarder`: sends requests to a replica as they are. The OpenAI paths of a router are forwarded.
#
# A request is sent to another replica as long as no byte of an answer has arrived. Later, the loss of its replica
# breaks the caller's connection.

CONNECT_TIMEOUT_S = 2.0
IDLE_CONNECTION_S = 2.0
"""Seconds that an idle connection to a replica is kept."""
MAX_FORWARDED_DEATHS = 4
"""Number of servers that may end while they run one forwarded request, even if other requests ran there, too."""
RELAYED_HEADERS = ("Content-Type", "Content-Encoding")
"""Headers of a replica's answer that the caller receives."""
Prepare = Callable[[str, Json], Awaitable[Json]]
"""Gets the path and the body of a request; returns the body for the replica."""


class Forwarder:
    """Connections to the replicas of one `Dispatcher`, for requests that are no generations of it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Must be called in the event loop of the dispatcher, before any request."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=open_socket)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)

    async def close(self) -> None:
        """Close the connections to the replicas."""
        if self._session is not None:
            await self._session.close()

    async def forward(self, request: web.BaseRequest, prepare: Prepare) -> web.StreamResponse:
        """Forward a request to a replica, and its answer to the caller. A body that `prepare` leaves stays as it is."""
        body = await read_body(request)
        if request.method == "POST":
            given = parse_object(body)
            check_forwarded_body(given)
            prepared = await prepare(request.path, given)
            body = body if prepared is given else orjson.dumps(prepared)
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

    async def get_json(self, server: GenerationServer, path: str, timeout_s: float) -> Any:
        """The JSON that a replica's server answers to a GET request. Raises ServerError after `timeout_s` as well."""
        assert self._session is not None
        url, timeout = server.base_url + path, aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"Accept-Encoding": "identity", **_key_header(server), **trace_headers()}
        try:
            async with self._session.get(url, headers=headers, timeout=timeout) as answer:
                raw = await answer.read()
            if answer.status == 200:
                return orjson.loads(without_half_characters(raw))
        except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError) as error:
            raise ServerError(f"{url} cannot be read: {error or type(error).__name__}", url=url) from error
        raise ServerError(f"{url} answered with status {answer.status}", url=url, status=answer.status)

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
        # Without an encoding from the caller, aiohttp would ask for a compressed answer.
        encoding = request.headers.get("Accept-Encoding", "identity")
        headers = {"Content-Type": request.content_type, "Accept-Encoding": encoding, **trace_headers()}
        return await self._session.request(
            request.method,
            replica.server.base_url + request.path_qs,
            data=body,
            headers={**headers, **_key_header(replica.server)},
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


def _key_header(server: GenerationServer) -> dict[str, str]:
    return {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}


def _close_if_lost(answer: aiohttp.ClientResponse, lost: asyncio.Future[Any]) -> None:
    if not lost.cancelled():
        answer.close()


# -- Connections ------------------------------------------------------------------------------------
# Connections of a router's callers: a time in which the first request must arrive, and a limit of their number.

HEAD_TIMEOUT_S = 30.0
"""Seconds in which the head of the first request must arrive on a connection."""
IDLE_TIMEOUT_S = 75.0
"""Seconds after a reply in which the next request must arrive: more than the 60 seconds of load balancers."""


class RouterServer(web.Server):
    """An HTTP server whose connections leave open files for those to the replicas.

    When there are too many connections, the oldest one that has sent no key is closed for a new one: callers without
    a key cannot keep the others out. Without such a connection the new one is refused (503).
    """

    def __init__(self, handler: Any, **settings: Any) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # `read_body` refuses compressed bodies
            keepalive_timeout=IDLE_TIMEOUT_S,
            **settings,
        )
        raise_open_file_limit()
        self.max_connections = open_file_limit() // 2
        self.num_connections = 0
        self.strangers: dict[_Connection, asyncio.TimerHandle] = {}
        """Connections without a key, the oldest one first, and what closes those without a request."""

    def __call__(self) -> web.RequestHandler:
        """The protocol of one connection."""
        return _Connection(self, loop=asyncio.get_running_loop(), **self._kwargs)


class _Connection(web.RequestHandler):
    def __init__(self, server: RouterServer, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._server = server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        server = self._server
        server.num_connections += 1
        if server.num_connections > server.max_connections:
            if not server.strangers:
                transport.write(_refusal(server.max_connections))
                transport.close()
                return
            next(iter(server.strangers)).abort()
        server.strangers[self] = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._server.strangers and (self._messages or self._current_request is not None):
            self._server.strangers[self].cancel()  # the head of a request has arrived

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.num_connections -= 1
        self.admit()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self.admit()
        if self.transport is not None:
            self.transport.abort()

    def admit(self) -> None:
        """The connection is no stranger's any more."""
        if (timer := self._server.strangers.pop(self, None)) is not None:
            timer.cancel()


def admit(request: web.BaseRequest) -> None:
    """Keep the connection of a request that has a key when there are too many."""
    if isinstance(request.protocol, _Connection):
        request.protocol.admit()


def _refusal(maximum: int) -> bytes:
    body = orjson.dumps({"error": {"message": f"the router has {maximum} open connections already", "retryable": True}})
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + body


# -- Http server ------------------------------------------------------------------------------------

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

        `control`: what the routes of `vllm_wire/admin.py` change; they need the admin key. Requests to all other routes
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
