"""`Forwarder`: sends requests to a replica as they are. The OpenAI paths of a router are forwarded.

A request is sent to another replica as long as no byte of an answer has arrived. Later, the loss of its replica breaks
the caller's connection.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.json_body import without_half_characters
from verl_server.errors import ServerDiedError, ServerError
from verl_server.router.attempt_runner import FILES_RETRY_S, Failures
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http.bodies import parse_object, read_body
from verl_server.router.placement.routed_replica import GenerationServer, RoutedReplica, Slot, unless_lost
from verl_server.router.request_checks import (
    CHARACTERS_PER_TOKEN,
    MAX_SERVER_DEATHS,
    check_forwarded_body,
    is_out_of_files,
    was_received,
)
from verl_server.server.ports import open_socket
from verl_server.tracing import trace_headers
from verl_server.types import Json

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
