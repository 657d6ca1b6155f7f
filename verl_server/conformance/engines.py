"""The engines that the suite knows by name, and running servers by URL."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import RemoteServer
from verl_server.conformance.case import ModelKind
from verl_server.conformance.systems.base import SystemFactory
from verl_server.conformance.systems.sglang_adapter import SglangSystem
from verl_server.conformance.systems.verl_engine import VerlEngineSystem
from verl_server.conformance.systems.vllm_reload import VllmSystem
from verl_server.conformance.vllm_python import VllmPython
from verl_server.conformance.worker import Models
from verl_server.errors import BadInputError, ServerError
from verl_server.validation import did_you_mean, require_http_url

#: Names of the engines that the suite can start.
ENGINE_NAMES = ("verl_server", "sglang", "verl_server_vllm", "vllm")
#: Names of the engines that need an interpreter with vLLM.
VLLM_ENGINES = ("verl_server_vllm", "vllm")
#: Arguments of all SGLang servers and of all vLLM servers that the suite starts.
SERVER_ARGS: Mapping[str, Any] = {"max_total_tokens": 16384}
VLLM_SERVER_ARGS: Mapping[str, Any] = {"max_running_requests": 16, "enforce_eager": True}


@dataclass(frozen=True)
class Engine:
    """A system that the suite can start or connect to."""

    name: str
    description: str
    start: SystemFactory
    models: Models
    """Folders of the models that the system can serve."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages in the environment of the server, if it is another one than that of this process."""


def require_known_engine(name: str) -> None:
    """Raise BadInputError for a name that `named_engine` does not know."""
    if name not in ENGINE_NAMES:
        raise BadInputError(
            f"unknown engine {name!r}: pass {', '.join(ENGINE_NAMES)}, or the URL of a server that `verl-server "
            f"launch` started{did_you_mean(name, ENGINE_NAMES)}"
        )


def named_engine(name: str, models: Models, vllm: VllmPython | None = None) -> Engine:
    """An engine that starts servers for `models`. `vllm`: the interpreter of the engines in `VLLM_ENGINES`.

    Raises BadInputError for an unknown name.
    """
    require_known_engine(name)
    if name == "sglang":
        start: SystemFactory = functools.partial(SglangSystem, **SERVER_ARGS)
        return Engine(name, "SGLang's HttpServerEngineAdapter with the server that it starts", start, models)
    if name not in VLLM_ENGINES:
        start = functools.partial(VerlEngineSystem, **SERVER_ARGS)
        return Engine(name, "VerlEngine with a server of its own", start, models)
    if vllm is None:
        raise BadInputError(f"the engine {name} needs an interpreter with vLLM")
    versions = {"vllm": vllm.version}
    if name == "vllm":
        start = functools.partial(VllmSystem, python=vllm.path)
        return Engine(name, "vLLM's own reload through its HTTP routes", start, models, versions)
    start = functools.partial(VerlEngineSystem, vllm_python=vllm.path, **VLLM_SERVER_ARGS)
    return Engine(name, "VerlEngine with a vLLM server of its own", start, models, versions)


def number_engines(engines: Sequence[Engine]) -> list[Engine]:
    """Number engines of the same name, for example two running servers: the results have the names of the engines."""
    names, numbered = Counter(engine.name for engine in engines), []
    for position, engine in enumerate(engines):
        number = 1 + sum(other.name == engine.name for other in engines[:position])
        numbered.append(replace(engine, name=f"{engine.name} {number}") if names[engine.name] > 1 else engine)
    return numbered


def running_server(
    url: str, api_key: str | None, admin_api_key: str | None, key_hint: str = "pass the keys of the server"
) -> Engine:
    """A `VerlEngine` for a server that already runs. `key_hint` says what to do when the server refuses a key.

    Raises BadInputError if the suite cannot test the server: its model is not a folder of this machine, or it does not
    compute in float32. Raises ServerError when the server refuses a key.
    """
    url = require_http_url("--engine", url, key_hint=key_hint)
    with HttpServerEngineAdapter.attach(url, api_key=api_key, admin_api_key=admin_api_key) as adapter:
        try:
            adapter.check_keys()
        except ServerError as error:
            if error.details.get("status") != 401:
                raise
            key = error.details["key"]
            message = f"the server at {url} replied that the {key} is missing or wrong (401); {key_hint}"
            raise ServerError(message, **error.details) from error
        info = adapter.get_server_info()
    model = Path(str(info.get("model_path")))
    if not model.is_dir() and not model.is_absolute():
        raise BadInputError(
            f"the server at {url} serves {model}, which is a relative path or a name of a model; start the server with "
            "the absolute path of a folder of this machine, because the suite compares the server with this model"
        )
    if not model.is_dir():
        raise BadInputError(
            f"the server at {url} serves {model}, which is no folder of this machine; "
            "the suite compares the server with the model in this folder"
        )
    dtype = str(info.get("dtype"))
    if dtype not in ("float32", "float"):
        raise BadInputError(
            f"the server at {url} computes in {dtype}, and log probabilities are compared up to 1e-5; "
            "start it with --dtype float32"
        )
    start = functools.partial(VerlEngineSystem, remote=RemoteServer(url, api_key, admin_api_key))
    models = {ModelKind.DENSE: model}
    return Engine("running server", "VerlEngine connected to a running server", start, models)
