"""Start one vLLM server under supervision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.adapter.vllm.endpoints import HEALTH, MODELS
from verl_server.adapter.vllm.server_arguments import SECRET_ARGUMENTS, complete_server_args
from verl_server.config import AdapterConfig
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.launch import LaunchedServer, launch_server
from verl_server.server.supervisor import AbortCheck, never_abort

#: The log phrases are those of uvicorn, ZeroMQ and Python's sockets. vLLM's processes are called `VLLM::EngineCore` and
#: `VLLM::Worker` (with several workers, `VLLM::Worker_TP0` and so on).
VLLM = EngineProfile(
    name="vLLM",
    main_module="verl_server.vllm_server.server_main",
    forked_module="verl_server.vllm_server.forked_server",
    secret_arguments=SECRET_ARGUMENTS,
    ready_paths=(HEALTH.path,),
    worker_node_ready_paths=(HEALTH.path,),
    authenticated_path=MODELS.path,
    port_taken_phrases=("address already in use", "errno 98"),
    worker_prefix="VLLM::",
    distribution="vllm",
    modules={"vllm": "vllm>=0.32", "orjson": "orjson", "xxhash": "xxhash"},
)


def launch_vllm_server(
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    check_abort: AbortCheck = never_abort,
) -> LaunchedServer:
    """Complete `server_args` (see `server_arguments.py`), start a vLLM server and wait until it is ready.

    vLLM and SGLang cannot be installed together, so `config.server_python` is the interpreter of an environment with
    vLLM (`make setup-vllm`). Raises the errors of `verl_server.server.launch.launch_server`, and BadInputError for
    invalid `server_args`.
    """
    return launch_server(complete_server_args(server_args), VLLM, config, env, check_abort)
