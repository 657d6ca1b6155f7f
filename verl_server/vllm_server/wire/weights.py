"""Updates of weights: the routes that a trainer calls, and vLLM's calls that they become."""

from __future__ import annotations

import json
from typing import Any

from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm.endpoints import (
    FINISH_UPDATE,
    SET_WEIGHT_VERSION,
    START_UPDATE,
    UPDATE_WEIGHTS,
)
from verl_server.adapter.vllm.payloads import update_payload, weight_version_payload
from verl_server.errors import BadInputError, ServerBusyError
from verl_server.types import Json, parse_weight_version
from verl_server.vllm_server.wire.abort import abort_request
from verl_server.vllm_server.wire.control import pause_vllm, reset_cache, resume_vllm
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import ServerState
from verl_server.vllm_server.wire.worker_calls import call_all, call_workers
from verl_server.weights.transports.message import parse_message


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
        return parse_message(payloads[0])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise BadInputError(f"the payload is not a message of VerlEngine: {error}") from error


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
