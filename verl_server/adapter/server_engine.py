"""`ServerEngine`: what the rest of this library needs to know to start servers of one kind of inference engine.

A running server needs no such knowledge: the servers of both kinds answer the same HTTP routes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from verl_server.adapter.model_files import read_facts, read_model_config, require_complete_folder
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError
from verl_server.server.launch import LaunchedServer
from verl_server.server.process import AbortCheck
from verl_server.server.warden.warden import MIN_SECRET_CHARACTERS
from verl_server.types import Json
from verl_server.validation import checked_value, require_key, require_model_path

ServerArgs = Mapping[str, Any]
#: Server arguments that hold keys.
SECRET_ARGUMENTS = ("api_key", "admin_api_key")
DEFAULT_HOST = "127.0.0.1"
#: Values of `load_format` with which an engine reads the weights from the model's folder.
LOAD_FORMATS = (None, "auto", "safetensors")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerEngine:
    """One kind of inference engine. `server_args` have SGLang's names where both engines have the argument."""

    launch: Callable[[ServerArgs, AdapterConfig, Mapping[str, str], AbortCheck], LaunchedServer]
    """Starts a server and waits until it is ready. Raises the errors of `verl_server.server.launch.launch_server`."""
    with_common_names: Callable[[ServerArgs], Json]
    """Returns a copy with SGLang's names where both engines have the argument. Checks nothing."""
    validate_server_args: Callable[[ServerArgs], Json]
    """Returns a copy with absolute paths that can travel as JSON. Raises BadInputError for refused arguments."""
    validate_fleet_args: Callable[[ServerArgs], Json]
    """`validate_server_args` for the replicas of a fleet, which chooses ports and devices."""
    add_fleet_defaults: Callable[[ServerArgs, bool], Json]
    """Returns the arguments with the values that suit servers behind a router of this library. The second argument:
    whether the servers are also registered with an `sglang-router`."""
    require_pushable: Callable[[ServerArgs, Mapping[str, str]], None]
    """Raises UnsupportedError if a server with these arguments and added variables cannot take pushed weights."""
    place_on_devices: Callable[[ServerArgs, Mapping[str, str], int, int], tuple[Json, Mapping[str, str]]]
    """Returns arguments and environment variables of a server that uses a number of accelerators. The last arguments:
    index of its first one among the visible accelerators, and their number."""


# -- Server arguments -------------------------------------------------------------------------------
# What holds for the server arguments of both engines. All other values are checked by the engine's own parser.


_COUNT, _INDEX = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
#: Server arguments with which this library computes, so that the engine's parser does not see them as they were given.
COMPUTED: Mapping[str, Any] = {
    "tp_size": _COUNT, "pp_size": _COUNT, "dp_size": _COUNT, "ep_size": _COUNT, "nnodes": _COUNT, "node_rank": _INDEX,
    "base_gpu_id": _INDEX, "gpu_id_step": _COUNT, "port": Annotated[int, Field(ge=0, le=65535)],
    "max_lora_rank": _COUNT, "enable_memory_saver": bool,
}  # fmt: skip


#: Server arguments with which attention is divided by another number than `tp_size`, or by sizes that are not those of
#: the model's own `config.json`.
OTHER_DIVISIONS = (
    "enable_dp_attention", "attn_dp_size", "attn_cp_size", "dcp_size", "json_model_override_args", "revision",
)  # fmt: skip


def with_checked_numbers(args: ServerArgs) -> Json:
    """A copy with whole numbers for `COMPUTED`, also where they are texts. Raises BadInputError for other values."""
    checked = dict(args)
    for name in COMPUTED.keys() & args.keys():
        if isinstance(value := args[name], str):
            with contextlib.suppress(ValueError):
                value = int(value)  # as on the engine's command line
        if value is not None:
            checked[name] = checked_value(name, value, COMPUTED[name])
    return checked


def require_common_args(args: ServerArgs) -> None:
    """Raise BadInputError for arguments that no server of this library can have.

    They are: no model or a model folder that is missing, a key that the log of the server cannot hide, a value that
    cannot travel to the server process as JSON, and a `tp_size` that does not divide the model's attention heads. A
    relative model without `./` may be the name of a model on a hub.
    """
    model = require_model_path(args)
    if model.startswith(("/", "./", "../", "~")) and not Path(os.path.expanduser(model)).exists():
        raise BadInputError(f"model_path does not exist: {model}", argument="model_path")
    for name in SECRET_ARGUMENTS:
        if args.get(name) not in (None, ""):  # these ask for a random key
            require_key(name, args[name], MIN_SECRET_CHARACTERS)
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"server argument {name!r} must be a plain JSON value to travel to the server process, "
                f"got {type(value).__name__}: {error}. If {name!r} is not meant for the server, check the spelling",
                argument=name,
            ) from error
    _require_divisible_heads(os.path.expanduser(model), args)


def require_loadable_model(args: ServerArgs) -> None:
    """Raise BadInputError for a model folder on this machine that an engine with these arguments cannot load."""
    folder = Path(os.path.expanduser(require_model_path(args)))
    if not folder.is_dir():
        logger.info("%s is no folder of this machine, so the server looks for it at the model hub", folder)
    else:
        require_complete_folder(
            folder,
            weights=args.get("load_format") in LOAD_FORMATS,
            tokenizer=not args.get("skip_tokenizer_init") and args.get("tokenizer_path") is None,
        )


def _require_divisible_heads(model_path: str, args: ServerArgs) -> None:
    """Raise BadInputError if `tp_size` ranks cannot divide the attention heads: an engine ends after its imports then.

    Reads the model's `config.json`. A model whose configuration is not on this machine is not checked.
    """
    tp_size = args.get("tp_size") or 1
    if tp_size == 1 or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or any(map(args.get, OTHER_DIVISIONS)):
        return
    try:
        heads = read_facts(read_model_config(model_path)).heads
    except (OSError, ValueError, TypeError, AttributeError):
        return  # the engine reports what is wrong with the file
    if heads % tp_size:
        choices = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise BadInputError(
            f"tp_size={tp_size} cannot divide the {heads} attention heads of the model {model_path}; use one of "
            f"{choices}. VerlEngine sets tp_size to the number of its trainer ranks unless tp_size is given",
            argument="tp_size",
        )


def require_free_port(server_args: ServerArgs) -> None:
    """Raise BadInputError for a replica of a fleet with a port."""
    if server_args.get("port") is not None:
        raise BadInputError(
            "each replica chooses a free port: leave port out, and read the URLs from the `replicas` of the fleet",
            argument="port",
        )


def with_address_and_keys(args: ServerArgs) -> Json:
    """A copy with a loopback host and two random keys where none are given."""
    keys = {name: args.get(name) or secrets.token_urlsafe(32) for name in SECRET_ARGUMENTS}
    return {**args, "host": args.get("host") or DEFAULT_HOST, **keys}
