"""Start one SGLang server under supervision, and SGLang as a `ServerEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.adapter.server_engine import ServerEngine
from verl_server.adapter.sglang import pushable, server_arguments, tensor_parallel
from verl_server.adapter.sglang.capabilities import SUPPORTED_VERSIONS
from verl_server.adapter.sglang.endpoints import HEALTH, MODEL_INFO, PING, READY
from verl_server.adapter.sglang.server_arguments import SECRET_ARGUMENTS, complete_server_args
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.launch import LaunchedServer, launch_server
from verl_server.server.supervisor import AbortCheck, never_abort
from verl_server.types import Json

#: SGLang's main node answers `/ready` with 200 only while it accepts requests (0.5.15 has no `/ready`, but `/health`).
#: Nodes after the first serve only `/ping` and `/health`. The log phrases are those of uvicorn, ZeroMQ and SGLang.
SGLANG = EngineProfile(
    name="SGLang",
    main_module="verl_server.server.server_main",
    forked_module="verl_server.server.forkserver.sglang_server",
    secret_arguments=SECRET_ARGUMENTS,
    ready_paths=(READY.path, HEALTH.path),
    worker_node_ready_paths=(PING.path, HEALTH.path),
    authenticated_path=MODEL_INFO.path,
    port_taken_phrases=("address already in use", "port is already in use", "is not available", "errno 98"),
    worker_prefix="sglang::",
    installation="run `pip install 'verl-server[sglang]'`",
    wrong_environment="if it is an environment for vLLM, pass engine_kind='vllm' (VERL_SERVER_ENGINE, --engine)",
    distribution="sglang",
    modules={"sglang": "sglang>={},<={}".format(*SUPPORTED_VERSIONS), "xxhash": "xxhash"},
)


def launch_sglang_server(
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    check_abort: AbortCheck = never_abort,
) -> LaunchedServer:
    """Complete `server_args` (fields of SGLang's `ServerArgs`), start a server and wait until it is ready.

    By default the server's watchdog allows a pause of two updates.

    Raises the errors of `verl_server.server.launch.launch_server`, and BadInputError for invalid `server_args`.
    """
    args = complete_server_args(server_args)
    # SGLang's watchdog takes a request that is paused in place for one that hangs. Its default is 300 s.
    args.setdefault("watchdog_timeout", max(300.0, 2 * config.timeouts.weights_s))
    if (args.get("nnodes") or 1) > 1 and not args.get("dist_init_addr"):
        raise BadInputError(
            f"nnodes={args['nnodes']} needs dist_init_addr (host:port of the first node, the same on all nodes) and "
            "node_rank; without them, the nodes of a server do not find each other. Leave nnodes out for one machine",
            argument="dist_init_addr",
        )
    return launch_server(args, SGLANG, config, env, check_abort)


def _place_on_devices(
    server_args: Mapping[str, Any], env: Mapping[str, str], first: int, count: int
) -> tuple[Json, Mapping[str, str]]:
    return {**server_args, "base_gpu_id": first}, env


SGLANG_ENGINE = ServerEngine(
    launch=launch_sglang_server,
    with_common_names=dict,
    validate_server_args=server_arguments.validate_server_args,
    validate_fleet_args=server_arguments.validate_fleet_args,
    add_fleet_defaults=server_arguments.add_fleet_defaults,
    require_pushable=pushable.require_pushable,
    require_divisible_model=tensor_parallel.require_divisible_model,
    place_on_devices=_place_on_devices,
)
