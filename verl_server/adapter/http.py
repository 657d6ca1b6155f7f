"""The HTTP client of one server: requests with deadlines, retries, notice of a dead server, abilities of the server.

Both adapters send all their requests through it. Proxy variables are ignored, as loopback traffic needs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp

from verl_server.adapter.model_files import read_model_configs
from verl_server.adapter.sglang import replies
from verl_server.adapter.sglang.replies import (
    BEGIN_UPDATE,
    LOADS,
    OPENAPI,
    PING,
    WEIGHTS_CHECKER,
    Endpoint,
    OperationKind,
    decode_reply,
    error_from_reply,
    key_error,
    parse_event,
    parse_json_or_text,
    prompt_limits,
    remove_keys,
    require_success,
)
from verl_server.adapter.sglang.requests import REQUEST_FIELDS, PromptLimits, require_known_fields, unlisted_fields
from verl_server.config import Timeouts
from verl_server.errors import (
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.server.launch import join_host_port, open_socket
from verl_server.server.process import raise_open_file_limit
from verl_server.server.server_main import PROCESS_HEADER
from verl_server.tracing import trace_headers
from verl_server.types import Json, encode_json, parse_weight_version
from verl_server.validation import require_key

logger = logging.getLogger(__name__)

#: Seconds that an idle connection is kept. SGLang's uvicorn closes idle connections after 5 s; ours are closed earlier,
#: because a request could otherwise be sent into a closing connection.
KEEP_ALIVE_S = 2.0
#: Seconds for which the address of a host name is not looked up again.
LOOKUP_S = 10.0
#: Seconds before a retry, multiplied by the number of the attempt.
RETRY_PAUSE_S = 0.1
#: Seconds to wait, after a connection broke, for the news that the server's process has ended.
DEATH_NOTICE_S = 2.0
#: What to do about an address that leads to several servers.
ONE_SERVER = "a weight update would reach one of them only. Pass the address of each as a server of its own"
#: Bytes of one read. Replies with log probabilities are large.
READ_BUFFER_BYTES = 2**20


class HttpClient:
    """HTTP connections to `base_url`, one connection pool for each event loop that sends requests.

    `is_supervised`: `fail` is called when the server's process ends. A call whose connection broke then waits for a
    moment, so that it raises how the server ended.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        admin_api_key: str | None,
        timeouts: Timeouts,
        max_retries: int,
        is_supervised: bool,
    ) -> None:
        self.base_url = base_url
        self._headers = _headers("api_key", api_key)
        self._admin_headers = _headers("admin_api_key", admin_api_key) if admin_api_key else self._headers
        self._has_key, self._has_admin_key = bool(api_key), bool(admin_api_key)
        self._deadlines = {
            kind: aiohttp.ClientTimeout(total=total, sock_connect=timeouts.connect_s)
            for kind, total in (
                (OperationKind.CONTROL, timeouts.control_s),
                (OperationKind.WEIGHTS, timeouts.weights_s),
                (OperationKind.GENERATION, timeouts.generation_s),
            )
        }
        self._max_retries = max_retries
        self._is_supervised = is_supervised
        self._failure: VerlServerError | None = None
        """The error of `fail`. Every later call raises a copy: a raised error refers to the frames of its callers."""
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self.address: str | None = None
        """The numeric address of the host name to which all connections go. None: it is chosen at the next one."""
        self.on_restart: Callable[[], bool] | None = None
        """Called when another server process answers than before. Returns whether the server has lost what the caller
        relies on: the reply is then not used, and the call raises ServerError. None: any process may answer."""
        self._processes: list[str] = []
        """Ids of the server processes that have answered, in the order of their first replies. Without `on_restart`: of
        the process that has answered last."""
        raise_open_file_limit()

    async def call(self, endpoint: Endpoint, payload: Any = None) -> Any:
        """Send one request and return the decoded reply (JSON, or text where there is no JSON).

        Raises the error of `error_from_reply`, ServerDiedError, or DeadlineError.
        """
        attempts = 1 + (self._max_retries if endpoint.retryable else 0)
        for attempt in range(1, attempts + 1):
            try:
                return await self._send(endpoint, payload)
            except (aiohttp.ClientError, ConnectionError) as error:
                cause = await self._explain_broken_connection(endpoint, error)
                if attempt == attempts or isinstance(cause, ServerDiedError) or self._failure:
                    raise cause from error
                logger.debug("%s: %s; retrying the request", endpoint.path, error)
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, endpoint: Endpoint, payload: Any) -> Any:
        async with self._request(endpoint, payload) as response:
            raw = await response.read()
        if response.status >= 400:
            raise self._error(endpoint, response.status, raw)
        return decode_reply(raw, response.content_type, endpoint, self.base_url + endpoint.path)

    async def stream(self, endpoint: Endpoint, payload: Any) -> AsyncIterator[dict[str, Any]]:
        """Send one request and yield the events of its stream. Closing the iterator closes the connection.

        SGLang aborts the request when its connection closes.
        """
        url = self.base_url + endpoint.path
        try:
            async with self._request(endpoint, payload) as response:
                if response.status >= 400:
                    raise self._error(endpoint, response.status, await response.read())
                async for data in read_events(response.content):
                    yield parse_event(data, url)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise await self._explain_broken_connection(endpoint, error) from error

    def _error(self, endpoint: Endpoint, status: int, raw: bytes) -> VerlServerError:
        """The error for a reply whose HTTP status is not a success."""
        if status == 401:
            has_key = self._has_admin_key if endpoint.needs_admin_key else self._has_key
            return key_error(self.base_url, endpoint, has_key)
        url, body = self.base_url + endpoint.path, parse_json_or_text(raw)
        return error_from_reply(status, url, body, endpoint.is_optional)

    def _request(self, endpoint: Endpoint, payload: Any) -> _Request:
        """Context manager of the response to one request."""
        self.require_usable()
        pool, timeout, url = self.pool(), self._deadlines[endpoint.kind], self.base_url + endpoint.path
        context = pool.session.request(
            endpoint.method,
            url,
            data=None if payload is None else encode_json(payload),
            headers=(self._admin_headers if endpoint.needs_admin_key else self._headers) | trace_headers(),
            timeout=timeout,
        )
        return _Request(self, pool, endpoint, timeout, context)

    async def _explain_broken_connection(self, endpoint: Endpoint, error: Exception) -> VerlServerError:
        """The cause of a broken connection: the error of `fail`, the death of the server, or the network."""
        pool = self._pools.get(asyncio.get_running_loop())
        if self._failure is None and self._is_supervised and pool is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(pool.failed.wait(), DEATH_NOTICE_S)
        if self._failure is not None:
            return copy.copy(self._failure)
        url = self.base_url + endpoint.path
        if isinstance(error, aiohttp.ClientConnectorError):
            self.address = None
            return ServerError(
                f"nothing answers at {self.base_url} ({error.strerror or error}): check that the server runs, and that "
                "this is its host and port",
                url=url,
            )
        return ServerError(f"the connection to {url} broke ({type(error).__name__}: {error})", url=url)

    def require_usable(self) -> None:
        """Raise the error of `fail` if that was called before."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    @property
    def process(self) -> str | None:
        """Id of the server process that has answered last. None if no reply has named its process."""
        return self._processes[-1] if self._processes else None

    def require_same_process(self, process: str | None) -> None:
        """Raise ServerError for a reply that comes from another server process than the replies before.

        `process`: the reply's `PROCESS_HEADER`. None if the server, or a proxy in front of it, sends none.
        """
        known, url = self._processes, self.base_url
        if process is None:
            return
        if self.on_restart is None:
            known[:] = [process]
        elif process not in known:
            known.append(process)
            if len(known) > 1 and self.on_restart():
                raise ServerError(
                    f"another server process answers at {url} than before: the server was started again, and has the "
                    "weights of its checkpoint",
                    url=url,
                )
        if process != known[-1]:  # also a late reply of a server that another one has replaced
            raise ServerError(f"several servers answer at {url} in turns: {ONE_SERVER}", url=url)

    async def choose_address(self, found: list[aiohttp.abc.ResolveResult]) -> aiohttp.abc.ResolveResult:
        """The one of the addresses of the host name to which all connections go.

        Where there are several, the same one as before, or the first at which the server is found: one server may have
        many (IPv4 and IPv6, a tunnel), and a headless service of Kubernetes has one for each server. Raises ServerError
        if different processes answer, and the error of a connection if there is none.
        """
        chosen = next((each for each in found if each["host"] == self.address), None)
        if chosen is None and len(found) > 1:
            answers = await asyncio.gather(*map(self._ask_process, found), return_exceptions=True)
            reached = [(at, each) for at, each in zip(found, answers, strict=True) if isinstance(each, tuple)]
            if not reached and isinstance(answers[0], BaseException):
                raise answers[0]
            hosts, processes = ", ".join(at["host"] for at, _ in reached), {process for _, (_, process) in reached}
            if len(processes - {""}) > 1:
                raise ServerError(f"{self.base_url} has the addresses {hosts} of different servers: {ONE_SERVER}")
            chosen = min(reached, key=lambda each: each[1][0])[0]
            if "" in processes and len(reached) > 1:
                logger.warning("%s has the addresses %s: only %s is used", self.base_url, hosts, chosen["host"])
        chosen = chosen or found[0]
        self.address = chosen["host"]
        return chosen

    async def _ask_process(self, address: aiohttp.abc.ResolveResult) -> tuple[int, str]:
        """The server process at an address: a rank, which is lower the surer it is our server, and the id or ""."""
        parts, host = urlsplit(self.base_url), join_host_port(address["host"], address["port"])
        url, headers = parts._replace(netloc=host).geturl() + PING.path, {**self._headers, "Host": parts.netloc}
        connect_s = self._deadlines[OperationKind.CONTROL].sock_connect or 0.0
        timeout = aiohttp.ClientTimeout(total=2 * connect_s, sock_connect=connect_s, sock_read=connect_s)
        try:
            async with (
                aiohttp.ClientSession(trust_env=False, timeout=timeout) as session,
                session.get(url, headers=headers, server_hostname=parts.hostname, allow_redirects=False) as reply,
            ):
                process = reply.headers.get(PROCESS_HEADER, "")
                return 0 if process else 3 if reply.status == 404 else 1, process  # 404: another service
        except aiohttp.SocketTimeoutError:
            return 2, ""  # connected: a server that is busy

    def pool(self) -> _Pool:
        """The connection pool of the running event loop."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None or pool.session.closed:
            self._remove_closed_loops()
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEP_ALIVE_S,
                socket_factory=open_socket,
                resolver=_PinningResolver(self),
                ttl_dns_cache=0,  # the resolver knows when its choice holds
            )
            session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=READ_BUFFER_BYTES)
            pool = self._pools[loop] = _Pool(session)
        return pool

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called: the server has ended, or the adapter was shut down."""
        return self._failure is not None

    def fail(self, error: VerlServerError) -> None:
        """Make every call in flight and every later call raise `error`. May be called from any thread."""
        self._failure = self._failure or error
        self._remove_closed_loops()
        for loop, pool in list(self._pools.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(pool.fail)

    def _remove_closed_loops(self) -> None:
        """Close the pools of event loops that have been closed, for example at the end of `asyncio.run`."""
        for loop in [known for known in self._pools if known.is_closed()]:
            pool = self._pools.pop(loop, None)
            if pool is not None and pool.session.connector is not None:
                close_now(pool.session.connector)

    async def aclose(self) -> None:
        """Close the connection pool of the running event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close_responses()
            await pool.session.close()


class _PinningResolver(aiohttp.ThreadedResolver):
    """Leads all connections of a client to one address of the host name: another server may answer at the others."""

    def __init__(self, client: HttpClient) -> None:
        super().__init__()
        self._client = client
        self._chosen: dict[tuple[str, int], tuple[float, aiohttp.abc.ResolveResult]] = {}
        """By host name and port: until when a choice holds, and the choice. One that has failed holds no longer."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        until, chosen = self._chosen.get((host, port), (0.0, None))
        if chosen is None or time.monotonic() > until or chosen["host"] != self._client.address:
            chosen = await self._client.choose_address(await super().resolve(host, port, family))
            self._chosen[host, port] = time.monotonic() + LOOKUP_S, chosen
        return [chosen]


class _Pool:
    """The connections of one event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.responses: set[aiohttp.ClientResponse] = set()
        """Responses whose bodies are read now."""
        self.failed = asyncio.Event()
        """Set when `HttpClient.fail` was called."""

    def fail(self) -> None:
        """Close all connections at once. Calls in flight then raise a connection error.

        Closing the connector alone wakes only the calls that wait for a response to begin. A call that reads a body is
        woken by closing its response.
        """
        self.failed.set()
        self.close_responses()
        if self.session.connector is not None:  # now: the event loop may end before another task of it runs
            close_now(self.session.connector)

    def close_responses(self) -> None:
        """End the calls that read a body. Closing the session ends only the calls that wait for an answer."""
        for response in list(self.responses):
            response.close()


class _Request(AbstractAsyncContextManager[aiohttp.ClientResponse]):
    """Context manager of the response to one request, which raises DeadlineError when the request takes too long.

    It is no generator: an event loop that ends closes all its generators in any order, so it could close the context
    manager of a request before the stream that uses it.
    """

    def __init__(
        self,
        http: HttpClient,
        pool: _Pool,
        endpoint: Endpoint,
        timeout: aiohttp.ClientTimeout,
        context: AbstractAsyncContextManager[aiohttp.ClientResponse],
    ) -> None:
        self._http, self._pool, self._endpoint, self._timeout = http, pool, endpoint, timeout
        self._context = context
        """aiohttp's context manager of the response."""
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response = await self._context.__aenter__()
        except TimeoutError as error:
            raise self._deadline_error(error) from error
        self._response = response
        self._pool.responses.add(response)
        try:
            self._http.require_usable()
            self._http.require_same_process(response.headers.get(PROCESS_HEADER))
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return response

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._response is not None
        self._pool.responses.discard(self._response)
        await self._context.__aexit__(error_type, error, traceback)
        if isinstance(error, TimeoutError) and not isinstance(error, VerlServerError):
            raise self._deadline_error(error) from error

    def _deadline_error(self, error: TimeoutError) -> DeadlineError:
        """The error that says which deadline has passed. After one of a connection, the address is chosen again."""
        timeout, url = self._timeout, self._http.base_url + self._endpoint.path
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            self._http.address = None
            seconds = timeout.sock_connect
            message = (
                f"nothing answers at {self._http.base_url}: there was no connection after {seconds:g} s. Check that "
                "the machine can be reached, and that this is its host and port"
            )
        else:
            seconds = timeout.total or timeout.sock_connect
            message = (
                f"{url} did not answer within {seconds:g} s: the server has stalled, its machine cannot be reached, or "
                f"the {self._endpoint.kind.value} deadline in `timeouts` is too short for this model."
            )
        return DeadlineError(message, operation=self._endpoint.path, seconds=seconds, url=url)


def close_now(connector: aiohttp.BaseConnector) -> None:
    """Close the connections without waiting, also those of an event loop that has been closed."""
    closing = connector.close().__await__()
    with suppress(StopIteration):
        next(closing)  # closes them; what would follow waits for the other end
    closing.close()


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events of any length. (aiohttp's own line reader is limited to 128 KiB.)"""
    partial = b""
    async for chunk in content.iter_any():
        *complete, partial = (partial + chunk).split(b"\n\n")
        for event in complete:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield data
    if partial.strip():  # no event ends here: this is no stream of events
        yield partial


def _headers(name: str, key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {require_key(name, key)}"
    return headers


T = TypeVar("T")


# -- abilities of a running server, found by requests to its routes instead of by its version ------------


@dataclass(frozen=True)
class Capabilities:
    """Abilities that differ between SGLang 0.5.15 and 0.5.23."""

    update_sessions: bool
    """`/begin_weight_update` and `/end_weight_update` exist. Weight updates must then be sent between the two."""
    loads: bool
    """`/v1/loads` exists."""
    weights_checker: bool
    """`/weights_checker` exists."""


async def probe_capabilities(http: HttpClient) -> Capabilities:
    """Request each route with OPTIONS, which changes nothing: an existing route answers 405, a missing route 404.

    Starlette's router answers in this way, and SGLang accepts OPTIONS requests without a key.
    """
    routes = (BEGIN_UPDATE, LOADS, WEIGHTS_CHECKER)
    update_sessions, loads, weights_checker = await asyncio.gather(*(_route_exists(http, route) for route in routes))
    return Capabilities(update_sessions=update_sessions, loads=loads, weights_checker=weights_checker)


async def _route_exists(http: HttpClient, endpoint: Endpoint) -> bool:
    try:
        await http.call(Endpoint(endpoint.path, method="OPTIONS", retryable=True, is_optional=True))
    except UnsupportedError:
        return False
    except VerlServerError as error:
        if error.details.get("status") != 405:
            raise
    return True


async def probe_request_fields(http: HttpClient) -> frozenset[str]:
    """The fields of `/generate`, from the server's description of its own routes (OpenAPI).

    The server generates its description at the first request, which takes a second. The fields that 0.5.15 and 0.5.23
    have are added: a server that was started with DISABLE_OPENAPI_DOC has no description.
    """
    try:
        schemas = (await http.call(OPENAPI))["components"]["schemas"]
    except UnsupportedError:
        return REQUEST_FIELDS
    return REQUEST_FIELDS.union(schemas["GenerateReqInput"]["properties"])


# -- the connection ------------------------------------------------------------------------------------


class SharedAnswer(Generic[T]):
    """The answer to a question that is asked once. Calls that need it at the same time share one request.

    A failed request is not kept: its error is raised by all calls that wait for it, and the next call asks again. Each
    event loop sends a request of its own until one of them has the answer.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._answer: tuple[T] | None = None
        self._requests: dict[asyncio.AbstractEventLoop, asyncio.Task[T]] = {}

    async def get(self) -> T:
        """The answer. Cancelling one of several calls does not cancel the request."""
        if self._answer is None:
            loop = asyncio.get_running_loop()
            request = self._requests.get(loop)
            if request is None:
                request = self._requests[loop] = loop.create_task(self._ask())
                request.add_done_callback(self._forget_request)
            self._answer = (await asyncio.shield(request),)
        return self._answer[0]

    def _forget_request(self, request: asyncio.Task[T]) -> None:
        self._requests.pop(request.get_loop(), None)
        if not request.cancelled():
            request.exception()  # no call may be waiting for it any more


class ServerConnection:
    """The HTTP client of one server, and what the adapter knows of the server."""

    def __init__(self, http: HttpClient, server_args: Mapping[str, Any]) -> None:
        self.http = http
        self.base_url = http.base_url
        self._given_args = self.server_args = server_args
        """Arguments that the server was started with. Empty for an attached server until they are needed."""
        self.paused = False
        """Whether this adapter has paused generation."""
        self.released_memory: frozenset[str] = frozenset()
        """Memory tags that are released, as of the last call that released or resumed memory or asked for it."""
        self.is_held = False
        """Whether generation is paused for a release of memory that has not happened yet."""
        self.needs_continue = False
        """Whether this adapter has paused generation for a release of memory, or resumed memory, and has not continued
        generation since."""
        self.weights_undefined = False
        """Whether the weights were lost, by a release or with the server's process, and not all loaded since."""
        self.known_versions: set[int] = set()
        """Weight versions that the server may have without an update by another client."""
        self.requests_in_flight = 0
        """Number of generation calls of this adapter that have not returned."""
        self.forget_server()

    def forget_server(self) -> None:
        """Forget what the server has answered about itself: another server may answer at this address now."""
        self.server_args = self._given_args
        self._resolved_args = SharedAnswer(self.get_server_info)
        self._limits = SharedAnswer(self._read_limits)
        self.capabilities = SharedAnswer(lambda: probe_capabilities(self.http))
        self._request_fields = SharedAnswer(lambda: probe_request_fields(self.http))

    def note_restart(self) -> None:
        """The server was started again: forget its state, and what it has answered about itself."""
        self.paused = self.is_held = self.needs_continue = False
        self.released_memory = frozenset()
        self.known_versions.clear()
        self.forget_server()

    async def call(self, endpoint: Endpoint, body: Json | None = None) -> Any:
        """Send one request and return the decoded reply."""
        reply = await self.http.call(endpoint, body)
        if endpoint is replies.GENERATE:
            self.needs_continue = False  # another client may have continued generation
        return reply

    async def call_weights(self, endpoint: Endpoint, body: Json) -> Json:
        """Send one request of a weight update. Raises ServerError when the reply carries `success: false`."""
        if "weight_version" in body:
            self.known_versions.add(parse_weight_version(body["weight_version"]))
        return require_success(await self.http.call(endpoint, body), self.base_url + endpoint.path)

    async def is_ok(self, endpoint: Endpoint) -> bool:
        """Whether `endpoint` answers with success. False when it answers 503."""
        try:
            await self.http.call(endpoint)
        except NotReadyError:
            return False
        return True

    async def get_server_info(self) -> Json:
        return remove_keys(await self.http.call(replies.SERVER_INFO))

    async def get_server_args(self) -> Mapping[str, Any]:
        """The server's arguments. For an attached server they are requested once."""
        if not self.server_args:
            self.server_args = await self.get_resolved_args()
        return self.server_args

    async def get_resolved_args(self) -> Json:
        """The server's arguments with the values that SGLang has chosen (`/server_info`). They are requested once."""
        return await self._resolved_args.get()

    async def get_tp_size(self) -> int:
        return int((await self.get_server_args()).get("tp_size") or 1)

    async def get_limits(self) -> PromptLimits:
        """Limits of the prompts that this server accepts. They are requested once."""
        return await self._limits.get()

    async def _read_limits(self) -> PromptLimits:
        server_info = await self.get_resolved_args()
        model_path = str(server_info.get("model_path"))
        tokenizer_path = str(server_info.get("tokenizer_path") or model_path)
        try:
            return prompt_limits(server_info, *read_model_configs(model_path, tokenizer_path))
        except OSError as error:  # for example a process that may open no more files: a router tries again
            raise ServerError(f"the files of the model cannot be read: {error}", url=self.base_url) from error

    async def require_known_fields(self, fields: Mapping[str, Any]) -> None:
        """Raise BadInputError for a field of `/generate` that the server does not know.

        The server is asked only when a request has a field that is not in `REQUEST_FIELDS`. The answer is kept.
        """
        if unlisted := unlisted_fields(fields):
            require_known_fields(unlisted, await self._request_fields.get())
