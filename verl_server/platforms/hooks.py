"""The functions of SGLang that each hook changes, and the processes in which it does.

SGLang loads plugins in every process that it starts. Registering a hook imports the module of its target, so hooks are
not registered in the detokenizer: it needs none, and it would import the whole scheduler.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from verl_server.platforms import scheduler_hooks

logger = logging.getLogger(__name__)

_MANAGERS = "sglang.srt.managers"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_INTERNAL_STATE = f"{_MANAGERS}.scheduler_components.internal_state.SchedulerInternalStateController"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_TOKENIZER_MANAGER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_HTTP_SIDE = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler"
_HOST_ALLOCATOR = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"


def register(*, on_cpu: bool) -> None:
    """Register the hooks of this process: those of every platform, and those of the CPU platform."""
    in_scheduler = f"{_MANAGERS}.scheduler" in sys.modules
    in_detokenizer = f"{_MANAGERS}.detokenizer_manager" in sys.modules
    # A spawned worker has imported its own manager only. The launcher has imported none, or all of them (`Engine`).
    in_launcher = in_scheduler == in_detokenizer
    if in_launcher:
        _add(f"{_TOKENIZER_MANAGER}.generate_request", scheduler_hooks.check_size, HookType.BEFORE)
        _add(f"{_TOKENIZER_MANAGER}._create_tokenized_object", scheduler_hooks.check_tokenized, HookType.AFTER)
    if in_launcher and on_cpu:
        _register_launcher()
    if in_launcher or in_scheduler:  # the launcher may fork its workers
        for target, hook in scheduler_hooks.hooks().items():
            _add(target, hook, HookType.BEFORE)
        _add(f"{_SCHEDULER}.init_model_worker", scheduler_hooks.note_model, HookType.AFTER)
        _add(f"{_INTERNAL_STATE}.get_internal_state", scheduler_hooks.add_state, HookType.AFTER)
        if on_cpu:
            _register_scheduler()
        else:
            from verl_server.platforms import memory

            _add(f"{_SCHEDULER}.get_next_batch_to_run", memory.hold_requests, HookType.AROUND)


def _register_launcher() -> None:
    from verl_server.platforms import scheduler_hooks

    _add(f"{_HTTP_SIDE}.release_memory_occupation", scheduler_hooks.release, HookType.REPLACE)
    _add(f"{_HTTP_SIDE}.resume_memory_occupation", scheduler_hooks.resume, HookType.REPLACE)
    for step in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        _add(f"{_ENGINE}.{step}", scheduler_hooks.launch_workers, HookType.AROUND)
    os.register_at_fork(after_in_child=scheduler_hooks.after_fork)


def _register_scheduler() -> None:
    from verl_server.platforms import memory, scheduler_hooks, seeds

    around = HookType.AROUND
    _add(f"{_UPDATER}.release_memory_occupation", memory.release, around)
    _add(f"{_UPDATER}.resume_memory_occupation", memory.resume, around)
    _add(f"{_SCHEDULER}.handle_generate_request", memory.refuse_without_memory, around)
    _add(f"{_SCHEDULER}.get_next_batch_to_run", memory.hold_queued_requests, around)
    has_update_sessions = _exists(f"{_UPDATER}.end_weight_update")
    update_steps = ("update_weights_from_tensor", "update_weights_from_distributed")
    for step in ("begin_weight_update", "check_weights", *(update_steps if has_update_sessions else ())):
        _add(f"{_UPDATER}.{step}", memory.guard_update, around)
    last_steps = ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
    for step in (*last_steps, *(() if has_update_sessions else update_steps)):
        _add(f"{_UPDATER}.{step}", memory.guard_last_update_step, around)
    _add(f"{_SCHEDULER}.ingest_requests", scheduler_hooks.ingest_requests, around)
    _add(f"{_SAMPLING_INFO}.from_schedule_batch", seeds.from_schedule_batch, HookType.AFTER)
    _add(f"{_SAMPLING_INFO}.merge_batch", seeds.merge_batch, HookType.BEFORE)
    _add(f"{_SAMPLER}.sampling_from_probs_torch", seeds.sample, around)
    _add(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", seeds.sample_filtered, around)
    for target in (
        "lora.LoRAAdapter.pin_weights_in_cpu",
        "lora_manager.LoRAManager.init_state",
        "lora_manager.LoRAManager.update_lora_info",
        "backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    ):
        _add(f"sglang.srt.lora.{target}", scheduler_hooks.without_pinned_memory, around)
    if _exists(_HOST_ALLOCATOR):  # SGLang before 0.5.2x has none
        _add(_HOST_ALLOCATOR, scheduler_hooks.allocate_unregistered, around)
    _add("sglang.srt.distributed.bootstrap._init_cpu_threads_env", scheduler_hooks.bind_threads, HookType.REPLACE)


def _add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register one hook. Log a warning when this version of SGLang does not have its target."""
    if _exists(target):
        HookRegistry.register(target, hook, kind)
    else:
        logger.warning("this version of SGLang has no %s; the hook %s is inactive", target, hook.__qualname__)


def _exists(target: str) -> bool:
    try:
        resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True
