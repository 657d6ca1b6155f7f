"""The platform class: what SGLang can use on a plain CPU.

Every method overrides a documented method of `sglang.srt.platforms.interface.SRTPlatform`. A plain CPU has no custom
kernels, so each method selects the implementation of SGLang that uses torch operators only.
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import Any

import torch
from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from verl_server.cpu.memory import default_kv_cache_tokens
from verl_server.platforms.limits import split_cores

logger = logging.getLogger(__name__)


# -- Defaults ---------------------------------------------------------------------------------------
# Default server arguments on a CPU: what `python -m sglang.launch_server --model-path X` needs there.
#
# SGLang calls `apply_defaults` once, in the launcher, while it resolves its arguments
# (`arg_groups/platform_hook.handle_platform_defaults`): after the device, the graph configuration and its own rules
# for CPUs, and before the memory settings. Reads return the values that are resolved so far; writes are recorded as
# decisions of this platform. A value that the user has set is kept where a CPU supports it. Otherwise the
# start ends with a message.

# Number of rows of the request table, whose size is rows x context length x 4 bytes. SGLang's own default (2,048 rows
# and more) takes 1 GiB with a context length of 131,072. A CPU cannot run more than 128 requests faster in any case.
MAX_RUNNING_REQUESTS = 128
CHUNKED_PREFILL_TOKENS = 4096


def apply_defaults(args: Any) -> None:
    """Set the defaults in `args` (SGLang's `ServerArgs` or its recorder).

    Raises ValueError for unsupported arguments.
    """
    require_cpu_support(args)
    if args.attention_backend not in (None, "torch_native", "intel_amx"):
        logger.warning("attention backend %s needs a GPU; using torch_native", args.attention_backend)
    args.attention_backend = "torch_native"
    args.sampling_backend = "pytorch"
    args.disable_custom_all_reduce = True
    # The memory saver of this flag supports CUDA only. `memory.py` releases memory without it.
    args.enable_memory_saver = False
    # Without it an idle scheduler polls in a loop on one core. With it a request wakes the scheduler at once (zmq
    # poll).
    args.sleep_on_idle = True
    if args.enable_lora or args.lora_paths:
        args.lora_backend = "torch_native"
    _disable_graphs(args)
    _keep_float32(args)
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = CHUNKED_PREFILL_TOKENS
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING_REQUESTS
    if args.max_total_tokens is None and args.mem_fraction_static is None:
        args.max_total_tokens = default_kv_cache_tokens(_model_config(args))
    _bind_ranks(args)


def _keep_float32(args: Any) -> None:
    """Keep float32 checkpoints in float32: `--dtype auto` converts them to float16, which a CPU computes slowly."""
    if args.dtype != "auto":
        return
    config = _model_config(args).hf_text_config
    if str(getattr(config, "dtype", None)) == "torch.float32":
        args.dtype = "float32"


def _disable_graphs(args: Any) -> None:
    try:
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
    except ImportError:  # SGLang versions without the per-phase graph configuration
        args.disable_cuda_graph = True
        return
    config = args.cuda_graph_config
    for phase in Phase.ALL:
        config = with_phase(config, phase, backend=Backend.DISABLED)
    args.cuda_graph_config = config


def _bind_ranks(args: Any) -> None:
    """Give each rank its own cores. Without a list of cores SGLang expects one NUMA node per rank."""
    ranks = args.tp_size * args.dp_size * args.pp_size
    if ranks > 1 and not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = split_cores(ranks)


# -- Refusals ---------------------------------------------------------------------------------------
# Server arguments and models that a CPU does not support. They end the start with a message.
#
# Every entry failed, or gave wrong numbers without an error, on a real server. The message is at the end of the
# server's log.

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


# -- Platform ---------------------------------------------------------------------------------------

# SGLang before 0.5.2x has no such class and calls the `support_*` methods of the base class instead.
_Capabilities = getattr(interface, "PlatformCapabilities", None)


class TorchNativeCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """SGLang on any CPU with torch's own operators. `verl_server.platforms.activate` decides when it is used."""

    _enum = PlatformEnum.OOT
    if _Capabilities is not None:
        # All capabilities are False: no Triton, no CUDA graphs. SGLang then uses its torch-native allocators and
        # writers.
        capabilities = _Capabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        apply_defaults(server_args)

    def get_device(self, device_id: int | None = 0) -> str:
        """The device as a string, because ServerArgs stores it as `device` and splits it at ':'."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """With inductor, the first forward pass of TP 2 would compile C++ for ten seconds, for one masked lookup."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Make `torch.get_device_module()` return `torch.cpu` in this worker process.

        A CUDA build of torch names CUDA as its accelerator even without a driver. SGLang then calls
        `torch.cuda.synchronize()` in `release_memory_occupation` and ends.
        """
        original = torch.get_device_module

        @functools.cache
        def get_device_module(device: torch.device | str | None = None) -> ModuleType:
            return torch.cpu if device is None else original(device)

        torch.get_device_module = get_device_module
