"""Pause, continue and flush of the cache, with SGLang's meaning."""

from __future__ import annotations

import contextlib

from verl_server.adapter.sglang.payloads import pause_payload
from verl_server.adapter.vllm.endpoints import ABORT_ALL, PAUSE, RESET_ENCODER_CACHE, RESET_PREFIX_CACHE, RESUME
from verl_server.adapter.vllm.payloads import pause_query
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, ServerBusyError, ServerError, VerlServerError
from verl_server.types import Json
from verl_server.vllm_server.wire.abort import end_requests
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import ServerState


async def pause(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Pause generation. Requests that arrive from now on wait here, running ones do what the mode says."""
    mode = pause_payload(body.get("mode", "abort"))["mode"]
    async with state.exclusive(calls.gone):
        running = [request for request in state.requests() if not request.is_held]
        await pause_vllm(state, calls, mode)
        state.is_paused_by_update = False
        if mode == PauseMode.ABORT:  # vLLM's pause has ended only those that its engine had got
            await end_requests(state, calls, running)
    return {"status": "ok", "message": f"generation is paused, mode {mode}"}


async def pause_vllm(state: ServerState, calls: InnerCalls, mode: str) -> None:
    """Pause vLLM, after new requests wait here. The caller is in `state.exclusive`.

    Raises the error of vLLM; new requests wait then until a continue, if vLLM does not continue.
    """
    was_paused = state.is_paused
    state.set_paused(True)
    try:
        await calls.call(PAUSE, query=pause_query(mode))
    except VerlServerError:
        if not was_paused:  # vLLM may have paused
            with contextlib.suppress(VerlServerError):
                await resume_vllm(state, calls)
        raise


async def resume(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Continue generation. Raises ServerBusyError while memory is released.

    While the weights are undefined, the requests that were held end as aborted, and new requests are refused.
    """
    async with state.exclusive(calls.gone):
        if state.released:
            raise ServerBusyError(f"the memory of {sorted(state.released)} is released: resume it first")
        if state.undefined_weights is not None:  # requests that vLLM holds would go on with these weights
            await calls.call(ABORT_ALL, {})
        await resume_vllm(state, calls)
    return {"status": "ok", "message": "generation continues"}


async def resume_vllm(state: ServerState, calls: InnerCalls) -> None:
    """Continue vLLM, then let the waiting requests in. The caller is in `state.exclusive`."""
    await calls.call(RESUME)
    state.set_paused(False)


async def flush(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Empty the caches. Raises BadInputError, as SGLang does, while requests run that are not paused."""
    async with state.exclusive(calls.gone):
        if state.num_in_vllm and not state.is_paused:
            raise BadInputError(f"{state.num_in_vllm} requests are running")
        await reset_cache(calls)
    return {"success": True, "message": "the cache is empty"}


async def reset_cache(calls: InnerCalls, *, keeps_prefixes: bool = False) -> None:
    """Empty vLLM's caches that depend on weights: prefixes, and the outputs of encoders for images and sounds.

    Requests that vLLM holds are computed again. With `keeps_prefixes` they go on, and only the images that they have
    not read yet are encoded again. vLLM's cache of processed images stays: it has pixels. Raises ServerError if vLLM
    cannot do it.
    """
    await calls.call(RESET_ENCODER_CACHE)
    if (
        not keeps_prefixes
        and not (await calls.call(RESET_PREFIX_CACHE, query="reset_running_requests=true"))["success"]
    ):
        raise ServerError("vLLM has not emptied its prefix cache, because blocks of it are in use")
