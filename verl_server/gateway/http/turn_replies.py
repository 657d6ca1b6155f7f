"""Replies with a turn. Their client waits for the turn until the reply is sent or the connection closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from verl_server.gateway.http.connections import is_closing
from verl_server.gateway.sessions.generation import Client, Generation

PART_BYTES = 64 * 1024
"""Maximum size of the parts of a reply. The server waits for the client when it has so many bytes to send."""


class TurnReply(Response):
    """A reply with the whole turn as JSON.

    The turn is delivered if the connection is open when at most one part of the reply is left in the buffers of the
    server. Nobody can know what the client reads from the buffers of the operating system.
    """

    def __init__(
        self, body: bytes, generation: Generation, gone: asyncio.Task[None], waiting: contextlib.ExitStack
    ) -> None:
        """`gone`: ends when the connection is closed. `waiting`: the client leaves the turn when it is closed."""
        super().__init__(body, media_type="application/json")
        self._parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        self._generation, self._gone, self._waiting = generation, gone, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._waiting:
            is_long = len(self._parts) > 1
            if is_long:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for part in (*self._parts, b""):  # the last send waits until the client has taken the last part
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # the client may have gone just now: then `gone` is done now
            if not self._gone.done() and not is_closing(scope):
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
            await super().__call__(scope, receive, send)
