"""The HTTP client of one server, with what the adapter knows of the server between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verl_server.adapter.http import HttpClient
from verl_server.adapter.model_files import read_model_configs
from verl_server.adapter.sglang import replies
from verl_server.adapter.sglang.replies import (
    BEGIN_UPDATE,
    LOADS,
    OPENAPI,
    WEIGHTS_CHECKER,
    Endpoint,
    prompt_limits,
    remove_keys,
    require_success,
)
from verl_server.adapter.sglang.requests import REQUEST_FIELDS, PromptLimits, require_known_fields, unlisted_fields
from verl_server.errors import NotReadyError, ServerError, UnsupportedError, VerlServerError
from verl_server.types import Json, parse_weight_version

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
