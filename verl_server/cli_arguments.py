"""What `verl-server launch` makes of its command line and of the keys in the environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError

API_KEY, ADMIN_API_KEY = "VERL_SERVER_API_KEY", "VERL_SERVER_ADMIN_API_KEY"
REPLICA_API_KEY = "VERL_SERVER_REPLICA_API_KEY"
#: SGLang's other names for its arguments; the server takes the field names only.
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
#: Arguments that SGLang takes as JSON text and parses itself.
TEXT_ARGUMENTS = {
    "json_model_override_args",
    "model_loader_extra_config",
    "hicache_storage_backend_extra_config",
    "kv_events_config",
    "deepep_config",
    "hisparse_config",
}
#: Arguments with a name of their own here.
NAMED_OTHERWISE = {"model_path": "MODEL, the first argument", "tp_size": "--tp", "tp": "--tp"}
NUMBER = re.compile(r"-[0-9.]")


def parse_server_args(args: list[str]) -> dict[str, Any]:
    """SGLang's arguments from the command line: MODEL first, then options.

    `--name value` and `--name=value` are read as JSON where they are JSON, else as text; `--name` alone
    is True, `--no-name` False, several values make a list. Raises BadInputError, for keys too: other
    users of the machine can read a command line.
    """
    model, *rest = args
    if model.startswith("-"):
        raise BadInputError(f"MODEL comes first: verl-server launch MODEL {model} ...")
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise BadInputError(f"MODEL {model} is not a folder")
    values: dict[str, list[Any]] = {}
    name = ""
    for word in rest:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            name = _field_of(option)
            values[name] = [_value(name, value)] if equals else []
        elif not name or (word.startswith("-") and not NUMBER.match(word)):
            raise BadInputError(f"{word!r} belongs to no argument; write server arguments as --name value")
        else:
            values[name].append(_value(name, word))
    found: dict[str, Any] = {"model_path": model}
    for name, items in values.items():
        if not items and name.startswith("no_"):
            found[name.removeprefix("no_")] = False
        else:
            found[name] = items if len(items) > 1 else (items[0] if items else True)
    return found


def _field_of(option: str) -> str:
    name = option.replace("-", "_")
    name = ALIASES.get(name, name)
    if name in ("api_key", "admin_api_key"):
        variable = API_KEY if name == "api_key" else ADMIN_API_KEY
        raise BadInputError(
            f"--{option} is refused: everybody on this machine can read a command line. "
            f"Put the key into the environment variable {variable}."
        )
    if name in NAMED_OTHERWISE:
        raise BadInputError(f"--{option} is written as {NAMED_OTHERWISE[name]} here")
    return name


def _value(name: str, text: str) -> Any:
    if name in TEXT_ARGUMENTS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def missing_keys(wanted: Sequence[str], *, shown: bool) -> list[str]:
    """Variables without a key, so that one is to be made. Raises BadInputError unless it will be `shown`."""
    missing = [name for name in wanted if not os.environ.get(name)]
    if missing and not shown:
        raise BadInputError(
            f"set {' and '.join(missing)}: without them random keys are made, and keys are shown on a terminal "
            "only, so nobody could call this server. For example: "
            + " ".join(f"export {name}=$(openssl rand -hex 32);" for name in missing)
        )
    return missing


def take_key(variable: str) -> str:
    """The key from the environment, which the server's processes then do not inherit; or a random one."""
    return os.environ.pop(variable, "") or secrets.token_urlsafe(32)
