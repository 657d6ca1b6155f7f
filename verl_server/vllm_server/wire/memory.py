"""Release and resume of memory, with SGLang's tags, by methods of the workers (`worker_extension.py`).

vLLM's own routes for its sleep would continue generation at the end, and mix up the replies of several workers when one
of them has too little memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from verl_server.adapter.memory_tags import tags_to_release, tags_to_resume
from verl_server.adapter.vllm.payloads import memory_payload
from verl_server.config import MemoryTag
from verl_server.errors import ServerBusyError, UnsupportedError, VerlServerError
from verl_server.types import Json
from verl_server.vllm_server.wire.control import pause_vllm, reset_cache
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import ServerState
from verl_server.vllm_server.wire.worker_calls import call_all

#: Tags for which a worker has memory. vLLM frees its CUDA graphs with neither of its sleep levels.
_WORKER_TAGS = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)


async def release(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Release the memory of `tags`. Generation is paused. Raises ServerBusyError while requests run or are held."""
    async with state.exclusive(calls.gone):
        tags = tags_to_release(body.get("tags"), state.released)
        if not is_cpu() and not set(_WORKER_TAGS) <= set(tags):
            raise UnsupportedError("on an accelerator, vLLM releases weights and kv_cache only together")
        if state.num_in_vllm:
            raise ServerBusyError(f"{state.num_in_vllm} requests are running")
        if not state.is_paused:
            await pause_vllm(state, calls, "retract")
        # Also if the release fails, because a part of the workers may have released their memory.
        if MemoryTag.WEIGHTS in tags:
            state.undefined_weights = "their memory was released"
        state.released |= set(tags)
        try:
            await _call_workers(state, calls, "release", tags)
        except VerlServerError:
            with contextlib.suppress(VerlServerError):
                await reset_cache(calls)  # blocks of the KV cache may be empty
            raise
    return {}


async def resume(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Take the memory of `tags` back. Generation stays paused until it is continued."""
    async with state.exclusive(calls.gone):
        tags = tags_to_resume(body.get("tags"), state.released)
        await _call_workers(state, calls, "resume", tags)
        if MemoryTag.KV_CACHE in tags:
            await reset_cache(calls)  # the memory has come back empty
        state.released -= set(tags)
    return {}


def is_cpu() -> bool:
    """Whether the server computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def _call_workers(state: ServerState, calls: InnerCalls, method: str, tags: Collection[str]) -> None:
    """Raises ServerError with the report of the first worker that has failed."""
    if in_workers := [tag for tag in tags if tag in _WORKER_TAGS]:
        body = memory_payload(method, in_workers)
        await call_all(state, calls, body["method"], *body["args"])
