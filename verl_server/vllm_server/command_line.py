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


CPU_BLOCK_TOKENS, BLOCK_TOKENS = 128, 16
"""Tokens of a block of the KV cache: vLLM's defaults on a CPU and on an accelerator."""


def translate(server_args: Mapping[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """The arguments with those of SGLang replaced that vLLM has in another form."""
    args = dict(server_args)
    if is_cpu:
        args.setdefault("enforce_eager", True)  # to compile takes 10 to 30 s at each start
    if args.pop("enable_memory_saver", False) and not is_cpu:  # on a CPU the workers release memory by themselves
        args["enable_sleep_mode"] = True
    if (tokens := args.pop("max_total_tokens", None)) is not None:
        block = int(args.get("block_size") or (CPU_BLOCK_TOKENS if is_cpu else BLOCK_TOKENS))
        args["num_gpu_blocks_override"] = -(-int(tokens) // block)
    if (level := args.get("log_level")) is not None:
        args["uvicorn_log_level"] = str(level).lower()
    return args


#: Defaults of arguments, where vLLM's are others. A request for the 20 most probable tokens asks vLLM for one more.
DEFAULTS: Mapping[str, Any] = {"max_logprobs": 21}


def to_command_line(server_args: Mapping[str, Any]) -> list[str]:
    """The options of `vllm serve` for `server_args` and `OWN_OPTIONS`. An argument of None is left out."""
    options: list[str] = []
    missing = {name: value for name, value in DEFAULTS.items() if server_args.get(name) is None}
    for name, value in {**server_args, **missing, **OWN_OPTIONS}.items():
        if name not in VARIABLES and value is not None:
            options += _option(name.replace("_", "-"), value)
    return options


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
