"""The arguments of a vLLM server: names that users of this library know, and the names of vLLM's command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_server.adapter.model_files import read_model_config
from verl_server.adapter.server_engine import (
    SECRET_ARGUMENTS,
    ServerEngine,
    require_common_args,
    require_free_port,
    require_loadable_model,
    with_address_and_keys,
    with_checked_numbers,
)
from verl_server.adapter.sglang.replies import MODEL_INFO, READY
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.adapter.vllm.requests import round_rank
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.server.environment import VISIBLE_DEVICES, EngineProfile, parse_devices
from verl_server.server.launch import LaunchedServer, launch_server
from verl_server.server.process import AbortCheck, never_abort
from verl_server.types import Json
from verl_server.validation import to_plain

#: SGLang's names of arguments that both engines have, and vLLM's names of the same arguments.
PLAIN_NAMES: Mapping[str, str] = {
    "model_path": "model", "tokenizer_path": "tokenizer", "tp_size": "tensor_parallel_size",
    "context_length": "max_model_len", "max_running_requests": "max_num_seqs", "random_seed": "seed",
    "max_loras_per_batch": "max_loras", "max_loaded_loras": "max_cpu_loras",
    "mem_fraction_static": "gpu_memory_utilization", "max_prefill_tokens": "max_num_batched_tokens",
}  # fmt: skip
_COMMON_NAMES: Mapping[str, str] = {theirs: ours for ours, theirs in PLAIN_NAMES.items()}
#: Options of vLLM's command line (0.32.0) that are passed on, by the names of `vllm serve` with underscores. All others
#: are refused: they do not fit one supervised server, open files to requests, or were not tried with pushed weights,
#: for example a cache outside the server, or experts that move between ranks.
VLLM_OPTIONS = frozenset({
    "model", "tokenizer", "tensor_parallel_size", "max_model_len", "max_num_seqs", "seed", "gpu_memory_utilization",
    "max_num_batched_tokens", "served_model_name", "dtype", "revision", "tokenizer_mode", "trust_remote_code",
    "load_format", "quantization", "kv_cache_dtype", "block_size", "enforce_eager", "enable_prefix_caching",
    "enable_chunked_prefill", "scheduling_policy", "hf_overrides", "hf_config_path", "max_logprobs",
    "enable_sleep_mode", "structured_outputs_config", "compilation_config", "generation_config",
    "override_generation_config", "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype",
    "lora_target_modules", "fully_sharded_loras",
    "attention_backend", "disable_custom_all_reduce", "download_dir", "limit_mm_per_prompt", "model_impl",
    "disable_log_stats", "enable_log_requests", "max_log_len", "chat_template", "skip_tokenizer_init",
})  # fmt: skip
#: Arguments of ours: address, keys, version of the weights, arguments of SGLang that become other options of vLLM
#: (`vllm_plugin/start.py`), and settings of the CPU backend that vLLM takes as environment variables.
OWN_ARGUMENTS = frozenset({
    "enable_memory_saver", "max_total_tokens", "log_level", "host", "port", "weight_version", *SECRET_ARGUMENTS,
    "cpu_kv_cache_gib", "cpu_omp_threads_bind",
})  # fmt: skip
ONE_ONLY = ("dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size", "nnodes")
"""Numbers that may be given if they are 1."""


def complete_server_args(server_args: Mapping[str, Any]) -> Json:
    """A validated copy of `server_args` with vLLM's names, a loopback host and two random keys.

    Names are those of SGLang where both engines have the argument (`PLAIN_NAMES`), else those of vLLM.
    """
    args = with_address_and_keys(_rename(validate_server_args(server_args), PLAIN_NAMES))
    args.pop("lora_target_modules", None)  # vLLM names fused modules there, and takes all modules by default
    if args.get("max_lora_rank") is not None:
        args["max_lora_rank"] = round_rank(args["max_lora_rank"])
    return args


def validate_server_args(server_args: Mapping[str, Any]) -> Json:
    """A copy of `server_args` that can travel as JSON, with SGLang's names where both engines have the argument.

    The path of the model is made absolute, and arguments of None are left out. Raises BadInputError for a name that is
    refused, for an argument that is given twice, and for what no server can have (`require_common_args`). vLLM's own
    parser refuses wrong values when the server starts.
    """
    args = with_checked_numbers(_rename(to_plain(server_args), _COMMON_NAMES))
    require_common_args(args)
    if os.path.exists(path := os.path.expanduser(args["model_path"])):  # else its name on a hub
        args["model_path"] = str(Path(path).absolute())
    return args


def validate_fleet_args(server_args: Mapping[str, Any]) -> Json:
    """`validate_server_args` for the replicas of a fleet, which chooses the port of each replica."""
    require_free_port(server_args)
    return validate_server_args(server_args)


def with_common_names(server_args: Mapping[str, Any]) -> Json:
    """A copy with SGLang's names where both engines have the argument. An argument that is given twice is kept."""
    names = {theirs: ours for theirs, ours in _COMMON_NAMES.items() if ours not in server_args}
    return {names.get(name, name): value for name, value in server_args.items()}


def require_pushable(server_args: Mapping[str, Any], _env: Mapping[str, str] | None = None) -> None:
    """Raise UnsupportedError if a server with these arguments cannot take pushed weights: a quantized model."""
    if (quantization := server_args.get("quantization")) is not None:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with quantization={quantization!r}: serve the model without it",
            argument="quantization",
        )
    config = read_model_config(str(server_args["model_path"]))
    if config.get("quantization_config") or config.get("compression_config"):
        raise UnsupportedError(
            "weights cannot be pushed into a server of a quantized checkpoint: serve an unquantized checkpoint"
        )


def _rename(server_args: Json, names: Mapping[str, str]) -> Json:
    """The arguments by other names. Raises BadInputError for refused and repeated names."""
    args: Json = {}
    known = {*PLAIN_NAMES, *VLLM_OPTIONS, *OWN_ARGUMENTS}
    for name, value in server_args.items():
        if value is None or (name in ONE_ONLY and value == 1):
            continue
        if name not in known:
            raise BadInputError(
                f"vLLM servers of this library do not take the argument {name!r}: docs/vllm-reference.md lists what "
                "they take",
                argument=name,
            )
        renamed = names.get(name, name)
        if renamed in args:
            raise BadInputError(f"{name!r} and {renamed!r} are the same argument; pass one of them", argument=name)
        args[renamed] = value
    return args


# -- Launch -----------------------------------------------------------------------------------------
# Start one vLLM server under supervision, and vLLM as a `ServerEngine`.

#: The log phrases are those of uvicorn, ZeroMQ and Python's sockets. vLLM's processes are called `VLLM::EngineCore` and
#: `VLLM::Worker` (with several workers, `VLLM::Worker_TP0` and so on).
VLLM = EngineProfile(
    name="vLLM",
    main_module="verl_server.vllm_plugin.server_main",
    forked_module="verl_server.cpu.vllm_fork",
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
    completed = complete_server_args(server_args)
    require_loadable_model(with_common_names(completed))
    server = launch_server(completed, VLLM, config, env, check_abort)
    args = {"tp_size": 1, **with_common_names(server.server_args), "custom_weight_loader": [WEIGHT_LOADER]}
    return replace(server, server_args=args)


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
    with_common_names=with_common_names,
    validate_server_args=validate_server_args,
    validate_fleet_args=validate_fleet_args,
    add_fleet_defaults=_add_fleet_defaults,
    require_pushable=require_pushable,
    place_on_devices=_place_on_devices,
)
