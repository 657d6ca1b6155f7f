"""One HTTP link to one server: send, deadline, death, repeat.

The only place that touches sockets. Both adapters send through it, so there is one behaviour. `aiohttp`
ignores proxy variables unless told otherwise, which is what loopback traffic needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from verl_server.adapter.sglang import Endpoint, Kind, error_of
from verl_server.config import Timeouts
from verl_server.errors import DeadlineError, ServerDiedError, ServerError, VerlServerError

logger = logging.getLogger(__name__)

#: SGLang's uvicorn closes idle connections after 5 s; ours must be given up earlier, or a request could be
#: sent into a closing connection.
KEEP_ALIVE_S = 2.0
REPEAT_PAUSE_S = 0.1
#: How long a broken connection waits to learn whether the server's process has ended.
DEATH_NOTICE_S = 2.0


class HttpClient:
    """Connections to `base_url`, one pool for each event loop that uses it.

    `death` is asked after a connection broke: it waits up to the given seconds and returns the error that
    says how the server ended, or None if it lives.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        admin_api_key: str | None,
        timeouts: Timeouts,
        repeats: int,
        death: Callable[[float], ServerDiedError | None],
    ) -> None:
        self.base_url = base_url
        self._headers = {False: _headers(api_key), True: _headers(admin_api_key or api_key)}
        self._deadlines = {
            kind: aiohttp.ClientTimeout(total=total, sock_connect=timeouts.connect_s)
            for kind, total in (
                (Kind.CONTROL, timeouts.control_s),
                (Kind.WEIGHTS, timeouts.weights_s),
                (Kind.GENERATION, timeouts.generation_s),
            )
        }
        self._repeats = repeats
        self._death = death
        self._fatal: VerlServerError | None = None
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._responses: dict[asyncio.AbstractEventLoop, set[aiohttp.ClientResponse]] = {}

    async def call(self, endpoint: Endpoint, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send one request and return the decoded reply (JSON, or text where there is no JSON).

        Raises the typed error of `sglang.error_of`, ServerDiedError, or DeadlineError.
        """
        attempts = 1 + (self._repeats if endpoint.repeatable else 0)
        for attempt in range(1, attempts + 1):
            try:
                status, body = await self._send(endpoint, payload, timeout_s)
            except (aiohttp.ClientError, ConnectionError) as error:
                broken = await self._explain(endpoint, error)
                if attempt == attempts or isinstance(broken, ServerDiedError) or self._fatal:
                    raise broken from error
                logger.debug("%s: %s; sending again", endpoint.path, error)
                await asyncio.sleep(REPEAT_PAUSE_S * attempt)
                continue
            if status >= 400:
                raise error_of(status, self.base_url + endpoint.path, body)
            return body
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _send(self, endpoint: Endpoint, payload: Any, timeout_s: float | None) -> tuple[int, Any]:
        async with self._request(endpoint, payload, timeout_s) as response:
            raw = await response.read()
        return response.status, _decode(raw, response.content_type)

    async def stream(self, endpoint: Endpoint, payload: Any) -> AsyncIterator[dict[str, Any]]:
        """Send one request and yield each event of its stream. Closing the iterator ends the request."""
        url = self.base_url + endpoint.path
        try:
            async with self._request(endpoint, payload, None) as response:
                if response.status >= 400:
                    raise error_of(response.status, url, _decode(await response.read(), response.content_type))
                async for event in _events(response.content):
                    if "error" in event:
                        raise error_of(int(event["error"].get("code", 400)), url, event)
                    yield event
        except (aiohttp.ClientError, ConnectionError) as error:
            raise await self._explain(endpoint, error) from error

    def _request(self, endpoint: Endpoint, payload: Any, timeout_s: float | None) -> _Request:
        if self._fatal is not None:
            raise self._fatal
        timeout = self._deadlines[endpoint.kind]
        if timeout_s is not None:
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout.sock_connect)
        return _Request(self, endpoint, payload, timeout)

    async def _explain(self, endpoint: Endpoint, error: Exception) -> VerlServerError:
        """What a broken connection means: the server died, a peer's failure, or the network."""
        if self._fatal is not None:
            return self._fatal
        died = await asyncio.to_thread(self._death, DEATH_NOTICE_S)
        if died is not None:
            return died
        url = self.base_url + endpoint.path
        return ServerError(f"the connection to {url} broke ({type(error).__name__}: {error})", url=url)

    def open_request(self, endpoint: Endpoint, payload: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """aiohttp's context manager for one request in the running loop."""
        return self._session().request(
            endpoint.method,
            self.base_url + endpoint.path,
            data=None if payload is None else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY),
            headers=self._headers[endpoint.admin],
            timeout=timeout,
        )

    def opened(self, response: aiohttp.ClientResponse) -> None:
        """Its body is about to be read. Raises the error of `fail`, if that was called meanwhile."""
        self._responses[asyncio.get_running_loop()].add(response)
        if self._fatal is not None:
            raise self._fatal

    def finished(self, response: aiohttp.ClientResponse) -> None:
        self._responses[asyncio.get_running_loop()].discard(response)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            self._forget_closed_loops()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=2**20)
            self._sessions[loop] = session
            self._responses[loop] = set()
        return session

    def fail(self, error: VerlServerError) -> None:
        """Break every call in flight and refuse all later ones with `error`. From any thread."""
        self._fatal = self._fatal or error
        self._forget_closed_loops()
        for loop, session in list(self._sessions.items()):
            if not loop.is_closed() and session.connector is not None:
                loop.call_soon_threadsafe(_close_connections, session.connector, self._responses[loop])

    def _forget_closed_loops(self) -> None:
        """Their connections died with them (`asyncio.run` has ended, say); mark the pools closed, too."""
        for loop in [known for known in self._sessions if known.is_closed()]:
            session = self._sessions.pop(loop, None)
            self._responses.pop(loop, None)
            if session is not None and session.connector is not None:
                closing = session.connector.close().__await__()
                with suppress(StopIteration):
                    next(closing)  # there is no loop left to wait in, and nothing to wait for
                closing.close()

    async def aclose(self) -> None:
        """Close the pool of the running loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class _Request:
    """`async with` around one request that turns a time-out into DeadlineError."""

    def __init__(self, http: HttpClient, endpoint: Endpoint, payload: Any, timeout: aiohttp.ClientTimeout) -> None:
        self._http, self._endpoint, self._timeout = http, endpoint, timeout
        self._context = http.open_request(endpoint, payload, timeout)
        self._response: aiohttp.ClientResponse | None = None
        self._url = http.base_url + endpoint.path

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
        except TimeoutError as error:
            raise self._late() from error
        self._response = response
        try:
            self._http.opened(response)
        except VerlServerError as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return response

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._response is not None
        self._http.finished(self._response)
        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, TimeoutError) and not isinstance(error, VerlServerError):
            raise self._late() from error

    def _late(self) -> DeadlineError:
        seconds = self._timeout.total or self._timeout.sock_connect
        return DeadlineError(
            f"{self._url} did not answer within {seconds:g} s. The server's process lives: it is "
            f"wedged, or the {self._endpoint.kind.value} deadline in `timeouts` is too short for this model.",
            operation=self._endpoint.path,
            seconds=seconds,
            url=self._url,
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of any length (the reader's own line limit is 128 KiB)."""
    rest = b""
    async for chunk in content.iter_any():
        *complete, rest = (rest + chunk).split(b"\n\n")
        for event in complete:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield orjson.loads(data)


def _close_connections(connector: aiohttp.BaseConnector, responses: set[aiohttp.ClientResponse]) -> None:
    """Close everything at once: whoever waits wakes with a connection error.

    The connector alone wakes those who wait for an answer to begin; who reads a body must be told by its response.
    """
    for response in responses:
        response.close()
    task = asyncio.ensure_future(connector.close())
    task.add_done_callback(lambda done: done.exception())


def _headers(key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _decode(raw: bytes, content_type: str) -> Any:
    if raw and content_type == "application/json":
        return orjson.loads(raw)
    return raw.decode("utf-8", "replace")
