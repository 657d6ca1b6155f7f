"""The engines that the suite knows by name, and running servers by URL."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import RemoteServer
from verl_server.conformance.systems.base import SystemFactory
from verl_server.conformance.systems.sglang_adapter import SglangSystem
from verl_server.conformance.systems.verl_engine import VerlEngineSystem
from verl_server.errors import BadInputError
from verl_server.validation import did_you_mean, require_http_url

#: Arguments of all servers that the suite starts.
SERVER_ARGS: Mapping[str, Any] = {"max_total_tokens": 16384}


@dataclass(frozen=True)
class Engine:
    """A system that the suite can start or connect to."""

    name: str
    description: str
    start: SystemFactory
    model: Path
    """Folder of the model that the system serves."""


def named_engine(name: str, model: Path) -> Engine:
    """An engine that starts a server for the model in the folder `model`. Raises BadInputError for an unknown name."""
    if name == "verl_server":
        start: SystemFactory = functools.partial(VerlEngineSystem, model, **SERVER_ARGS)
        return Engine(name, "VerlEngine with a server of its own", start, model)
    if name == "sglang":
        start = functools.partial(SglangSystem, model, **SERVER_ARGS)
        return Engine(name, "SGLang's HttpServerEngineAdapter with the server that it starts", start, model)
    raise BadInputError(
        f"unknown engine {name!r}: pass verl_server, sglang, or the URL of a server that `verl-server launch` started"
        f"{did_you_mean(name, ('verl_server', 'sglang'))}"
    )


def running_server(url: str, api_key: str | None, admin_api_key: str | None) -> Engine:
    """A `VerlEngine` for a server that already runs.

    Raises BadInputError if the suite cannot test the server: its model is not a folder of this machine, or it does not
    compute in float32. Raises ServerError when the server refuses a key.
    """
    url = require_http_url("--engine", url)
    with HttpServerEngineAdapter.attach(url, api_key=api_key, admin_api_key=admin_api_key) as adapter:
        adapter.check_keys()
        info = adapter.get_server_info()
    model = Path(str(info.get("model_path")))
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
    start = functools.partial(VerlEngineSystem, model, RemoteServer(url, api_key, admin_api_key))
    return Engine("running server", "VerlEngine connected to a running server", start, model)
