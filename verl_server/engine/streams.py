"""Streaming generation on every rank: rank 0 reads the server's stream and hands each event to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from verl_server.engine.backend import Backend
from verl_server.errors import VerlServerError, from_wire, to_wire
from verl_server.ranks.coordinator import RankCoordinator

Json = dict[str, Any]


def stream_of(
    group: RankCoordinator, head: Callable[[], Backend], request: Json, refusal: VerlServerError | None
) -> Iterator[Json]:
    """The replies to one prompt as they grow, the same on every rank."""
    call = group.next_call("stream")
    events = group.open_stream(call)
    try:
        group.agree(call, lambda _: None, error=refusal)
        if group.rank == 0:
            with _EndOfStream(group, call):
                for event in head().generate_stream(**request):
                    group.publish(call, event)
                    yield event
        else:
            while "end" not in (event := events.get()):
                yield event
            _raise_end(event)
    finally:
        group.close_stream(call)


async def async_stream_of(
    group: RankCoordinator, head: Callable[[], Backend], request: Json, refusal: VerlServerError | None
) -> AsyncIterator[Json]:
    """`stream_of` for an event loop."""
    call = group.next_call("async_stream")
    events = group.open_stream(call)
    try:
        await group.agree_async(call, _nothing, error=refusal)
        if group.rank == 0:
            with _EndOfStream(group, call):
                async for event in head().async_generate_stream(**request):
                    group.publish(call, event)
                    yield event
        else:
            while "end" not in (event := await asyncio.to_thread(events.get)):
                yield event
            _raise_end(event)
    finally:
        group.close_stream(call)


class _EndOfStream:
    """Tells the other ranks how a stream ended, whatever ended it."""

    def __init__(self, group: RankCoordinator, call: str) -> None:
        self._group, self._call = group, call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = error is not None and not isinstance(error, GeneratorExit)
        self._group.publish(self._call, {"end": to_wire(error) if failed and error is not None else None})


async def _nothing(_: list[Json]) -> None:
    """The action of a call that only waits for all ranks."""


def _raise_end(event: Json) -> None:
    if event["end"] is not None:
        raise from_wire(event["end"])
