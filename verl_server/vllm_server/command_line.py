"""Server arguments as options of vLLM's command line. Imports the standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_server.server.server_main import NO_DOMAIN
from verl_server.vllm_server import BACKEND
from verl_server.vllm_server.start_environment import VARIABLES

#: Options that every server has. Log probabilities are those behind temperature and all other sampling parameters, as
#: with SGLang. Without `enable_scale_out` vLLM refuses token ids; without `enable_prompt_tokens_details` it does not
#: tell the number of cached tokens.
OWN_OPTIONS: Mapping[str, Any] = {
    "enable_scale_out": True,
    "enable_prompt_tokens_details": True,
    "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": BACKEND},
    "middleware": "verl_server.vllm_server.wire.app.ServerApp",
    "worker_extension_cls": "verl_server.vllm_server.worker_extension.WorkerExtension",
    "disable_uvicorn_access_log": True,
    # Domains from which requests may load images. vLLM's own default is every domain, also of the server's network.
    "allowed_media_domains": [NO_DOMAIN],
}


def to_command_line(server_args: Mapping[str, Any]) -> list[str]:
    """The options of `vllm serve` for `server_args` and `OWN_OPTIONS`. An argument of None is left out."""
    options: list[str] = []
    for name, value in {**server_args, **OWN_OPTIONS}.items():
        if name not in VARIABLES and value is not None:
            options += _option(name.replace("_", "-"), value)
    return options


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
