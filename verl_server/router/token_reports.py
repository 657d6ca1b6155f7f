"""Reports of the tokens of a generation that still runs, for callers that show a turn while it is generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
import orjson
from aiohttp import web

from verl_server.adapter.http_client import read_events
from verl_server.errors import VerlServerError, from_wire, to_wire
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.router.resumable_generation import ResumableGeneration

EVENT_STREAM = "text/event-stream"
STREAM_TOKENS = "stream_tokens"
"""Field of a request to a router that asks for the tokens while they are generated."""

OnTokens: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], None]
"""Function that gets new tokens of a generation: position of the first of them in the output, token ids, and their log
probabilities in nats (empty if the request has no `return_logprob`).

Only tokens that the final reply has are reported, so a generation that must start again when its server is lost (with a
grammar or stop strings, for example) reports none: its tokens are in the reply. Each token is reported once. Reports
begin again at position 0 if the connection of a `RouterClient` broke, and if a server has refused a continuation that
is longer than its context. The tokens are then the same, unless the generation started again: after this refusal, or
because the router was started again. The function must return at once, and must not raise.
"""


class TokenReports:
    """Reports the tokens of one generation to one caller."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._num_reported = 0

    def update(self, generation: ResumableGeneration) -> None:
        """Report the tokens that are new and certain."""
        num_certain = generation.num_certain_tokens
        if num_certain < self._num_reported:
            self._num_reported = 0
        if num_certain > self._num_reported:
            token_ids, logprobs = generation.certain_tokens(self._num_reported)
            self._on_tokens(self._num_reported, token_ids, logprobs)
            self._num_reported = num_certain


@contextlib.contextmanager
def report_tokens(generation: ResumableGeneration, on_tokens: OnTokens | None) -> Iterator[None]:
    """Report the tokens of a generation to a caller within a `with` block: those so far, and those that come."""
    if on_tokens is None:
        yield
        return
    reports = TokenReports(on_tokens)
    generation.reports.append(reports)
    try:
        reports.update(generation)
        yield
    finally:
        generation.reports.remove(reports)


async def send_reports(request: web.BaseRequest, generate: Callable[[OnTokens], Awaitable[Json]]) -> web.StreamResponse:
    """Answer a request with server-sent events: `{"start", "token_ids", "logprobs"}` for new tokens, then `{"reply"}`.

    Without tokens before the end, `generate` returns or raises first: then its reply is returned as JSON, and its error
    is raised. An error after the first tokens is the last event, `{"error"}`.
    """
    events = asyncio.Queue[Json | None]()
    task = asyncio.ensure_future(
        generate(
            lambda start, ids, logprobs: events.put_nowait({"start": start, "token_ids": ids, "logprobs": logprobs})
        )
    )
    task.add_done_callback(lambda _: events.put_nowait(None))
    response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
    try:
        while (event := await events.get()) is not None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        if not response.prepared:
            return web.Response(body=orjson.dumps(await task), content_type="application/json")
        try:
            last: Json = {"reply": await task}
        except VerlServerError as error:
            last = {"error": to_wire(error)}
        await response.write(b"data: " + orjson.dumps(last) + b"\n\n")
        return response
    finally:
        task.cancel()


async def receive_reports(content: aiohttp.StreamReader, on_tokens: OnTokens) -> Json:
    """The reply at the end of the events of `send_reports`.

    Raises the error that the last event reports, and aiohttp.ClientPayloadError if the last event is missing.
    """
    async for data in read_events(content):
        event = orjson.loads(data)
        if "reply" in event:
            reply: Json = event["reply"]
            return reply
        if "error" in event:
            raise from_wire(event["error"])
        on_tokens(event["start"], event["token_ids"], event["logprobs"])
    raise aiohttp.ClientPayloadError("the stream ended before its generation finished")


def in_running_loop(on_tokens: OnTokens) -> OnTokens:
    """`on_tokens`, called in the event loop that runs now, from any thread."""
    loop = asyncio.get_running_loop()

    def call(start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the caller has ended
            loop.call_soon_threadsafe(on_tokens, start, token_ids, logprobs)

    return call
