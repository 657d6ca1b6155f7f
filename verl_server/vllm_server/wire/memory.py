"""Release and resume of memory, with SGLang's tags. On a CPU through methods of the workers, else by vLLM's sleep."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from urllib.parse import urlencode

from verl_server.adapter.memory_tags import tags_to_release, tags_to_resume
from verl_server.adapter.vllm.endpoints import SLEEP, WAKE_UP, WORKER_CALL
from verl_server.adapter.vllm.payloads import memory_payload
from verl_server.config import MemoryTag
from verl_server.errors import ServerBusyError, ServerError, UnsupportedError, VerlServerError
from verl_server.types import Json
from verl_server.vllm_server.wire.control import pause_vllm, reset_cache
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import ServerState

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
        if MemoryTag.WEIGHTS in tags:  # also if the release fails: a part of the workers may have released them
            state.undefined_weights = "their memory was released"
        try:
            await (_call_workers(calls, "release", tags) if is_cpu() else _sleep(calls))
        except VerlServerError:
            with contextlib.suppress(VerlServerError):
                await reset_cache(calls)  # blocks of the KV cache may be empty
            raise
        state.released |= set(tags)
    return {}


async def resume(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Take the memory of `tags` back. Generation stays paused until it is continued."""
    async with state.exclusive(calls.gone):
        tags = tags_to_resume(body.get("tags"), state.released)
        if is_cpu():
            await _call_workers(calls, "resume", tags)
        else:
            await calls.call(WAKE_UP, query=urlencode([("tags", tag) for tag in tags if tag in _WORKER_TAGS]))
        if MemoryTag.KV_CACHE in tags:
            await reset_cache(calls)  # the memory has come back empty
        state.released -= set(tags)
    return {}


def is_cpu() -> bool:
    """Whether the server computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def _call_workers(calls: InnerCalls, method: str, tags: Collection[str]) -> None:
    """Raises ServerError with the report of the first worker that has failed."""
    in_workers = [tag for tag in tags if tag in _WORKER_TAGS]
    if not in_workers:
        return
    reports = (await calls.call(WORKER_CALL, memory_payload(method, in_workers)))["results"]
    for report in reports:
        if not report["ok"]:
            raise ServerError(f"the {method} of {in_workers} failed on rank {report['rank']}: {report['error']}")


async def _sleep(calls: InnerCalls) -> None:
    """vLLM's sleep, level 2: the weights are discarded. Its level 1 would keep them in host memory."""
    await calls.call(SLEEP, query="level=2&mode=keep")
