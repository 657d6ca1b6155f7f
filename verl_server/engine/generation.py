"""Generation on every trainer rank: rank 0 asks the backend and all ranks get the same reply or the same stream."""

from __future__ import annotations

import asyncio
import queue
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import orjson

from verl_server.engine.backend import Backend
from verl_server.errors import BadInputError, VerlServerError, from_wire
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.peer_errors import to_peer_wire
from verl_server.types import Json


def generation_request(fields: Json, *, return_logprob: bool | list[bool] | None, **arguments: Any) -> Json:
    """A backend's request. `arguments` are the other arguments of a generate method, `fields` its further fields.

    Arguments with their default value (None, or False for `return_logprob`) are left out, so that a request with a
    `rid` equals the same request that is sent to the fleet's router directly.
    """
    request = {name: value for name, value in arguments.items() if value is not None}
    if return_logprob is not None and return_logprob is not False:
        request["return_logprob"] = return_logprob
    return {**request, **fields}


def digest_of(request: Json) -> Json:
    """What a rank tells rank 0 about its request: a digest, or None for a request without a prompt.

    The id of a request does not count: it does not change the reply.
    """
    fields = {name: value for name, value in request.items() if name != "rid"}
    if not any(name in fields for name in ("prompt", "input_ids", "input_embeds")):
        return {"request": None}
    options = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return {"request": zlib.crc32(orjson.dumps(fields, default=_plain, option=options))}
    except TypeError:  # no JSON, for example a number of more than 64 bits: the backend of rank 0 says what is wrong
        return {"request": None}


def _plain(value: Any) -> Any:
    """A value that JSON does not know, for a digest: its numbers, its bytes, or its type."""
    if isinstance(value, bytes):
        return zlib.crc32(value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def require_same_request(contributions: list[Json]) -> None:
    """Raise BadInputError if ranks bring different requests: all get one reply, the one to the request of rank 0."""
    digests = [item["request"] for item in contributions]
    for rank, digest in enumerate(digests):
        if digest is not None and digests[0] is not None and digest != digests[0]:
            raise BadInputError(
                f"rank {rank} passed another request to generate than rank 0, but all ranks get the same reply. Pass "
                "equal requests on all ranks, or the request on rank 0 and prompt=None on the others. For a request "
                "of its own on each rank, use an engine for each rank, or a RolloutRouter",
                rank=rank,
            )


class RankGeneration:
    """Generation calls that all ranks of one engine make together."""

    def __init__(
        self,
        group: RankCoordinator,
        backend_for: Callable[[Json], Backend],
        get_refusal: Callable[[], VerlServerError | None],
        generation_s: float | None,
    ) -> None:
        """`backend_for` returns rank 0's backend for a request. `get_refusal` returns the reason why this rank cannot
        take part now, or None. `generation_s`: deadline of one generation in seconds.
        """
        self._group, self._backend_for, self._get_refusal = group, backend_for, get_refusal
        self._generation_s = generation_s

    def generate(self, request: Json) -> Any:
        """The reply to the request of rank 0, on all ranks."""

        def act(contributions: list[Json]) -> Any:
            require_same_request(contributions)
            return self._backend_for(request).generate(**request)

        return self._group.agree(
            self._group.next_call_id("generate"),
            act,
            contribution=digest_of(request),
            error=self._get_refusal(),
            action_timeout_s=self._generation_s,
        )

    async def async_generate(self, request: Json) -> Any:
        """`generate` for an event loop. Many calls can be in flight."""

        async def act(contributions: list[Json]) -> Any:
            require_same_request(contributions)
            return await (await self._async_backend_for(request)).async_generate(**request)

        return await self._group.agree_async(
            self._group.next_call_id("async_generate"),
            act,
            contribution=digest_of(request),
            error=self._get_refusal(),
            action_timeout_s=self._generation_s,
        )

    async def _async_backend_for(self, request: Json) -> Backend:
        """The backend for a request. For a request with LoRA adapters, a thread may ask the servers for their names."""
        if request.get("lora_path") is None:
            return self._backend_for(request)
        return await asyncio.to_thread(self._backend_for, request)

    def stream(self, request: Json) -> Iterator[Json]:
        """The growing replies to one prompt, on all ranks: rank 0 sends each event of the backend to the others."""
        return self._stream(request, self._get_refusal())

    def _stream(self, request: Json, refusal: VerlServerError | None) -> Iterator[Json]:
        group, call = self._group, self._group.next_call_id("stream")
        events = group.open_stream(call)
        try:
            group.agree(call, require_same_request, contribution=digest_of(request), error=refusal)
            if group.rank == 0:
                with _EndOfStream(group, call):
                    for event in self._backend_for(request).generate_stream(**request):
                        group.publish_event(call, event)
                        yield event
            else:
                while "end" not in (event := events.get()):
                    yield event
                _raise_end(event)
        finally:
            group.close_stream(call)

    def async_stream(self, request: Json) -> AsyncIterator[Json]:
        """`stream` for an event loop."""
        return self._async_stream(request, self._get_refusal())

    async def _async_stream(self, request: Json, refusal: VerlServerError | None) -> AsyncIterator[Json]:
        group, call = self._group, self._group.next_call_id("async_stream")
        events = group.open_stream(call)
        try:
            await group.agree_async(call, _agree_on_request, contribution=digest_of(request), error=refusal)
            if group.rank == 0:
                with _EndOfStream(group, call):
                    backend = await self._async_backend_for(request)
                    async for event in backend.async_generate_stream(**request):
                        group.publish_event(call, event)
                        yield event
            else:
                with _EventReader(events) as reader:
                    while "end" not in (event := await reader.next()):
                        yield event
                    _raise_end(event)
        finally:
            group.close_stream(call)


class _EventReader:
    """Waits for the events of one stream in a thread of its own: any number of streams can wait at the same time."""

    def __init__(self, events: queue.SimpleQueue[Json]) -> None:
        self._events = events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-server-stream")

    async def next(self) -> Json:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._events.get)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put({"end": None})  # wakes the thread of a stream that was cancelled
        self._thread.shutdown(wait=False)


class _EndOfStream:
    """Context of a stream on rank 0: tells the other ranks how the stream ended, also when it failed."""

    def __init__(self, group: RankCoordinator, call: str) -> None:
        self._group, self._call = group, call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = error is not None and not isinstance(error, GeneratorExit)
        self._group.publish_event(
            self._call, {"end": to_peer_wire(error, self._group.rank) if failed and error is not None else None}
        )


async def _agree_on_request(contributions: list[Json]) -> None:
    """The action of a call that only waits until all ranks have arrived."""
    require_same_request(contributions)


def _raise_end(event: Json) -> None:
    """Raise the error that ended rank 0's stream, if there was one."""
    if event["end"] is not None:
        raise from_wire(event["end"])
