"""Options of the `verl-server` command, SGLang's arguments of `verl-server launch`, and the keys in the environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_server.errors import BadInputError
from verl_server.server.argument_check import find_early_refusal
from verl_server.server.server_main import REFUSAL

API_KEY, ADMIN_API_KEY = "VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY"
REPLICA_API_KEY = "VERL_SERVER_REPLICA_API_KEY"

LOOPBACK = "127.0.0.1"
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the Hugging Face Hub.")]
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Folder or Hub name of a model to check as well.")
]
Host = Annotated[
    str, typer.Option(help="Address to listen on. With 0.0.0.0 other machines can reach the server.", metavar="ADDRESS")
]
ServerPort = Annotated[
    int | None, typer.Option(help="Port to listen on. Default: a free port.", min=1, max=65535, metavar="PORT")
]
RouterPort = Annotated[
    int, typer.Option(help="Port to listen on. 0 chooses a free port.", min=0, max=65535, metavar="PORT")
]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, metavar="N", help="Number of tensor parallel ranks of the server.")
]
LogDir = Annotated[Path | None, typer.Option(help="Folder in which to keep the server's log.", metavar="FOLDER")]
Replicas = Annotated[
    list[str] | None, typer.Option(help="URL of a running server. Repeat the option for each server.", metavar="URL")
]
DemoOutput = Annotated[Path, typer.Option(help="Folder for reward.png, metrics.json and the logs.", metavar="FOLDER")]
Dtype = Annotated[str, typer.Option(help="The --dtype with which the server will be started.", metavar="DTYPE")]

#: SGLang's alternative names of its arguments. The server takes the field names of `ServerArgs` only.
ALIASES = {
    "model": "model_path",
    "ep": "ep_size",
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "expert_parallel_size": "ep_size",
    "nccl_init_addr": "dist_init_addr",
    "enable_hicache": "enable_hierarchical_cache",
    "speculative_draft_model": "speculative_draft_model_path",
}
#: Arguments that SGLang expects as JSON text: they are not parsed here.
JSON_TEXT_ARGUMENTS = {
    "json_model_override_args",
    "model_loader_extra_config",
    "hicache_storage_backend_extra_config",
    "kv_events_config",
    "deepep_config",
    "hisparse_config",
}
#: Arguments of SGLang that this command has under another name.
RENAMED_ARGUMENTS = {"model_path": "the first argument, MODEL", "tp_size": "--tp", "tp": "--tp"}
#: Arguments of SGLang that hold keys, and the environment variables with which this command sets them.
KEY_ARGUMENTS = {"api_key": API_KEY, "admin_api_key": ADMIN_API_KEY}
NEGATIVE_NUMBER = re.compile(r"-[0-9.]")


def parse_server_args(args: list[str]) -> dict[str, Any]:
    """Read SGLang's arguments from a command line: MODEL first, then options.

    `--name value` and `--name=value` are parsed as JSON if they are JSON, otherwise taken as text. `--name` alone is
    True, `--no-name` is False, and several values make a list. Raises BadInputError for an argument that cannot be
    read. Keys are refused too, because other users of the machine can read a command line.
    """
    model, *rest = args
    _check_model(model)
    values: dict[str, list[Any]] = {}
    name = ""
    for argument in rest:
        if argument.startswith("--"):
            option, has_value, value = argument[2:].partition("=")
            name = _field_of(option)
            values[name] = [_parse_value(name, value)] if has_value else []
        elif not name or (argument.startswith("-") and not NEGATIVE_NUMBER.match(argument)):
            raise BadInputError(
                f"{argument!r} does not follow an option; write SGLang's arguments as --name value, "
                "for example --mem-fraction-static 0.5"
            )
        else:
            values[name].append(_parse_value(name, argument))
    server_args: dict[str, Any] = {"model_path": model}
    for name, items in values.items():
        if not items and name.startswith("no_"):
            server_args[name.removeprefix("no_")] = False
        else:
            server_args[name] = items if len(items) > 1 else (items[0] if items else True)
    return server_args


def require_known_arguments(server_args: Mapping[str, Any], own_options: Mapping[str, str] | None = None) -> None:
    """Raise BadInputError for names that SGLang does not have and for values that are none of its choices.

    `own_options`: names of the command's own options, and how each is written. They are suggested for misspelled names.
    """
    keys = {name: f"the environment variable {variable}" for name, variable in KEY_ARGUMENTS.items()}
    refusal = find_early_refusal(server_args, {**RENAMED_ARGUMENTS, **keys, **(own_options or {})})
    if refusal is not None:
        raise BadInputError(f"{REFUSAL}{refusal}")


def _check_model(model: str) -> None:
    """Raises BadInputError when `model` is neither a folder nor a possible name on the Hugging Face Hub."""
    if model.startswith("-"):
        raise BadInputError(f"MODEL must come before the options: verl-server launch MODEL {model} ...")
    is_hub_name = model.count("/") <= 1 and not model.startswith(("/", ".", "~"))
    is_remote_url = "://" in model  # SGLang reads object stores, for example s3://
    if not is_hub_name and not is_remote_url and not Path(model).expanduser().is_dir():
        raise BadInputError(
            f"MODEL {model} is not a folder; pass the folder that holds config.json and the weights, "
            "or a name on the Hugging Face Hub such as Qwen/Qwen3-0.6B"
        )


def _field_of(option: str) -> str:
    """The field of SGLang's `ServerArgs` that `--option` sets. Raises BadInputError for options that are refused."""
    name = option.replace("-", "_")
    name = ALIASES.get(name, name)
    if name in KEY_ARGUMENTS:
        raise BadInputError(
            f"--{option} is not accepted, because all users of this machine can read a command line; "
            f"put the key into the environment variable {KEY_ARGUMENTS[name]}"
        )
    if name in RENAMED_ARGUMENTS:
        raise BadInputError(f"--{option} is not an option of this command; use {RENAMED_ARGUMENTS[name]}")
    return name


def _parse_value(name: str, text: str) -> Any:
    if name in JSON_TEXT_ARGUMENTS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def missing_keys(variables: Sequence[str], *, shown: bool) -> list[str]:
    """The environment variables without a key; a random key will be generated for each of them.

    Raises BadInputError when keys are missing and `shown` is False, because then no user would see the random keys.
    """
    missing = [name for name in variables if not os.environ.get(name)]
    if missing and not shown:
        raise BadInputError(
            f"set {' and '.join(missing)}: random keys are printed on a terminal only, and the standard output is not "
            "a terminal, so no client would know the keys. For example: "
            + " ".join(f"export {name}=$(openssl rand -hex 32);" for name in missing)
        )
    return missing


def take_key(variable: str) -> str:
    """Remove the key from the environment, so that child processes do not inherit it, and return it.

    Without a key in the environment the result is a random key.
    """
    return os.environ.pop(variable, "") or secrets.token_urlsafe(32)
