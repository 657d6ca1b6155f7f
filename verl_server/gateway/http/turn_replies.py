"""Replies with a turn. Their client waits for the turn until the reply is sent or the connection closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from verl_server.gateway.http.connections import closed_future, is_closed
from verl_server.gateway.sessions.generation import Client, Generation

PART_BYTES = 64 * 1024
"""Maximum size of the parts of a reply. The server waits for the client when it has so many bytes to send."""


class TurnReply(Response):
    """A reply with the whole turn as JSON.

    The turn is delivered if the connection is open when at most one part of the reply is left in the buffers of the
    server. Nobody can know what the client reads from the buffers of the operating system.
    """

    def __init__(self, body: bytes, generation: Generation, waiting: contextlib.ExitStack) -> None:
        """`waiting`: the client leaves the turn when it is closed."""
        super().__init__(body, media_type="application/json")
        self._parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        self._generation, self._waiting = generation, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._waiting:
            is_long = len(self._parts) > 1
            if is_long:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for part in (*self._parts, b""):  # the last send waits until the client has taken the last part
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # the client may have gone just now
            if not is_closed(scope):
                self._generation.set_delivered()
            if is_long:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await super().__call__(scope, receive, send)


class TurnStream(StreamingResponse):
    """A stream of server-sent events."""

    def __init__(self, events: AsyncIterator[bytes], client: Client) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = scope["app"].state.metrics.open_streams.track_inprogress()
        with self._client, streams:  # also if the client closes the connection before the first event
            await run_until(closed_future(scope, receive), self.stream_response(send))


async def wait_for_first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of some futures is done. `asyncio.wait` takes several times as long."""
    if any(future.done() for future in futures):
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def release(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(release)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(release)


async def run_until(end: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in this task. It is cancelled when `end` is done. A task group takes several times as long."""
    task, is_running = asyncio.current_task(), True
    assert task is not None

    def cancel(_: asyncio.Future[None]) -> None:
        if is_running:
            task.cancel()

    end.add_done_callback(cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not end.done() or task.uncancel():
            raise
    finally:
        is_running = False
        end.remove_done_callback(cancel)
