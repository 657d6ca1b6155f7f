"""The arguments of an SGLang server (the fields of SGLang's `ServerArgs`): validation and the values that we add."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from verl_server.adapter.lora_config import check_lora_paths
from verl_server.adapter.sglang.tensor_parallel import require_divisible_model
from verl_server.config import MemoryTag
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.server.warden.log_file import MIN_SECRET_CHARACTERS
from verl_server.types import Json
from verl_server.validation import (
    is_finite_number,
    is_list,
    require_key,
    require_model_path,
    require_whole_number,
    to_plain,
)

#: Import path of the weight loader that runs inside the server (`weights/loader.py`). It is both an element of the
#: server argument `custom_weight_loader` and the `load_format` of our weight updates.
WEIGHT_LOADER = "verl_server.weights.loader.load"
#: Server arguments that hold keys.
SECRET_ARGUMENTS = ("api_key", "admin_api_key")
DEFAULT_HOST = "127.0.0.1"
MAX_PORT = 65535
#: Smallest values of server arguments. SGLang does not check them: its server fails later with another error.
WHOLE_NUMBERS = {
    "tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "nnodes": 1, "node_rank": 0, "base_gpu_id": 0,
    "gpu_id_step": 1,
    "context_length": 1, "max_total_tokens": 1, "max_running_requests": 1, "max_prefill_tokens": 1, "page_size": 1,
    "max_lora_rank": 1, "max_loras_per_batch": 1, "port": 0,
}  # fmt: skip
#: How a text is read for each number that is checked before the server starts, as SGLang's own parser reads it.
NUMBER_TYPES: dict[str, type] = {**dict.fromkeys(WHOLE_NUMBERS, int), "mem_fraction_static": float}
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
#: Arguments for which SGLang's parser reads a number with a unit, for example 32k.
NUMBERS_WITH_UNIT = ("context_length", "max_total_tokens", "max_prefill_tokens")


def complete_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a validated copy of `server_args` with the values that this library always sets.

    Missing values are filled in: the loopback host, two random keys and weight version "0". Our weight loader is
    appended to `custom_weight_loader`. Names must be fields of SGLang's `ServerArgs`; command-line short forms such
    as `tp` are not translated. Raises BadInputError.
    """
    args = validate_launch_args(server_args)
    args["host"] = args.get("host") or DEFAULT_HOST
    for name in SECRET_ARGUMENTS:
        args[name] = require_key(name, args.get(name) or secrets.token_urlsafe(32))
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
    if server_args.get("port") is not None:
        raise BadInputError(
            "each replica chooses a free port: leave port out, and read the URLs from the `replicas` of the fleet",
            argument="port",
        )
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


def validate_launch_args(server_args: Mapping[str, Any]) -> Json:
    """`validate_server_args` for a server that will be started. Also refuses a `tp_size` that the model cannot have."""
    args = validate_server_args(server_args)
    require_divisible_model(args)
    return args


def validate_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a copy of `server_args` that can travel to the server process as JSON.

    Paths, numbers of numpy and torch dtypes are converted, and paths are made absolute (`with_absolute_paths`). Raises
    BadInputError for another value that is not plain JSON, a model path that does not exist, a short key, a
    number that no server can have, and a LoRA adapter on this machine that SGLang would serve wrongly. Raises
    UnsupportedError for a server that cannot generate by itself (`require_generating_server`).
    """
    args = with_absolute_paths(to_plain(server_args))
    require_generating_server(args)
    args["model_path"] = _validate_model_path(require_model_path(args))
    for name in SECRET_ARGUMENTS:
        _validate_key(name, args.get(name))
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"server argument {name!r} must be a plain JSON value to travel to the server process, "
                f"got {type(value).__name__}: {error}. If {name!r} is not meant for SGLang, check the spelling",
                argument=name,
            ) from error
    _validate_numbers(args)
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
    lora_paths = args.get("lora_paths")
    if isinstance(lora_paths, str):  # `--lora-paths a=/x` is a list with one item, as on SGLang's own command line
        lora_paths = [lora_paths]
    if isinstance(lora_paths, Mapping):
        args["lora_paths"] = {name: _absolute_path(path) for name, path in lora_paths.items()}
    elif is_list(lora_paths):
        args["lora_paths"] = [_absolute_lora_path(item) for item in lora_paths]
    return args


def _absolute_path(path: Any, is_path: Callable[[str], bool] = os.path.exists) -> Any:
    """`path` as an absolute path if it is a string of which `is_path` is true, otherwise unchanged.

    `~` is the home of the user.
    """
    if not isinstance(path, str) or os.path.isabs(path):
        return path
    expanded = os.path.expanduser(path)
    return str(Path(expanded).absolute()) if is_path(expanded) else path


def _absolute_lora_path(item: Any) -> Any:
    """One item of a list of `lora_paths`: `path`, `name=path`, a dict or the JSON text of a dict.

    A path without a name is its own name.
    """
    if isinstance(item, str) and item.startswith("{"):
        with contextlib.suppress(ValueError):  # SGLang's parser refuses it, as it refuses a dict with other names
            item = parsed if "lora_path" in (parsed := json.loads(item)) else item
    if isinstance(item, Mapping):
        return {**item, "lora_path": _absolute_path(item.get("lora_path"))}
    name, _, path = str(item).partition("=")
    absolute = _absolute_path(path or name)
    return item if absolute == (path or name) else f"{name}={absolute}"


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


def _validate_key(name: str, key: Any) -> None:
    """Raise BadInputError for a key that the log of the server cannot hide. None and "" ask for a random key."""
    if key in (None, ""):
        return
    if not isinstance(key, str) or len(key) < MIN_SECRET_CHARACTERS:
        got = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        raise BadInputError(
            f"{name} must be a string of at least {MIN_SECRET_CHARACTERS} characters, got {got}. Leave it out for a "
            "random key",
            argument=name,
        )


def _validate_numbers(args: Mapping[str, Any]) -> None:
    for name, minimum in WHOLE_NUMBERS.items():
        value = args.get(name)
        if value is not None and not (isinstance(value, str) and name in NUMBERS_WITH_UNIT):
            require_whole_number(f"server argument {name}", value, minimum)
    if (args.get("port") or 0) > MAX_PORT:
        raise BadInputError(f"server argument port must be at most {MAX_PORT}, got {args['port']}")
    fraction = args.get("mem_fraction_static")
    if fraction is not None and not (is_finite_number(fraction) and 0 < fraction < 1):
        raise BadInputError(f"server argument mem_fraction_static must be a number between 0 and 1, got {fraction!r}")


def _validate_model_path(model_path: str) -> str:
    """Raise BadInputError when a folder does not exist, before a process is started.

    A relative name without `./` may be the name of a model on a hub and is accepted.
    """
    if model_path.startswith(("/", "./", "../", "~")) and not Path(model_path).exists():
        raise BadInputError(f"model_path does not exist: {model_path}")
    return model_path
