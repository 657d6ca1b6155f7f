"""What the routes of this folder share: the state of the server, calls inside it and to its workers, replies."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from starlette.responses import Response

from verl_server.adapter.sglang.replies import Endpoint
from verl_server.adapter.vllm.replies import error_from_reply
from verl_server.adapter.vllm.requests import WORKER_CALL
from verl_server.errors import (
    BadInputError,
    NotReadyError,
    ServerBusyError,
    ServerError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.types import Json
from verl_server.vllm_plugin.start import App, Message, Send


class Disconnected(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class ServerFacts:
    """Settings of the server that do not change."""

    server_args: dict[str, Any]
    """Arguments of the server by the names of vLLM's command line, without keys."""
    weight_version: int
    """Version of the weights at the start."""

    @property
    def base_names(self) -> list[str]:
        """Names with which a request asks for the model without a LoRA adapter."""
        served = self.server_args.get("served_model_name") or []
        return [self.server_args["model"], *([served] if isinstance(served, str) else served)]


@dataclass
class RunningRequest:
    """A generation that was requested and has not ended."""

    rid: str
    lora: str | None = None
    """Name of the LoRA adapter of the request."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort. A request that waits for the end of a pause then ends at once."""
    is_held: bool = False
    """Whether the request waits for the end of a pause, and vLLM does not know it yet."""


class ServerState:
    """Pause, running requests and released memory of one server."""

    def __init__(self, facts: ServerFacts) -> None:
        self.facts = facts
        self._may_run = asyncio.Event()
        self._may_run.set()
        self.is_paused_by_update = False
        """Whether generation is paused because an update has failed that had paused it by itself."""
        self._control = asyncio.Lock()
        """Held by calls that change the server: pauses, weights, memory."""
        self.resolved: dict[str, Any] | None = None
        """Values of server arguments that vLLM has chosen. None until they were asked for."""
        self.weight_version = facts.weight_version
        """Version of the weights."""
        self.is_version_set = False
        """Whether vLLM knows the version of the start."""
        self.released: frozenset[str] = frozenset()
        """Memory tags that are released."""
        self.undefined_weights: str | None = None
        """Reason why the weights are torn or empty, so that nothing is generated. None: the weights are whole."""
        self.fault: str | None = None
        """Why the server cannot be used any more, and must be replaced."""
        self.lora_folders: dict[str, Path] = {}
        """Folder of each loaded LoRA adapter."""
        self._running: dict[str, RunningRequest] = {}

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused by a route of this folder. New requests then wait."""
        return not self._may_run.is_set()

    @asynccontextmanager
    async def exclusive(self, gone: asyncio.Event) -> AsyncIterator[None]:
        """Change the server alone. Raises Disconnected for a client that has gone while other calls changed the server.

        `gone`: set when the client of the call has closed its connection.
        """
        acquiring, leaving = asyncio.ensure_future(self._control.acquire()), asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait((acquiring, leaving), return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set():
                raise Disconnected
            yield
        finally:
            leaving.cancel()
            if not acquiring.cancel() and not acquiring.cancelled():
                self._control.release()

    def set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self._may_run.clear()
        else:
            self._may_run.set()
            self.is_paused_by_update = False

    def may_generate(self) -> bool:
        """Whether new requests are generated now: not during a pause, and not with undefined weights."""
        return not self.is_paused and self.undefined_weights is None

    def require_weights(self) -> None:
        """Raise NotReadyError while the weights are undefined: vLLM's workers would end at the next token."""
        if self.undefined_weights is not None:
            raise NotReadyError(f"the weights are undefined, because {self.undefined_weights}: push all weights")

    @contextmanager
    def running(self, rid: str, lora: str | None = None) -> Iterator[RunningRequest]:
        """Record a generation while it runs. Raises BadInputError for the id of a generation that runs."""
        if rid in self._running:
            raise BadInputError(f"a request with the rid {rid!r} is running: every request needs an id of its own")
        request = self._running[rid] = RunningRequest(rid, lora)
        try:
            yield request
        finally:
            del self._running[rid]

    async def wait_until_running(self, request: RunningRequest, gone: asyncio.Event) -> bool:
        """Wait while generation is paused. False when the request was aborted or its client has gone meanwhile."""
        while self.is_paused and not request.aborted.is_set() and not gone.is_set():
            request.is_held = True
            waits = [asyncio.ensure_future(event.wait()) for event in (self._may_run, request.aborted, gone)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                request.is_held = False
        return not request.aborted.is_set() and not gone.is_set()

    def requests(self, prefix: str = "") -> list[RunningRequest]:
        """The generations whose id starts with `prefix`."""
        return [request for rid, request in self._running.items() if rid.startswith(prefix)]

    @property
    def num_in_vllm(self) -> int:
        """Number of generations that vLLM computes or holds."""
        return sum(not request.is_held for request in self._running.values())

    @property
    def num_held(self) -> int:
        """Number of requests that wait for the end of a pause."""
        return sum(request.is_held for request in self._running.values())


# -- Inner calls ------------------------------------------------------------------------------------
# `InnerCalls`: calls of vLLM's own HTTP routes inside the process of the API server.

T = TypeVar("T")

#: Parts of the scope of a request that its inner calls take over. `app` is vLLM's FastAPI application.
_COPIED = ("type", "asgi", "http_version", "scheme", "client", "server", "root_path", "app")
CANCEL_TIMEOUT_S = 10.0
"""Seconds that vLLM's route may take to end after its stream was closed."""
_END = b""


class InnerCalls:
    """Calls of vLLM's routes on behalf of one request.

    `gone` is set when the client of that request has closed its connection. With `ends_with_client`, vLLM then ends the
    generations of the request, as it does for its own clients. Other calls are made to their end: a half-made update or
    pause would leave the server in a state that no client knows.
    """

    def __init__(
        self, app: App, scope: MutableMapping[str, Any], gone: asyncio.Event, *, ends_with_client: bool
    ) -> None:
        self._app, self._scope, self.gone = app, scope, gone
        self._disconnects = gone if ends_with_client else asyncio.Event()

    @contextlib.asynccontextmanager
    async def ended_together(self) -> AsyncIterator[InnerCalls]:
        """Calls that vLLM ends when the client has gone, and when the body is left.

        vLLM ends a generation only when it sees that the client has gone. It does not see that a task was cancelled.
        """
        ended = asyncio.Event()

        async def follow() -> None:
            await self._disconnects.wait()
            ended.set()

        following = asyncio.create_task(follow())
        try:
            yield InnerCalls(self._app, self._scope, ended, ends_with_client=True)
        finally:
            ended.set()
            following.cancel()

    async def call(self, endpoint: Endpoint, body: Any = None, query: str = "") -> Any:
        """The decoded reply of a route: JSON, or text.

        Raises the error of `error_from_reply` for a status that is no success, and Disconnected.
        """
        status, parts = 0, bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.extend(message.get("body", b""))

        await self._run(endpoint, query, body, send)
        if self._disconnects.is_set():
            raise Disconnected
        return _decode(endpoint, status, bytes(parts))

    async def stream(self, endpoint: Endpoint, body: Any, stamp: Callable[[], T]) -> AsyncGenerator[tuple[Any, T]]:
        """The decoded events of a stream of server-sent events. Closing the iterator ends the generation.

        Each event comes with the value that `stamp` returned when vLLM sent it, which may be long before it is read.

        Raises the error of `error_from_reply`.
        """
        parts: asyncio.Queue[tuple[int, bytes, T]] = asyncio.Queue()
        status = 0

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.body" and message.get("body"):
                parts.put_nowait((status, message["body"], stamp()))

        async def run() -> None:
            try:
                await self._run(endpoint, "", body, send)
            finally:
                parts.put_nowait((status, _END, stamp()))

        task = asyncio.create_task(run())
        try:
            async for event in _events(endpoint, parts):
                yield event
            await task
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_TIMEOUT_S)
            if task.done() and not task.cancelled():
                task.exception()  # the reader has left, or has got the same error

    async def _run(self, endpoint: Endpoint, query: str, body: Any, send: Send) -> None:
        """Run a route of vLLM. Raises ServerError where vLLM raises.

        vLLM reports failures of its engine and its workers by plain exceptions, which become a reply only in front of
        this application.
        """
        try:
            await self._app(self._inner_scope(endpoint, query), self._receive(body), send)
        except Exception as error:
            raise ServerError(f"vLLM failed at {endpoint.path}: {type(error).__name__}: {error}") from error

    def _inner_scope(self, endpoint: Endpoint, query: str) -> MutableMapping[str, Any]:
        return {name: self._scope[name] for name in _COPIED if name in self._scope} | {
            "method": endpoint.method,
            "path": endpoint.path,
            "raw_path": quote(endpoint.path).encode(),
            "query_string": query.encode(),
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "state": {},
        }

    def _receive(self, body: Any) -> Any:
        """ASGI's `receive`: the body, then, when the client is gone, the end of the connection."""
        is_sent = False

        async def receive() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": b"" if body is None else orjson.dumps(body)}
            await self._disconnects.wait()
            return {"type": "http.disconnect"}

        return receive


async def _events(endpoint: Endpoint, parts: asyncio.Queue[tuple[int, bytes, T]]) -> AsyncIterator[tuple[Any, T]]:
    """The events of a reply that arrives in parts."""
    partial = b""
    while True:
        status, part, stamp = await parts.get()
        partial += part
        if status >= 400 and part:
            continue  # an error: its body is read to the end
        if part is _END:
            if status >= 400:
                _decode(endpoint, status, partial)
            return
        *complete, partial = partial.split(b"\n\n")
        for event in complete:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            yield _decode(endpoint, status, data), stamp


def _decode(endpoint: Endpoint, status: int, raw: bytes) -> Any:
    if not status:
        raise ServerError(f"vLLM did not answer {endpoint.path}")
    try:
        reply = orjson.loads(raw)
    except orjson.JSONDecodeError:
        reply = raw.decode("utf-8", "replace")
    if status >= 400:
        raise error_from_reply(status, endpoint.path, reply)
    return reply


# -- Worker calls -----------------------------------------------------------------------------------
# Calls of the methods of `WorkerExtension` in all workers.


async def call_workers(state: ServerState, calls: InnerCalls, method: str, *args: str) -> list[Json]:
    """The report of each worker, in the order of the ranks.

    Raises ServerError if the replies are those of an earlier call: vLLM mixes them up when a call of several workers
    has failed in one of them. The server is unhealthy from then on, so that a fleet replaces it.
    """
    call_id = uuid.uuid4().hex
    body = {"method": method, "args": list(args), "kwargs": {"call_id": call_id}}
    reports: list[Json] = (await calls.call(WORKER_CALL, body))["results"]
    for rank, report in enumerate(reports):
        if not isinstance(report, dict) or (report.get("rank"), report.get("call_id")) != (rank, call_id):
            state.fault = (
                f"vLLM's worker of rank {rank} answered an earlier call instead of {method}: that call has failed in "
                "another worker, and vLLM mixes up all replies since then. Start a new server"
            )
            raise ServerError(state.fault)
    return reports


async def call_all(state: ServerState, calls: InnerCalls, method: str, *args: str) -> list[Json]:
    """The reports of `call_workers`. Raises ServerError with the report of the first worker that has failed."""
    reports = await call_workers(state, calls, method, *args)
    for report in reports:
        if not report["ok"]:
            raise ServerError(f"{method} failed on rank {report['rank']}: {report['error']}")
    return reports


# -- Replies ----------------------------------------------------------------------------------------
# Replies of the routes of this folder, and the status and the body of an error.

#: The status of each kind of error; the adapter turns it into the same error again.
_STATUS: tuple[tuple[type[VerlServerError], int], ...] = (
    (UnsupportedError, 501),
    (ServerBusyError, 409),
    (NotReadyError, 503),
    (BadInputError, 400),
)


def json_reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def status_of(error: VerlServerError) -> int:
    """The HTTP status for an error. 500 for a failure of the server."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: VerlServerError, status: int) -> Json:
    return {"error": {"message": error.message, "type": type(error).__name__, "code": status}}


def error_reply(error: VerlServerError) -> Response:
    status = status_of(error)
    return json_reply(error_body(error, status), status)
