"""The arguments of an SGLang server (the fields of SGLang's `ServerArgs`): validation and the values that we add."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError
from verl_server.types import Json

#: Import path of the weight loader that runs inside the server (`weights/loader.py`). It is both an element of the
#: server argument `custom_weight_loader` and the `load_format` of our weight updates.
WEIGHT_LOADER = "verl_server.weights.loader.load"
#: Server arguments that hold keys.
SECRET_ARGUMENTS = ("api_key", "admin_api_key")
DEFAULT_HOST = "127.0.0.1"
#: Label of the checkpoint's weights. SGLang's own default is "default", which is no number.
FIRST_WEIGHT_VERSION = "0"


def complete_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a validated copy of `server_args` with the values that this library always sets.

    Missing values are filled in: the loopback host, two random keys and weight version "0". Our weight loader is
    appended to `custom_weight_loader`. Names must be fields of SGLang's `ServerArgs`; command-line short forms such
    as `tp` are not translated. Raises BadInputError.
    """
    args = validate_server_args(server_args)
    args["host"] = args.get("host") or DEFAULT_HOST
    for name in SECRET_ARGUMENTS:
        args[name] = args.get(name) or secrets.token_urlsafe(32)
    version = args.get("weight_version")
    args["weight_version"] = FIRST_WEIGHT_VERSION if version is None else str(version)
    loaders = args.get("custom_weight_loader") or []
    loaders = [loaders] if isinstance(loaders, str) else list(loaders)
    args["custom_weight_loader"] = loaders if WEIGHT_LOADER in loaders else [*loaders, WEIGHT_LOADER]
    return args


def validate_server_args(server_args: Mapping[str, Any]) -> Json:
    """Return a copy of `server_args` that can travel to the server process as JSON.

    Raises BadInputError for a value that is not plain JSON and for a model path that does not exist.
    """
    args = {**server_args, "model_path": _validate_model_path(server_args.get("model_path"))}
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise BadInputError(
                f"server argument {name!r} must be a plain JSON value to travel to the server process, "
                f"got {type(value).__name__}: {error}",
                argument=name,
            ) from error
    return args


def _validate_model_path(model_path: Any) -> str:
    """Raise BadInputError when `model_path` cannot name a model, before a process is started.

    A relative name without `./` may be the name of a model on a hub and is accepted.
    """
    if not isinstance(model_path, (str, os.PathLike)) or not str(model_path):
        raise BadInputError(f"model_path must be a folder or the name of a model on a hub, got {model_path!r}")
    path = str(model_path)
    if path.startswith(("/", "./", "../", "~")) and not Path(path).exists():
        raise BadInputError(f"model_path does not exist: {path}")
    return path
