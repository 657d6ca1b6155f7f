"""What the server says about itself, with the names of SGLang's routes."""

from __future__ import annotations

import asyncio

from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm.endpoints import GENERATE, HEALTH, SERVER_INFO, WEIGHT_INFO
from verl_server.adapter.vllm.payloads import generate_payload
from verl_server.errors import NotReadyError, ServerError
from verl_server.platforms.http_hooks import RELEASED_MEMORY
from verl_server.platforms.parameter_dtypes import PARAMETER_DTYPES
from verl_server.types import Json
from verl_server.vllm_server.wire.inner_calls import InnerCalls
from verl_server.vllm_server.wire.memory import is_cpu
from verl_server.vllm_server.wire.state import ServerState
from verl_server.vllm_server.wire.worker_calls import call_workers

HEALTH_TIMEOUT_S = 20.0
"""Seconds in which a healthy server generates one token. SGLang has the same deadline."""


async def ready(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 while the server accepts requests. Raises NotReadyError while generation is paused."""
    await calls.call(HEALTH)
    if state.is_paused:
        raise NotReadyError("generation is paused")
    return {"status": "ready"}


async def ping(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 when the HTTP loop answers."""
    return {"status": "ok"}


async def health(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """200 when the server generates one token. Raises NotReadyError when it does not.

    While generation is paused, only vLLM's own answer is asked, which does not compute.
    """
    await calls.call(HEALTH)
    if state.fault is not None:
        raise NotReadyError(state.fault)
    if not state.may_generate():
        return {"status": "healthy"}
    async with calls.ended_together() as together:
        probe = generate_payload([1], {"max_new_tokens": 1, "temperature": 0.0})
        generation = asyncio.create_task(together.call(GENERATE, probe))
        done, _ = await asyncio.wait([generation], timeout=HEALTH_TIMEOUT_S)
    error = generation.exception() if done else None
    if not state.may_generate():
        generation.add_done_callback(lambda task: task.exception())
        return {"status": "healthy"}  # vLLM has held the token for a pause that began meanwhile
    if not done or error is not None:
        generation.add_done_callback(lambda task: task.exception())
        raise NotReadyError(f"the engine does not generate: {error or f'no token came in {HEALTH_TIMEOUT_S:g} s'}")
    return {"status": "healthy"}


async def model_info(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Model, tokenizer and version of the weights, which vLLM's engine keeps."""
    version = (await calls.call(WEIGHT_INFO))["weight_version"]
    args = state.facts.server_args
    return {
        "model_path": args["model"],
        "tokenizer_path": args.get("tokenizer") or args["model"],
        "is_generation": True,
        "weight_version": version,
    }


async def server_info(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """The arguments of the server by SGLang's names, with the values that vLLM has chosen.

    The workers are asked, too: their answer is a sign of life, and tells which memory is released.
    """
    args = state.facts.server_args
    reports = await call_workers(state, calls, "verl_server_memory")
    if state.resolved is None:
        state.resolved = await _resolve(calls)
    on_cpu, resolved = is_cpu(), state.resolved
    max_running = resolved["max_running_requests"]
    return {
        **resolved,
        "engine_kind": "vllm",
        "model_path": args["model"],
        "tokenizer_path": args.get("tokenizer") or args["model"],
        "trust_remote_code": bool(args.get("trust_remote_code")),
        "revision": args.get("revision"),
        "tp_size": len(reports),
        "dp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0,
        "device": "cpu" if on_cpu else "cuda",
        "custom_weight_loader": [WEIGHT_LOADER],
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "enable_memory_saver": on_cpu or bool(args.get("enable_memory_saver") or args.get("enable_sleep_mode")),
        "quantization": args.get("quantization"),
        "load_format": args.get("load_format"),
        "enable_lora": bool(args.get("enable_lora")),
        "fused_modules": reports[0]["fused_modules"],
        "resident_bytes": [report["rss_bytes"] for report in reports],
        "internal_states": [
            {
                RELEASED_MEMORY: sorted(state.released),
                "effective_max_running_requests_per_dp": max_running,
                PARAMETER_DTYPES: reports[0][PARAMETER_DTYPES],
            }
        ],
    }  # fmt: skip


async def _resolve(calls: InnerCalls) -> Json:
    """The values that vLLM has chosen. A prompt as long as the context is the shortest that is refused."""
    config = (await calls.call(SERVER_INFO, query="config_format=json"))["vllm_config"]
    try:
        max_model_len = int(config["model_config"]["max_model_len"])
        return {
            "context_length": max_model_len,
            "max_req_input_len": max_model_len,
            "dtype": str(config["model_config"]["dtype"]).removeprefix("torch."),
            "max_running_requests": int(config["scheduler_config"]["max_num_seqs"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"vLLM's /server_info has an unknown form: {type(error).__name__}: {error}") from error


async def loads(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Running and waiting requests. Counted here: vLLM's gauges stand still during a pause."""
    load = {"dp_rank": 0, "num_running_reqs": state.num_in_vllm, "num_waiting_reqs": state.num_held}
    return {"loads": [load]}


async def admin_status(state: ServerState, calls: InnerCalls, body: Json) -> Json:
    """Nothing: the route tells whether the admin key is right."""
    return {}
