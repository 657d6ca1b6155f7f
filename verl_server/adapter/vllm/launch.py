"""Start one vLLM server under supervision, and vLLM as a `ServerEngine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_server.adapter.server_engine import ServerEngine
from verl_server.adapter.sglang.endpoints import MODEL_INFO, READY
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm import server_arguments
from verl_server.adapter.vllm.server_arguments import PLAIN_NAMES, SECRET_ARGUMENTS, complete_server_args
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.launch import LaunchedServer, launch_server
from verl_server.server.supervisor import AbortCheck, never_abort
from verl_server.server.visible_devices import VISIBLE_DEVICES, parse_devices
from verl_server.types import Json

#: The log phrases are those of uvicorn, ZeroMQ and Python's sockets. vLLM's processes are called `VLLM::EngineCore` and
#: `VLLM::Worker` (with several workers, `VLLM::Worker_TP0` and so on).
VLLM = EngineProfile(
    name="vLLM",
    main_module="verl_server.vllm_server.server_main",
    forked_module="verl_server.vllm_server.forked_server",
    secret_arguments=SECRET_ARGUMENTS,
    ready_paths=(READY.path,),
    worker_node_ready_paths=(READY.path,),
    authenticated_path=MODEL_INFO.path,
    port_taken_phrases=("address already in use", "errno 98"),
    worker_prefix="VLLM::",
    installation="make an environment for vLLM, which cannot share one with SGLang (`make setup-vllm`, docs/vllm.md)",
    wrong_environment="on a machine without an accelerator, `make setup-vllm` makes one with vLLM's build for CPUs",
    distribution="vllm",
    modules={"vllm": "vllm>=0.32", "orjson": "orjson", "xxhash": "xxhash"},
)


NO_SGLANG_ROUTER = "an sglang-router cannot serve vLLM servers: leave router_ip and router_port out"


def launch_vllm_server(
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    check_abort: AbortCheck = never_abort,
) -> LaunchedServer:
    """Complete `server_args` (see `server_arguments.py`), start a vLLM server and wait until it is ready.

    vLLM and SGLang cannot be installed together, so `config.server_python` is the interpreter of an environment with
    vLLM (`make setup-vllm`). Raises the errors of `verl_server.server.launch.launch_server`, and BadInputError for
    invalid `server_args`. The `server_args` of the result have SGLang's names where both engines have the argument.
    """
    if config.router_ip is not None:
        raise BadInputError(NO_SGLANG_ROUTER)
    server_arguments.require_divisible_model(server_arguments.validate_server_args(server_args))
    server = launch_server(complete_server_args(server_args), VLLM, config, env, check_abort)
    names = {theirs: ours for ours, theirs in PLAIN_NAMES.items()}
    args = {names.get(name, name): value for name, value in server.server_args.items()}
    return replace(server, server_args={"tp_size": 1, **args, "custom_weight_loader": [WEIGHT_LOADER]})


def _add_fleet_defaults(server_args: Mapping[str, Any], has_sglang_router: bool) -> Json:
    """vLLM's servers always send each token of a stream once, which an `sglang-router` does not expect."""
    if has_sglang_router:
        raise BadInputError(NO_SGLANG_ROUTER)
    return dict(server_args)


def _place_on_devices(
    server_args: Mapping[str, Any], env: Mapping[str, str], first: int, count: int
) -> tuple[Json, Mapping[str, str]]:
    """vLLM takes the first visible devices, so that only those of the server are visible."""
    setting = env.get(VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES))
    visible = None if setting is None else parse_devices(setting)
    chosen = [str(device) for device in range(first, first + count)] if visible is None else visible[first:][:count]
    return dict(server_args), {**env, VISIBLE_DEVICES: ",".join(chosen)}


VLLM_ENGINE = ServerEngine(
    launch=launch_vllm_server,
    with_common_names=server_arguments.with_common_names,
    validate_server_args=server_arguments.validate_server_args,
    validate_fleet_args=server_arguments.validate_fleet_args,
    add_fleet_defaults=_add_fleet_defaults,
    require_pushable=server_arguments.require_pushable,
    require_divisible_model=server_arguments.require_divisible_model,
    place_on_devices=_place_on_devices,
)
