"""The arguments of an SGLang server (the fields of SGLang's `ServerArgs`): validation and the values that we add."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from verl_server.adapter.model_files import (
    ModelFacts,
    check_lora_paths,
    find_model_file,
    parse_lora_paths,
    read_model_config,
)
from verl_server.adapter.server_engine import (
    SECRET_ARGUMENTS,
    ServerEngine,
    require_common_args,
    require_free_port,
    require_loadable_model,
    with_address_and_keys,
    with_checked_numbers,
)
from verl_server.adapter.sglang.replies import HEALTH, MODEL_INFO, PING, READY
from verl_server.config import AdapterConfig, MemoryTag
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.server.environment import EngineProfile
from verl_server.server.launch import LaunchedServer, launch_server
from verl_server.server.process import AbortCheck, never_abort
from verl_server.types import Json
from verl_server.validation import to_plain

#: Lowest and highest supported version. `verl-server doctor` warns about other versions, which may work too.
SUPPORTED_VERSIONS = ("0.5.15", "0.5.23")
#: The version that CI runs all tests with. The differences of the other supported versions are probed.
TESTED_VERSION = "0.5.23"

# -- Tensor parallel --------------------------------------------------------------------------------
# Which numbers of tensor parallel ranks divide a model in SGLang.


def tp_choices(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[int]:
    """The nearest lower and the nearest higher number of ranks that divide the model. One rank always does."""
    fitting = [n for n in range(1, max(facts.heads, 1) + 1) if not indivisible_sizes(facts, n, on_cpu=on_cpu)]
    lower, higher = [n for n in fitting if n < tp], [n for n in fitting if n > tp]
    return lower[-1:] + higher[:1]


def indivisible_sizes(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    """The sizes of the model that `tp` ranks cannot divide.

    On our platform for CPUs, SGLang pads a model (`configs/update_config.py`). This works for the intermediate size.
    For attention heads it fails when the weights are loaded, also for KV heads, which a GPU would replicate.
    """
    indivisible = _indivisible_heads(facts, tp, on_cpu=on_cpu)
    if not on_cpu:
        sizes = {
            "intermediate elements": facts.intermediate,
            "intermediate elements of an expert": facts.moe_intermediate,
        }
        indivisible += [f"{count} {name}" for name, count in sizes.items() if count % tp]
    return indivisible


def _indivisible_heads(facts: ModelFacts, tp: int, *, on_cpu: bool) -> list[str]:
    indivisible = [f"{facts.heads} attention heads"] if facts.heads % tp else []
    if facts.kv_heads and not facts.latent and facts.kv_heads % tp and (on_cpu or tp % facts.kv_heads):
        reason = "a CPU does not replicate them" if on_cpu else "and cannot replicate them evenly"
        indivisible.append(f"{facts.kv_heads} KV heads ({reason})")
    return indivisible


# -- Server arguments -------------------------------------------------------------------------------

#: Import path of the weight loader that runs inside the server (`weights/loader.py`). It is both an element of the
#: server argument `custom_weight_loader` and the `load_format` of our weight updates.
WEIGHT_LOADER = "verl_server.weights.loader.load"
#: Server arguments that name a file or a folder which the server reads. Some of them can also be a name on a hub.
READ_PATHS = (
    "model_path", "tokenizer_path", "speculative_draft_model_path", "uno_lora_path", "chat_template",
    "completion_template", "lmcache_config_file", "flexkv_config_file", "quantization_param_path", "pdmux_config_path",
    "decrypted_config_file", "decrypted_draft_config_file", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
    "speculative_ngram_external_corpus_path", "debug_tensor_dump_input_file", "kt_weight_path",
)  # fmt: skip
#: Server arguments that name a folder which the server writes to.
WRITTEN_FOLDERS = (
    "download_dir", "crash_dump_folder", "debug_tensor_dump_output_folder", "export_metrics_to_file_dir",
    "file_storage_path", "modelopt_checkpoint_save_path", "modelopt_export_path",
)  # fmt: skip
#: Server arguments with which a server does not answer `/generate` by itself, and their default values.
OTHER_ROLES = {
    "disaggregation_mode": (None, "", "null"), "encoder_only": (None, False), "smg_grpc_mode": (None, False),
    "grpc_mode": (None, False),
}  # fmt: skip
#: Server arguments that place a server on GPUs, and their default values.
GPU_PLACEMENT = {"base_gpu_id": (None, 0), "gpu_id_step": (None, 1)}
#: Label of the checkpoint's weights. SGLang's own default is "default", which is no number.
FIRST_WEIGHT_VERSION = "0"


def complete_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a validated copy of `server_args` with the values that this library always sets.

    Missing values are filled in: the loopback host, two random keys and weight version "0". Our weight loader is
    appended to `custom_weight_loader`. Names must be fields of SGLang's `ServerArgs`; command-line short forms such
    as `tp` are not translated. Raises BadInputError.
    """
    args = with_address_and_keys(validate_server_args(server_args))
    version = args.get("weight_version")
    args["weight_version"] = FIRST_WEIGHT_VERSION if version is None else str(version)
    loaders = args.get("custom_weight_loader") or []
    loaders = [loaders] if isinstance(loaders, str) else list(loaders)
    args["custom_weight_loader"] = loaders if WEIGHT_LOADER in loaders else [*loaders, WEIGHT_LOADER]
    return args


def add_fleet_defaults(server_args: Mapping[str, Any], has_sglang_router: bool) -> Json:
    """`server_args` with the values that suit servers behind a router of this library.

    With `incremental_streaming_output`, a stream sends each token once. Otherwise each event repeats all tokens so far.
    An `sglang-router` passes streams to its callers as they are, so they keep SGLang's default. All supported versions
    have the argument: it is set for servers of another environment, too.
    """
    return dict(server_args) if has_sglang_router else {"incremental_streaming_output": True, **server_args}


def validate_fleet_args(server_args: Mapping[str, Any]) -> Json:
    """`validate_server_args` for the replicas of a fleet, which chooses the port and the GPUs of each replica."""
    require_free_port(server_args)
    if server_args.get("preferred_sampling_params"):
        raise BadInputError(
            "preferred_sampling_params is refused: the server adds these parameters to each request, but the router of "
            "a fleet continues requests on other servers and does not know these parameters. Leave the argument out, "
            "and pass sampling_params with each request",
            argument="preferred_sampling_params",
        )
    args = validate_server_args(server_args)
    for name, defaults in GPU_PLACEMENT.items():
        if args.get(name) not in defaults:
            raise BadInputError(
                f"a fleet places its replicas itself: leave {name}={args[name]!r} out. Choose GPUs with "
                "env={'CUDA_VISIBLE_DEVICES': ...}; with RayLauncher, Ray chooses them",
                argument=name,
            )
    return args


def validate_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a copy of `server_args` that can travel to the server process as JSON.

    Paths, numbers of numpy and torch dtypes are converted, and paths are made absolute (`with_absolute_paths`). Raises
    BadInputError for what no server can have (`require_common_args`), and for a LoRA adapter on this machine that
    SGLang would serve wrongly. Raises UnsupportedError for a server that cannot generate by itself
    (`require_generating_server`). SGLang's own parser checks the rest when the server starts.
    """
    args = with_checked_numbers(with_absolute_paths(to_plain(server_args)))
    require_generating_server(args)
    require_common_args(args)
    check_lora_paths(args.get("lora_paths"))
    return args


def with_absolute_paths(server_args: Mapping[str, Any]) -> Json:
    """A copy of `server_args` whose paths do not depend on the working folder, because the server has another one.

    A path that the server reads is made absolute when it exists on this machine: it can be a name on a hub, the name of
    a template, or a path on another machine. A LoRA adapter keeps its name.
    """
    args = dict(server_args)
    for name in args.keys() & set(READ_PATHS):
        args[name] = _absolute_path(args[name], os.path.isfile if name.endswith("_template") else os.path.exists)
    for name in args.keys() & set(WRITTEN_FOLDERS):
        args[name] = _absolute_path(args[name], bool)
    if (lora_paths := args.get("lora_paths")) is not None:
        items = parse_lora_paths(lora_paths)
        args["lora_paths"] = [{**item, "lora_path": _absolute_path(item.get("lora_path"))} for item in items]
    return args


def _absolute_path(path: Any, is_path: Callable[[str], bool] = os.path.exists) -> Any:
    """`path` as an absolute path if it is a string of which `is_path` is true, otherwise unchanged.

    `~` is the home of the user.
    """
    if not isinstance(path, str) or os.path.isabs(path):
        return path
    expanded = os.path.expanduser(path)
    return str(Path(expanded).absolute()) if is_path(expanded) else path


def require_generating_server(server_args: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for arguments with which a server does not answer `/generate` over HTTP by itself."""
    for name, defaults in OTHER_ROLES.items():
        if server_args.get(name) not in defaults:
            raise UnsupportedError(
                f"{name}={server_args[name]!r} starts a server that does not generate over HTTP by itself, which "
                f"VerlEngine, RolloutManager and the adapters need: leave {name} out",
                argument=name,
            )


def require_memory_saver(server_args: Mapping[str, Any]) -> None:
    """Raise BadInputError when a server with these resolved arguments cannot release its memory.

    On an accelerator SGLang needs `enable_memory_saver`: without it, a release reports success and frees nothing. On a
    CPU our platform plugin releases the memory.
    """
    if server_args.get("device") != "cpu" and not server_args.get("enable_memory_saver"):
        raise BadInputError(
            "the server was started without enable_memory_saver, so it cannot release its memory; nothing was "
            "released. Start the server with enable_memory_saver=True",
            argument="enable_memory_saver",
        )


def loses_weights(released: Collection[str], server_args: Mapping[str, Any]) -> bool:
    """Whether a server with these resolved arguments loses its weights when it releases the memory tags `released`."""
    return MemoryTag.WEIGHTS in released and not server_args.get("enable_weights_cpu_backup")


def require_lora(server_args: Mapping[str, Any]) -> None:
    """Raise BadInputError when a server with these resolved arguments cannot load LoRA adapters."""
    if not server_args.get("enable_lora"):
        raise BadInputError(
            "the server was started without enable_lora, so it cannot load or unload LoRA adapters; nothing was sent. "
            "Start the server with enable_lora=True, max_lora_rank and lora_target_modules",
            argument="enable_lora",
        )


# -- Pushable ---------------------------------------------------------------------------------------
# Servers whose weights cannot be replaced by pushed tensors. They are refused by name before anything starts.

QUANTIZATION_FILES = ("hf_quant_config.json", "quant_model_description.json")
"""Files with which ModelOpt and ModelSlim describe a quantized checkpoint outside of its `config.json`."""
EXTERNAL_KV_STORES = (
    "hicache_storage_backend", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker",
)  # fmt: skip
"""Arguments that keep the KV cache outside of the server's process, where `flush_cache` does not remove it."""
PACKED_EXPERTS = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")
"""Values of `moe_runner_backend` whose kernels read the experts' weights in another order than the checkpoint's."""
INTERLEAVED_EXPERTS = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
"""Variable with which each end of an update session changes the order of the rows of experts, written or not."""


def require_pushable(server_args: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
    """Raise UnsupportedError if a server with these SGLang arguments cannot take pushed weights.

    `env`: the environment variables that are added for the server to those of this process. None: of a server that runs
    already, whose environment is not known.

    Each rule is a fact of SGLang 0.5.23. The second stages of a pipeline and the copies of data parallelism do not
    answer an update. A draft model for speculative decoding is passed the same update as the served model. A quantized
    model keeps scales that belong to its earlier weights. An external KV store keeps the KV cache of earlier weights.
    The scheduler of a server with a weight cache ends at the first update. Encoders of other servers are not updated.
    """
    if (reason := _reason(server_args, {} if env is None else os.environ | dict(env))) is not None:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with {reason}. Without weight updates, start such a server with "
            "HttpServerEngineAdapter.launch, or as replicas of a RolloutManager with mode='colocated'"
        )


def require_unpacked_experts(resolved_args: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a server without update sessions whose kernels need packed weights of experts.

    SGLang 0.5.15 packs the weights after it has read the checkpoint, and not after an update: the server would compute
    with weights in the wrong order. Later versions pack them again at the end of an update session. `resolved_args`:
    the arguments of a running server with the values that SGLang has chosen.
    """
    if (backend := resolved_args.get("moe_runner_backend")) in PACKED_EXPERTS:
        raise UnsupportedError(
            f"weights cannot be pushed into a server with moe_runner_backend={backend!r} of an SGLang without "
            f"/begin_weight_update: use 'triton', or SGLang {TESTED_VERSION}"
        )


def _reason(server_args: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    """What makes pushed weights impossible, and what to use instead. None: nothing."""
    get, unquantized = server_args.get, "serve an unquantized checkpoint, for example bfloat16"
    store = "its external store keeps the KV cache of earlier weights: leave it out"
    has_copies = (get("dp_size") or 1) > 1 and not get("enable_dp_attention")
    refused = (
        ("pp_size", (get("pp_size") or 1) > 1, "use tp_size instead of pipeline stages"),
        ("dp_size", has_copies, "use that many replicas instead of data parallel copies, or enable_dp_attention"),
        (
            "speculative_algorithm",
            str(get("speculative_algorithm") or "NGRAM").upper() != "NGRAM",
            "it has a draft model: leave it out, or use 'NGRAM'",
        ),
        ("weight_cache_mode", (get("weight_cache_mode") or "off") != "off", "servers share its weights: leave it out"),
        ("language_only", bool(get("language_only")), "other servers encode its images: leave it out"),
        *((name, bool(get(name)), store) for name in EXTERNAL_KV_STORES),
        ("radix_cache_backend", str(get("radix_cache_backend")).lower() in ("flexkv", "lmcache"), store),
        *(
            (name, get(name) not in (None, "", "unquant"), "serve the model without quantization")
            for name in ("quantization", "torchao_config", "modelopt_quant")
        ),
        ("load_format", get("load_format") in ("bitsandbytes", "gguf"), f"a quantized checkpoint: {unquantized}"),
        ("model_path", str(get("model_path")).endswith(".gguf"), f"a quantized checkpoint: {unquantized}"),
    )
    for name, is_refused, cure in refused:
        if is_refused:
            return f"{name}={server_args[name]!r}: {cure}"
    if env.get(INTERLEAVED_EXPERTS, "").lower() in ("1", "true", "yes", "y"):
        return f"the environment variable {INTERLEAVED_EXPERTS}={env[INTERLEAVED_EXPERTS]}: remove it"
    model_path = str(get("model_path") or "")
    config = {**(read_model_config(model_path) if model_path else {}), **_config_overrides(server_args)}
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"a quantized checkpoint (quant_method {method!r}): {unquantized}"
    for name in QUANTIZATION_FILES if model_path else ():
        if find_model_file(model_path, name) is not None:
            return f"a quantized checkpoint (it has the file {name}): {unquantized}"
    return None


def _config_overrides(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """What `json_model_override_args` changes in the model's `config.json`. SGLang reports invalid JSON."""
    overrides = server_args.get("json_model_override_args")
    try:
        overrides = json.loads(overrides) if isinstance(overrides, str) else overrides
    except ValueError:
        return {}
    return dict(overrides) if isinstance(overrides, Mapping) else {}


# -- Launch -----------------------------------------------------------------------------------------
# Start one SGLang server under supervision, and SGLang as a `ServerEngine`.

#: SGLang's main node answers `/ready` with 200 only while it accepts requests (0.5.15 has no `/ready`, but `/health`).
#: Nodes after the first serve only `/ping` and `/health`. The log phrases are those of uvicorn, ZeroMQ and SGLang.
SGLANG = EngineProfile(
    name="SGLang",
    main_module="verl_server.server.server_main",
    forked_module="verl_server.cpu.sglang_server",
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
    require_loadable_model(args)
    return launch_server(args, SGLANG, config, env, check_abort)


def _place_on_devices(
    server_args: Mapping[str, Any], env: Mapping[str, str], first: int, count: int
) -> tuple[Json, Mapping[str, str]]:
    return {**server_args, "base_gpu_id": first}, env


SGLANG_ENGINE = ServerEngine(
    launch=launch_sglang_server,
    with_common_names=dict,
    validate_server_args=validate_server_args,
    validate_fleet_args=validate_fleet_args,
    add_fleet_defaults=add_fleet_defaults,
    require_pushable=require_pushable,
    place_on_devices=_place_on_devices,
)
