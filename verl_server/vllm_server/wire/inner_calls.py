"""`InnerCalls`: calls of vLLM's own HTTP routes inside the process of the API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import quote

import orjson

from verl_server.adapter.vllm.endpoints import Endpoint
from verl_server.adapter.vllm.replies import error_from_reply
from verl_server.errors import ServerError
from verl_server.vllm_server.keys import App, Message, Send
from verl_server.vllm_server.wire.state import Disconnected

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
