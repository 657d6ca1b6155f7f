"""Routes that change a vLLM server: pause, memory, weights, LoRA adapters, aborts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from verl_server.adapter.client import tags_to_release, tags_to_resume
from verl_server.adapter.sglang.requests import pause_payload
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm.requests import (
    ABORT,
    ABORT_ALL,
    FINISH_UPDATE,
    LOAD_LORA,
    PAUSE,
    RESET_ENCODER_CACHE,
    RESET_PREFIX_CACHE,
    RESUME,
    SET_WEIGHT_VERSION,
    START_UPDATE,
    UNLOAD_LORA,
    UPDATE_WEIGHTS,
    abort_payload,
    memory_payload,
    pause_query,
    update_payload,
    weight_version_payload,
)
from verl_server.config import MemoryTag, PauseMode
from verl_server.errors import BadInputError, ServerBusyError, ServerError, UnsupportedError, VerlServerError
from verl_server.types import Json, parse_weight_version
from verl_server.vllm_plugin.wire.state import InnerCalls, RunningRequest, ServerState, call_all, call_workers
from verl_server.weights.transports.base import parse_message

# -- Lora -------------------------------------------------------------------------------------------
# LoRA adapters: they arrive as a safetensors file in the request, and vLLM reads them from a folder of the server.
#
# vLLM can read an adapter again when it has dropped it from memory, so the folder stays until the adapter is unloaded.
# The path of the folder is new for each load: vLLM's prefix cache tells adapters of one name apart by it.

POLL_S, UNLOAD_TIMEOUT_S = 0.05, 600.0


async def load(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Load an adapter. The reply tells a refusal of vLLM with `success: false`, as SGLang's does."""
    name, tensors = _parse(state, body)
    folder = Path(tempfile.mkdtemp(prefix="verl-server-lora-"))  # in the server's folder, which its warden removes
    try:
        await asyncio.to_thread(_write, folder, body["config_dict"], tensors)
        await _load_adapter(state, calls, name, folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (VerlServerError, OSError)):
            return {"success": False, "error_message": str(error)}
        raise
    state.lora_folders[name] = folder
    return {"success": True}


async def _load_adapter(state: ServerState, calls: InnerCalls, name: str, folder: Path) -> None:
    """Let the workers try the adapter, then let vLLM load it. An error in vLLM's own load would mix up later replies.

    Raises ServerError for an adapter that the workers refuse.
    """
    async with state.exclusive(calls.gone):
        if "weights" in state.released:  # the memory of adapters is released with that of the weights
            raise ServerBusyError("the memory of the weights is released: resume it first")
        for report in await call_workers(state, calls, "verl_server_try_lora", str(folder)):
            if not report["ok"]:
                raise ServerError(report["error"].strip().splitlines()[-1])
        await calls.call(LOAD_LORA, {"lora_name": name, "lora_path": str(folder)})


async def unload(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Unload an adapter. New requests for it are refused at once; returns when its running requests have ended.

    During a pause, which holds them, it returns at once. The folder stays until the server ends if requests with the
    adapter are left: vLLM may read it again for them.
    """
    name = body.get("lora_name")
    try:
        await calls.call(UNLOAD_LORA, {"lora_name": name})
    except VerlServerError as error:
        return {"success": False, "error_message": error.message}
    users = [request for request in state.requests() if request.lora == name and not request.is_held]
    folder = state.lora_folders.pop(str(name), None)  # another adapter may get the name from now on
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNLOAD_TIMEOUT_S):
            while _are_running(state, users) and not state.is_paused and not calls.gone.is_set():
                await asyncio.sleep(POLL_S)
    if folder is not None and not _are_running(state, users):
        await asyncio.to_thread(shutil.rmtree, folder, True)
    return {"success": True}


def _are_running(state: ServerState, users: list[RunningRequest]) -> bool:
    """Whether one of these requests has not ended."""
    running = state.requests()
    return any(request is user for request in running for user in users)


def _parse(state: ServerState, body: Json) -> tuple[str, bytes]:
    """The name and the file of an adapter. Raises BadInputError for a body with another form."""
    if not state.facts.server_args.get("enable_lora"):
        raise UnsupportedError("the server was started without enable_lora")
    name, encoded, config = (body.get(field) for field in ("lora_name", "safetensors", "config_dict"))
    if not (isinstance(name, str) and name) or not isinstance(encoded, str) or not isinstance(config, dict):
        raise BadInputError("an adapter needs lora_name, config_dict, safetensors (base64) and sha256")
    try:
        tensors = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise BadInputError(f"the field safetensors is not base64: {error}") from error
    if hashlib.sha256(tensors).hexdigest() != body.get("sha256"):
        raise BadInputError("the tensors of the adapter do not have the SHA-256 sum of the request")
    return name, tensors


def _write(folder: Path, config: Any, tensors: bytes) -> None:
    """Write an adapter's files, as PEFT does."""
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(tensors)


# -- Abort ------------------------------------------------------------------------------------------
# `/abort_request`: SGLang aborts by the beginning of an id, vLLM by exact ids.

MAX_ATTEMPTS = 200
ATTEMPT_INTERVAL_S = 0.05
"""vLLM ignores the abort of a request that has not reached its engine yet, so the abort is sent again."""


async def abort_request(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Abort the generations whose id starts with `rid`, or all with `abort_all`, also those of other routes."""
    rid, abort_all = body.get("rid") or "", bool(body.get("abort_all"))
    if not isinstance(rid, str) or not (rid or abort_all):
        raise BadInputError("an abort needs a non-empty rid, or abort_all")
    if abort_all:
        await calls.call(ABORT_ALL, {})
    for request in (requests := state.requests("" if abort_all else rid)):
        request.aborted.set()
    await end_requests(state, calls, requests)
    return {}


async def end_requests(state: ServerState, calls: InnerCalls, requests: list[RunningRequest]) -> None:
    """Abort these generations in vLLM until they have ended. Those that wait for the end of a pause are left alone."""
    for _ in range(MAX_ATTEMPTS):
        running = {id(request): request for request in state.requests()}
        rids = [request.rid for request in requests if id(request) in running and not request.is_held]
        if not rids:
            break
        await calls.call(ABORT, abort_payload(rids))
        await asyncio.sleep(ATTEMPT_INTERVAL_S)


# -- Control ----------------------------------------------------------------------------------------


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


# -- Memory -----------------------------------------------------------------------------------------
# Release and resume of memory, with SGLang's tags, by methods of the workers (`weights.py`).
#
# vLLM's own routes for its sleep would continue generation at the end, and mix up the replies of several workers when
# one of them has too little memory.

#: Tags for which a worker has memory. vLLM frees its CUDA graphs with neither of its sleep levels.
_WORKER_TAGS = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)


async def release_memory(state: ServerState, calls: InnerCalls, body: Json) -> Json:
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


async def resume_memory(state: ServerState, calls: InnerCalls, body: Json) -> Json:
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


# -- Weights ----------------------------------------------------------------------------------------
# Updates of weights: the routes that a trainer calls, and vLLM's calls that they become.


async def begin(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Refuse an update that cannot succeed. Nothing has to be opened: an update is one call of `update`."""
    if lost := (await call_workers(state, calls, "verl_server_memory"))[0]["unloadable"]:
        raise BadInputError(
            f"vLLM cannot load new weights into this model: its class writes {len(lost)} tensors past the loaders of "
            f"its parameters, for example {lost[0]!r}, and vLLM's reload loses them. Nothing was changed. Serve "
            "the model with SGLang"
        )
    return {"success": True, "message": "an update can begin"}


async def end(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Nothing has to be closed."""
    return {"success": True, "message": "the update has ended"}


async def update(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Load the tensors of one update of this library's trainer, and set the version of the weights.

    The version is set when every worker has loaded the update. The trainer compares the checksums of all workers by
    itself; as with SGLang, the reply is a success also when a worker reports an error. Generation is paused meanwhile,
    and stays paused when the weights are torn: nothing is generated then until an update of all weights.
    """
    message = _message(body)
    if message.get("opens_only"):
        await call_all(state, calls, "verl_server_open", json.dumps(message))
        return {"success": True, "message": "each worker can open what the transport needs"}
    payload = update_payload(message)
    version = parse_weight_version(body["weight_version"]) if body.get("weight_version") is not None else None
    async with state.exclusive(calls.gone):
        if "weights" in state.released:
            raise ServerBusyError("the memory of the weights is released: resume it first")
        resumes = not state.is_paused or state.is_paused_by_update
        if not state.is_paused:
            await pause_vllm(state, calls, "retract")
            state.is_paused_by_update = True
        before = state.undefined_weights
        try:
            if any(report["was_open"] for report in await call_all(state, calls, "verl_server_close_update")):
                before = before or "another client has left an update open"
            state.undefined_weights = "an update has not come to its end"
            outcomes = await _load(state, calls, payload)
            has_failed = any(outcome["error"] is not None for outcome in outcomes)
            if has_failed and any(outcome["has_loaded"] for outcome in outcomes):
                state.undefined_weights = "an update has failed half-way"
            await reset_cache(calls, keeps_prefixes=not body.get("flush_cache", True))
            if version is not None and not has_failed:
                await _set_version(state, calls, version)
            if not has_failed:
                state.undefined_weights = None if all(outcome["is_whole"] for outcome in outcomes) else before
            elif not any(outcome["has_loaded"] for outcome in outcomes):
                state.undefined_weights = before
        finally:
            if resumes and state.undefined_weights is None:
                await resume_vllm(state, calls)
    return {"success": True, "message": "each worker has sent its report", "workers": outcomes}


async def _load(state: ServerState, calls: InnerCalls, payload: Json) -> list[Json]:
    """The calls of one update. Returns the outcome of each worker."""
    await calls.call(START_UPDATE)
    try:
        await calls.call(UPDATE_WEIGHTS, payload)
    finally:
        await calls.call(FINISH_UPDATE, {})
    return await call_workers(state, calls, "verl_server_update_outcome")


def _message(body: Json) -> Json:
    """The message of the trainer. Raises BadInputError for other tensors, which would have to be unpickled."""
    if body.get("load_format") != WEIGHT_LOADER:
        raise BadInputError(
            f"a vLLM server takes updates of VerlEngine only (load_format {WEIGHT_LOADER!r}), "
            f"got load_format {body.get('load_format')!r}"
        )
    payloads: Any = body.get("serialized_named_tensors")
    try:
        message = parse_message(payloads[0])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise BadInputError(f"the payload is not a message of VerlEngine: {error}") from error
    if missing := {"transport", "update_id", "verify"} - message.keys():
        raise BadInputError(f"the message of an update needs {sorted(missing)}")
    return message


async def set_version(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Set the version of the weights. `abort_all_requests`: abort all generations first."""
    version = parse_weight_version(body.get("new_version"))
    if body.get("abort_all_requests"):
        await abort_request(state, calls, {"abort_all": True})
    async with state.exclusive(calls.gone):
        await _set_version(state, calls, version)
    return {"success": True, "new_version": str(version)}


async def _set_version(state: ServerState, calls: InnerCalls, version: int) -> None:
    await calls.call(SET_WEIGHT_VERSION, weight_version_payload(version))
    state.weight_version = version
