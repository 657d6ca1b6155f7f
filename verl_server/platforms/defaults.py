"""What a bare `python -m sglang.launch_server --model-path X` needs on a CPU.

SGLang calls `apply_defaults` once, in the launcher, in the middle of argument resolution
(`arg_groups/platform_hook.handle_platform_defaults`): after the device, the graph configuration and the
in-tree CPU rules, before the memory settings. Reads see what is resolved so far, writes are recorded as
this platform's decision. A value that the user set wins wherever a CPU can serve it; where it cannot,
`refusals` ends the start with one sentence.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from verl_server.platforms.budget import kv_budget_tokens
from verl_server.platforms.refusals import refuse_what_a_cpu_cannot_do
from verl_server.platforms.threads import split_cores

logger = logging.getLogger(__name__)

# Rows of the request table. Its size is rows x context length x 4 bytes: SGLang's own default (2,048 and
# up) costs 1 GiB with a context of 131,072. Beyond 128 a CPU only queues anyway.
MAX_RUNNING_REQUESTS = 128
CHUNKED_PREFILL_TOKENS = 4096


def apply_defaults(args: Any) -> None:
    """Fill in `args` (SGLang's `ServerArgs` or its recorder) for a CPU. Raises ValueError to refuse."""
    refuse_what_a_cpu_cannot_do(args)
    if args.attention_backend not in (None, "torch_native", "intel_amx"):
        logger.warning("Attention backend %s needs a GPU: torch_native instead", args.attention_backend)
    args.attention_backend = "torch_native"
    args.sampling_backend = "pytorch"
    args.disable_custom_all_reduce = True
    # The saver behind this flag is CUDA only and absent here; `memory_hooks` frees memory without it.
    args.enable_memory_saver = False
    # Without it an idle scheduler spins on one core. A request wakes it at once (zmq poll).
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
        args.max_total_tokens = kv_budget_tokens(args)
    _bind_ranks(args)


def _keep_float32(args: Any) -> None:
    """A float32 checkpoint stays float32: `--dtype auto` makes it float16, which a CPU computes slowly."""
    if args.dtype != "auto":
        return
    from sglang.srt.arg_groups.overrides import model_config_of

    config = model_config_of(args).hf_text_config
    if str(getattr(config, "dtype", None)) == "torch.float32":
        args.dtype = "float32"


def _disable_graphs(args: Any) -> None:
    try:
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
    except ImportError:  # before SGLang's per-phase graph configuration
        args.disable_cuda_graph = True
        return
    config = args.cuda_graph_config
    for phase in Phase.ALL:
        config = with_phase(config, phase, backend=Backend.DISABLED)
    args.cuda_graph_config = config


def _bind_ranks(args: Any) -> None:
    """Give each tensor-parallel rank its own cores; without a list SGLang wants one NUMA node a rank."""
    ranks = args.tp_size * args.dp_size * args.pp_size
    if ranks > 1 and not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = split_cores(ranks)
