"""`RouterClient`: an asynchronous client of a router process. Its calls survive a restart of the router."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection
from typing import Any, Self, cast

import aiohttp

from verl_server.adapter.http import close_now
from verl_server.adapter.sglang.replies import parse_json_or_text
from verl_server.adapter.sglang.requests import plain_request, split_batch
from verl_server.errors import BadInputError, DeadlineError, ServerError, ShutDownError, VerlServerError, from_wire
from verl_server.router.request_checks import is_out_of_files, validate_timeout
from verl_server.router.resumable_generation import EVENT_STREAM, STREAM_TOKENS, OnTokens, receive_reports
from verl_server.server.launch import open_socket
from verl_server.server.process import raise_open_file_limit
from verl_server.tracing import trace_headers
from verl_server.types import GenerateReply, Json, encode_json
from verl_server.validation import check_arguments, require_http_url, require_key, require_seconds

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
"""Seconds for a question that is not a generation."""
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 1.0
MIN_SERVED_S = 2.0
"""Minimum number of seconds that a broken call must have lasted to prove that a router was working on it. A program
that accepts connections and closes them at once is not a router."""


class RouterClient:
    """`generate` of a router over HTTP. Use it as an asynchronous context manager, in one event loop at
    a time.

    Each call sends a request id. When the connection breaks, the client sends the same request again: the router then
    returns the running generation or its result. A restarted router does not know the generation and runs it again; the
    server has aborted the lost one when its connection closed. So each call returns exactly one generation.
    """

    @check_arguments()
    def __init__(self, url: str, api_key: str | None, reconnect_timeout_s: float = 60.0) -> None:
        """`reconnect_timeout_s`: seconds without a reachable router before a call raises ServerError. 0: at once."""
        self._url = require_http_url("url", url)
        self._reconnect_timeout_s = require_seconds("reconnect_timeout_s", reconnect_timeout_s, may_be_zero=True)
        self._headers = {} if not api_key else {"Authorization": f"Bearer {require_key('api_key', api_key)}"}
        self._session: aiohttp.ClientSession | None = None
        """Connections. Opened by the first call, because aiohttp needs a running event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of these connections. A call in another loop, as in the next `asyncio.run`, opens others."""
        self._sent: set[object] = set()
        """One object for each request that has a connection: the request was sent, and its reply is not complete."""
        self._is_closed = False
        raise_open_file_limit()  # each call has a connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. A later call raises ShutDownError."""
        self._is_closed = True
        await self.close_connections()

    async def close_connections(self) -> None:
        """Close all connections. A later call opens others, and may run in another event loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        weight_version: int | None = None,
        min_weight_version: int | None = None,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
        **request: Any,
    ) -> GenerateReply:
        """One generation for one prompt. Arguments, reply and errors are those of `RolloutRouter.generate`.

        Also raises ServerBusyError (full queue, retryable), ServerError (no router for `reconnect_timeout_s` seconds).
        """
        if split_batch(request) is not None:
            raise BadInputError("a generation has one prompt; make one call for each prompt, each with its own rid")
        request = plain_request(request)
        if request.pop("stream", None):
            raise BadInputError("RouterClient.generate returns the whole generation: leave stream out")
        validate_timeout(timeout_s)
        options = {
            "rid": rid or uuid.uuid4().hex,
            "session_id": session_id,
            "weight_version": weight_version,
            "min_weight_version": min_weight_version,
        }
        if "prompt" in request:
            request["text"] = request.pop("prompt")
        body = {**request, **{name: value for name, value in options.items() if value is not None}}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        unreachable_since: float | None = None
        delay_s = FIRST_RETRY_DELAY_S
        body["timeout_s"] = timeout_s
        if on_tokens is not None:
            body[STREAM_TOKENS] = True
        while True:
            sent_at = time.monotonic()
            try:
                async with asyncio.timeout_at(None if deadline is None else _loop_time(deadline) + CONNECT_TIMEOUT_S):
                    return cast(GenerateReply, await self._post(body, on_tokens))
            except (aiohttp.ClientError, ConnectionError) as error:
                now = time.monotonic()
                connected = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError))
                if is_out_of_files(error) and self._sent:  # a file is free when another call has ended
                    unreachable_since = None
                elif unreachable_since is None or (connected and now - sent_at > MIN_SERVED_S):
                    unreachable_since, delay_s = now, FIRST_RETRY_DELAY_S
                if unreachable_since is not None and now - unreachable_since >= self._reconnect_timeout_s:
                    raise ServerError(f"the router at {self._url} cannot be reached: {error}", url=self._url) from error
                delay_s = min(2 * delay_s, MAX_RETRY_DELAY_S)
            except TimeoutError as error:
                if isinstance(error, VerlServerError):
                    raise
                raise _deadline_error(timeout_s) from None
            await asyncio.sleep(delay_s)
            if deadline is not None:
                body["timeout_s"] = deadline - time.monotonic()
                if body["timeout_s"] <= 0:
                    raise _deadline_error(timeout_s)

    async def replicas(self) -> list[Json]:
        """The replicas of the router, with the fields of `ReplicaSnapshot`. Asks once.

        Raises ServerError if no router answers, or if it refuses the key.
        """
        rows = await self._get("/replicas")
        if not isinstance(rows, list):
            raise ServerError(f"{self._url} is no router: /replicas is no list", url=self._url)
        return rows

    async def is_paused(self) -> bool:
        """Whether all requests wait in the router. False also if its `/health` does not say so. Raises ServerError."""
        health = await self._get("/health", statuses=(200, 503))
        return isinstance(health, dict) and health.get("paused") is True

    async def models(self) -> list[Json]:
        """The models of a replica, as OpenAI's `/v1/models` lists them. Asks once. Raises ServerError."""
        reply = await self._get("/v1/models")
        models = reply.get("data") if isinstance(reply, dict) else None
        return models if isinstance(models, list) else []

    async def _get(self, path: str, statuses: Collection[int] = (200,)) -> Any:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._open_session().get(f"{self._url}{path}", timeout=timeout) as answer:
                body = parse_json_or_text(await answer.read())
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            problem = f"{error}" or f"no answer within {ANSWER_TIMEOUT_S:g} s"
            raise ServerError(f"the router at {self._url} cannot be reached: {problem}", url=self._url) from error
        if answer.status in statuses:
            return body
        problem = "refused the key (401)" if answer.status == 401 else f"answered {answer.status} to {path}"
        raise ServerError(f"the router at {self._url} {problem}", url=self._url, status=answer.status)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise ShutDownError("the RouterClient is closed; make another one")
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            # The sockets of a loop that has been closed are closed here. A loop that still runs keeps its calls.
            if self._loop is not None and self._loop.is_closed() and self._session.connector is not None:
                close_now(self._session.connector)
            self._session = None
        if self._session is None:
            self._loop = loop
            trace = aiohttp.TraceConfig()
            trace.on_request_headers_sent.append(self._note_sent)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, socket_factory=open_socket),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                headers=self._headers,
                trust_env=False,
                trace_configs=[trace],
            )
        return self._session

    async def _note_sent(
        self, session: aiohttp.ClientSession, context: Any, params: aiohttp.TraceRequestHeadersSentParams
    ) -> None:
        self._sent.add(context.trace_request_ctx)

    async def _post(self, body: Json, on_tokens: OnTokens | None) -> Json:
        """Send one request; returns the reply or raises the error that the router reports."""
        attempt = object()
        try:
            async with self._open_session().post(
                f"{self._url}/generate",
                data=encode_json(body),
                headers={"Content-Type": "application/json", **trace_headers()},
                trace_request_ctx=attempt,
            ) as answer:
                if on_tokens is not None and answer.content_type == EVENT_STREAM:
                    return await receive_reports(answer.content, on_tokens)
                raw = await answer.read()
        finally:
            self._sent.discard(attempt)
        reply = parse_json_or_text(raw)
        is_success = answer.status == 200
        content = reply.get("meta_info" if is_success else "error") if isinstance(reply, dict) else None
        if is_success and isinstance(content, dict):
            generation: Json = reply
            return generation
        if not is_success and isinstance(content, dict) and content.get("message"):
            details = content.get("details")
            raise from_wire(
                {
                    "type": content.get("type", "ServerError"),
                    "message": str(content["message"]),
                    "details": details if isinstance(details, dict) else {},
                }
            )
        shown = raw[:200].decode("utf-8", "replace").strip() or "(empty)"
        raise ServerError(
            f"{self._url} answered {answer.status} with something that `verl-server router` does not send: {shown}\n"
            "Check that the URL is the router's, and that no proxy answers in its place",
            url=self._url,
            status=answer.status,
        )


def fetch_status(url: str, api_key: str | None) -> tuple[list[Json], bool]:
    """The rows of a router's `/replicas`, and whether it is paused. Blocks. Raises ServerError."""

    async def fetch() -> tuple[list[Json], bool]:
        async with RouterClient(url, api_key) as client:
            return await client.replicas(), await client.is_paused()

    return asyncio.run(fetch())


def _loop_time(deadline: float) -> float:
    """A time of `time.monotonic` on the clock of the running event loop."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def _deadline_error(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(
        f"the generation was not finished within {timeout_s:g} s", operation="generate", seconds=timeout_s
    )
