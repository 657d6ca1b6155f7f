"""Default server arguments on a CPU: what `python -m sglang.launch_server --model-path X` needs there.

SGLang calls `apply_defaults` once, in the launcher, while it resolves its arguments
(`arg_groups/platform_hook.handle_platform_defaults`): after the device, the graph configuration and its own rules for
CPUs, and before the memory settings. Reads return the values that are resolved so far; writes are recorded as decisions
of this platform. A value that the user has set is kept where a CPU supports it. Otherwise `refusals` ends the start
with a message.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from verl_server.platforms.kv_cache_size import default_kv_cache_tokens
from verl_server.platforms.refusals import require_cpu_support
from verl_server.platforms.threads import split_cores

logger = logging.getLogger(__name__)

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
    # The memory saver of this flag supports CUDA only. `memory_hooks` releases memory without it.
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
        args.max_total_tokens = default_kv_cache_tokens(args)
    _bind_ranks(args)


def _keep_float32(args: Any) -> None:
    """Keep float32 checkpoints in float32: `--dtype auto` converts them to float16, which a CPU computes slowly."""
    if args.dtype != "auto":
        return
    from sglang.srt.arg_groups.overrides import model_config_of

    config = model_config_of(args).hf_text_config
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
