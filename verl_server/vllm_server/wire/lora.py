"""LoRA adapters: they arrive as a safetensors file in the request, and vLLM reads them from a folder of the server.

vLLM can read an adapter again when it has dropped it from memory, so the folder stays until the adapter is unloaded.
The path of the folder is new for each load: vLLM's prefix cache tells adapters of one name apart by it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verl_server.adapter.vllm.endpoints import LOAD_LORA, UNLOAD_LORA
from verl_server.errors import BadInputError, ServerBusyError, ServerError, UnsupportedError, VerlServerError
from verl_server.types import Json
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.state import RunningRequest, ServerState
from verl_server.vllm_server.wire.worker_calls import call_workers

POLL_S, UNLOAD_TIMEOUT_S = 0.05, 600.0


async def load(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Load an adapter. The reply tells a refusal of vLLM with `success: false`, as SGLang's does."""
    name, tensors = _parse(state, body)
    folder = Path(tempfile.mkdtemp(prefix="verl-server-lora-"))  # in the server's folder, which its warden removes
    try:
        await asyncio.to_thread(_write, folder, body["config_dict"], tensors)
        await _load(state, calls, name, folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (VerlServerError, OSError)):
            return {"success": False, "error_message": str(error)}
        raise
    state.lora_folders[name] = folder
    return {"success": True}


async def _load(state: ServerState, calls: InnerCalls, name: str, folder: Path) -> None:
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
