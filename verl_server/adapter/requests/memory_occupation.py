"""Release and resume of a server's memory. The functions are methods of `AsyncHttpServerEngineAdapter`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_server.adapter.connection import ServerConnection
from verl_server.adapter.memory_tags import tags_to_release, tags_to_resume
from verl_server.adapter.sglang import endpoints
from verl_server.adapter.sglang.payloads import pause_payload
from verl_server.adapter.sglang.replies import count_requests
from verl_server.adapter.sglang.server_arguments import loses_weights, require_memory_saver
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, ServerBusyError, ServerError, VerlServerError

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

LOAD_TIMEOUT_S = 0.5
"""Seconds that a server has to publish that its last request has ended."""
LOAD_POLL_S = 0.02


async def release_memory_occupation(adapter: AsyncHttpServerEngineAdapter, tags: Sequence[str] | None = None) -> None:
    """Release memory of the server until `resume_memory_occupation`, which any client of the server can call.

    `tags` are values of `MemoryTag`; None releases all. Generation is paused first, so requests that other clients send
    meanwhile wait in the server. Released weights are undefined after the resume: they must be sent again.

    Raises ServerBusyError while requests run, because SGLang itself would end. Raises BadInputError for unknown tags,
    for tags that are released already, and for a server on an accelerator without `enable_memory_saver`.
    """
    connection = adapter.connection
    await connection.update_released_memory()
    requested = tags_to_release(tags, connection.released_memory)
    server_args = await connection.get_resolved_args()
    require_memory_saver(server_args)
    await prepare_release(adapter)
    before, undefined_before = connection.released_memory, connection.weights_undefined
    connection.released_memory = before.union(requested)
    connection.weights_undefined = undefined_before or loses_weights(requested, server_args)
    try:
        await connection.call(endpoints.RELEASE_MEMORY, {"tags": requested})
    except (ServerError, BadInputError) as error:
        if "status" in error.details:  # The server has answered. An SGLang server has released nothing then.
            connection.released_memory, connection.weights_undefined = before, undefined_before
            with contextlib.suppress(VerlServerError):
                await connection.update_released_memory()  # a part of the workers of a vLLM server may have released it
                connection.weights_undefined |= loses_weights(connection.released_memory, server_args)
            await cancel_release(adapter)
        raise
    finally:
        connection.is_held = False  # if the answer was lost, another client may have continued generation since


async def update_released_memory(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Internal. Ask the server which memory is released. Another client may have released or resumed it."""
    await adapter.connection.update_released_memory()


async def prepare_release(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Internal. Pause generation for a release of memory: requests that arrive from now on wait in the server.

    Raises ServerBusyError while requests run; nothing is paused then. Does nothing while memory is released.
    """
    connection = adapter.connection
    if connection.released_memory or connection.is_held:
        return
    await _require_idle(connection)
    connection.needs_continue = True
    try:
        await connection.call(endpoints.PAUSE, pause_payload(PauseMode.RETRACT))
    except BaseException:  # the server may have paused: the answer was lost, or the caller was cancelled
        connection.is_held = True
        with contextlib.suppress(VerlServerError):
            await asyncio.shield(cancel_release(adapter))
        raise
    connection.is_held = True


async def cancel_release(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Internal. Undo `prepare_release`, unless memory was released since or `pause_generation` was called before."""
    connection = adapter.connection
    try:
        is_held = connection.is_held or connection.needs_continue  # the second: an earlier attempt has failed
        if is_held and not connection.released_memory and not connection.paused:
            await connection.call(endpoints.CONTINUE, {})
            connection.needs_continue = False
    finally:
        connection.is_held = False  # if the answer was lost, generation may continue: the next release pauses again


async def resume_memory_occupation(adapter: AsyncHttpServerEngineAdapter, tags: Sequence[str] | None = None) -> None:
    """Take released memory back. `tags` of None resumes all memory that is released, by whichever client.

    When nothing is released any more, the prefix cache is flushed and generation continues, unless this adapter has
    paused it with `pause_generation`. When that has failed, a call without `tags` tries it again. Raises BadInputError
    for tags that are not released.
    """
    connection = adapter.connection
    await connection.update_released_memory()
    if tags is not None or connection.released_memory or not connection.needs_continue:
        requested = tags_to_resume(tags, connection.released_memory)
        if loses_weights(requested, await connection.get_resolved_args()):
            connection.weights_undefined = True
        connection.needs_continue = True
        await connection.call(endpoints.RESUME_MEMORY, {"tags": requested})
        connection.released_memory = connection.released_memory.difference(requested)
    if not connection.released_memory:
        connection.is_held = False
        await connection.call(endpoints.FLUSH, {})
        if not connection.paused:
            await connection.call(endpoints.CONTINUE, {})
        connection.needs_continue = False


async def _require_idle(connection: ServerConnection) -> None:
    """Raise ServerBusyError while requests run.

    A scheduler publishes its load before a finished request leaves it, and again when it is idle. So a request that the
    load contains may have ended, and the load is read again until `LOAD_TIMEOUT_S`.
    """
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while num_requests := (connection.requests_in_flight or count_requests(await connection.call(endpoints.LOADS))):
        if not connection.requests_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(LOAD_POLL_S)
            continue
        raise ServerBusyError(
            f"{num_requests} requests run on {connection.base_url}: wait for them or abort them, then release",
            url=connection.base_url,
        )
