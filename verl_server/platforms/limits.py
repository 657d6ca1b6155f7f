"""How much memory a process can allocate on this machine or in its container."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

logger = logging.getLogger(__name__)


# -- Refusals ---------------------------------------------------------------------------------------
# Server arguments and models that a CPU does not support. They end the start with a message.
#
# Every entry failed, or gave wrong numbers without an error, on a real server. SGLang calls this module while it
# resolves its arguments, so the message is at the end of the server's log.

_NEEDS_GPU_KERNEL = {
    "GptOssForCausalLM": "has attention sinks, which torch's attention does not support",
    "Qwen2MoeForCausalLM": "computes the gate of its shared expert in a GPU kernel",
}


def require_cpu_support(args: Any) -> None:
    """Raise ValueError when `args`, or the model that they name, cannot be served on a CPU."""
    message = argument_refusal(args) or model_refusal(_model_config(args))
    if message is not None:
        raise ValueError(message)


def argument_refusal(args: Any) -> str | None:
    """The reason why these server arguments do not work on a CPU, or None."""
    if args.quantization is not None:
        return (
            f"quantization={args.quantization!r} needs GPU kernels: serve the unquantized checkpoint on a CPU, "
            "in bfloat16 to save memory."
        )
    if args.speculative_algorithm is not None:
        return (
            f"Speculative decoding ({args.speculative_algorithm}) needs GPU kernels: "
            "leave speculative_algorithm unset on a CPU."
        )
    if args.enable_hierarchical_cache:
        return (
            "The hierarchical cache moves KV cache from a GPU to host memory, which a CPU does not need: "
            "leave enable_hierarchical_cache unset and raise max_total_tokens instead."
        )
    if args.enable_deterministic_inference or args.rl_on_policy_target is not None:
        return (
            "enable_deterministic_inference and rl_on_policy_target need GPU kernels: leave them unset; "
            "a sampling_seed in a request's sampling_params works on a CPU without them."
        )
    return None


def model_refusal(model: Any) -> str | None:
    """The reason why this model (SGLang's `ModelConfig`) cannot be served on a CPU, or None."""
    name = (model.hf_config.architectures or ["this model"])[0]
    if name in _NEEDS_GPU_KERNEL:
        return f"{name} {_NEEDS_GPU_KERNEL[name]}: serve another model on a CPU."
    for option in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.hf_text_config, option, None):
            return f"{name} caps its logits ({option}) in a GPU kernel: serve another model on a CPU."
    if model.quantization is not None:
        return f"{name} is quantized ({model.quantization}), which needs GPU kernels: serve an unquantized checkpoint."
    return None


def _model_config(args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)


# -- Available memory -------------------------------------------------------------------------------

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PROC = Path("/proc")
NO_OVERCOMMIT = "2"
"""Value of `vm.overcommit_memory` with which the kernel refuses memory above `CommitLimit`."""


def container_memory(root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> tuple[int, int] | None:
    """Limit and use of memory in this process's control groups, in bytes. None without a limit.

    A process is also in all parents of its control group: the container, a job of SLURM, a unit of systemd. The one in
    which the least memory is left counts. cgroup v2 is read first, then v1. The page cache of files does not count as
    used: the kernel frees it when memory is needed.
    """
    try:
        lines = own_cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = {"v2": "/", "v1": "/"}
    for line in lines:  # "0::/PATH" of version 2, "NUMBER:CONTROLLERS:/PATH" of version 1
        _, controllers, name = line.split(":", 2)
        if not controllers:
            names["v2"] = name
        elif "memory" in controllers.split(","):
            names["v1"] = name
    total = int(psutil.virtual_memory().total)
    for name, mounted, limit_file, used_file in (
        (names["v2"], root, "memory.max", "memory.current"),
        (names["v1"], root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        group = PurePosixPath(name)
        folders = [mounted / parent.relative_to("/") for parent in (group, *group.parents)]
        found = [memory for folder in folders if (memory := _read_memory(folder, limit_file, used_file)) is not None]
        if limits := [memory for memory in found if memory[0] < total]:
            return min(limits, key=lambda memory: memory[0] - memory[1])
    return None


def _read_memory(folder: Path, limit_file: str, used_file: str) -> tuple[int, int] | None:
    """Limit and use of one control group. None without a limit."""
    try:
        limit_bytes, used_bytes = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
        return limit_bytes, max(0, used_bytes - _page_cache((folder / "memory.stat").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _page_cache(statistics: str) -> int:
    """The page cache in a `memory.stat`. In version 1, only the values `total_*` include the children of the group."""
    values = {name: int(value) for name, value in (line.split() for line in statistics.splitlines())}
    names = ("active_file", "inactive_file")
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in names)


def committable_memory(proc: Path = PROC) -> int | None:
    """Bytes that processes of this machine can still allocate with `vm.overcommit_memory=2`. None with other values."""
    try:
        if (proc / "sys/vm/overcommit_memory").read_text().strip() != NO_OVERCOMMIT:
            return None
        lines = [line.split() for line in (proc / "meminfo").read_text().splitlines()]
    except OSError:
        return None
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return max(0, sizes["CommitLimit"] - sizes["Committed_AS"])


def available_memory() -> int:
    """Bytes that a new process can allocate within the limits of its control groups and of the machine."""
    available = int(psutil.virtual_memory().available)
    container, committable = container_memory(), committable_memory()
    if container is not None:
        available = min(available, container[0] - container[1])
    if committable is not None:
        available = min(available, committable)
    return max(0, available)


# -- Kv cache size ----------------------------------------------------------------------------------
# Default size of the KV cache on a CPU, in tokens.

# A server shares the machine with the trainer and with the user's programs. By default it takes at most an eighth of
# the free memory, and at most the memory of sixteen requests of full length.
SHARE_OF_FREE_MEMORY = 1 / 8
FULL_LENGTH_REQUESTS = 16
SMALLEST_POOL_TOKENS = 2048


def pool_tokens(context_length: int, bytes_per_token: int, free_bytes: int) -> int:
    """Number of tokens in the KV pool, limited by the context length and by free memory; at least the smallest pool."""
    useful = context_length * FULL_LENGTH_REQUESTS
    affordable = int(free_bytes * SHARE_OF_FREE_MEMORY) // max(bytes_per_token, 1)
    return max(SMALLEST_POOL_TOKENS, min(useful, affordable))


def default_kv_cache_tokens(args: Any) -> int:
    """The default of `max_total_tokens` for this model and the memory that is free now."""
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(args)
    element_bytes = 2 if str(model.dtype) in ("torch.bfloat16", "torch.float16") else 4
    # Keys and values of all layers. All TP ranks use the same host memory, so the size is not divided by the TP size.
    bytes_per_token = (
        model.num_hidden_layers
        * model.get_total_num_kv_heads()
        * (model.head_dim + getattr(model, "v_head_dim", model.head_dim))
        * element_bytes
    )
    tokens = pool_tokens(model.context_len, bytes_per_token, available_memory())
    logger.info("KV cache: %d tokens of %d bytes (set --max-total-tokens to change)", tokens, bytes_per_token)
    return tokens
