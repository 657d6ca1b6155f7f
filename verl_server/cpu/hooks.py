"""Hooks of the CPU platform: memory without CUDA, host memory that is not pinned, idle schedulers, cores, workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from verl_server.cpu import memory, seeds
from verl_server.platforms.limits import available_cores
from verl_server.platforms.scheduler_hooks import MANAGERS, SCHEDULER, UPDATER, add_hook, has_target

# -- Http hooks -------------------------------------------------------------------------------------
# HTTP side of memory release and resume: a scheduler's refusal becomes an HTTP error. SGLang's own functions wait for
# the replies of all schedulers and ignore them.


class MemoryOccupationRefused(RuntimeError):
    """A scheduler refused, and nothing was released or resumed. SGLang's error handler reads `status_code` (409)."""

    status_code = HTTPStatus.CONFLICT


async def release(manager: Any, obj: Any, request: Any = None) -> None:
    """Replacement of `TokenizerControlMixin.release_memory_occupation` that raises a scheduler's refusal."""
    manager.auto_create_handle_loop()
    _raise_refusal(await manager.release_memory_occupation_communicator(obj))


async def resume(manager: Any, obj: Any, request: Any = None) -> None:
    """Replacement of `TokenizerControlMixin.resume_memory_occupation` that raises a scheduler's refusal."""
    manager.auto_create_handle_loop()
    _raise_refusal(await manager.resume_memory_occupation_communicator(obj))


def _raise_refusal(replies: list[Any]) -> None:
    refusals = sorted({reply.rid for reply in replies if reply.rid})
    if refusals:
        raise MemoryOccupationRefused("; ".join(refusals))


# -- Pinned memory hook -----------------------------------------------------------------------------
# Host memory that is not pinned. Pinned memory speeds up copies to a GPU, and torch refuses it without a GPU.
#
# SGLang's LoRA code requests pinned memory for every tensor in host memory. Around its functions the request is
# ignored. SGLang registers the host memory of routed experts with CUDA. On a CPU this memory is allocated without
# registration.


class _IgnorePinMemory(TorchFunctionMode):
    """Ignores `pin_memory` as a method and as a keyword argument of torch functions."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of SGLang's LoRA code, and ignore its requests for pinned memory, which torch would refuse."""
    with _IgnorePinMemory():
        return original(*args, **kwargs)


def allocate_unregistered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allocate a tensor with SGLang's `alloc_with_host_register`, and do not register it with CUDA."""
    return original(*args, **{**kwargs, "pin_memory": False})


# -- Sleep hook -------------------------------------------------------------------------------------
# A paused scheduler sleeps instead of using a whole core.
#
# With `sleep_on_idle` SGLang's event loop sleeps when it is idle, but not while generation is paused. It then polls
# its sockets in a loop, at the time when a trainer needs the cores for a weight update.


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Sleep before `Scheduler.ingest_requests` while generation is paused: until a message arrives, at most one second.

    SGLang itself polls its sockets in a loop then, which uses a whole core.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return original(scheduler, *args, **options)


# -- Threads ----------------------------------------------------------------------------------------
# The cores on which each tensor-parallel rank computes.
#
# SGLang binds threads with a kernel library that a plain CPU installation does not have, and only on AMX or ARM
# machines (`distributed/bootstrap._init_cpu_threads_env`). torch and the operating system can do it without that
# library.


def parse_cores(text: str) -> set[int]:
    """Parse the cores of one rank, for example "0,1,4-7"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_threads(*, local_omp_cpuid: str, **_ignored: Any) -> None:
    """Replacement of SGLang's `_init_cpu_threads_env` that binds the threads of this rank to its cores with torch.

    `local_omp_cpuid` lists these cores. SGLang's function needs a kernel library that a plain CPU installation does not
    have. A single rank is not bound: that would only disturb the trainer and other servers.
    """
    if not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = parse_cores(local_omp_cpuid) & set(available_cores())
    if not cores:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


# -- Workers ----------------------------------------------------------------------------------------
# SGLang's worker processes are forked where that is safe. A spawned worker repeats ten seconds of imports.
#
# A fork copies one thread and the state of every lock. It is safe only in a process with one thread that was not
# forked itself: a fork of a trainer, for example, would wait for OpenMP threads that do not exist in it. Both
# conditions are read from the kernel at the moment of the fork. Otherwise workers are spawned, as SGLang does by
# default: in a trainer that runs the in-process `Engine`, in SGLang's own HTTP adapter, which forks, when BLAS has
# started threads, and on other systems than Linux.

_is_launching = False
_forks_may_fork = False
#: Flag in `/proc/PID/stat`: the process was forked and has executed no program since (linux/sched.h).
PF_FORKNOEXEC = 0x40


def launch_workers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call SGLang's `Engine` function that starts the schedulers or the detokenizer, with the start method "fork".

    A spawned worker imports all modules again. Where a fork is not safe, the start method is not changed.
    """
    if not can_fork():
        return original(*args, **kwargs)
    global _is_launching
    start_method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    _is_launching = True
    try:
        return original(*args, **kwargs)
    finally:
        _is_launching = False
        multiprocessing.set_start_method(start_method, force=True)


def allow_forks_to_fork() -> None:
    """Allow that forks of this process fork workers. Only for a process that has never had a second thread."""
    global _forks_may_fork
    _forks_may_fork = True


def can_fork() -> bool:
    """Whether this process has one thread and was not forked. Forks of a forkserver are allowed."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
        return len(os.listdir("/proc/self/task")) == 1 and (_forks_may_fork or not flags & PF_FORKNOEXEC)
    except OSError:
        return False


def after_fork() -> None:
    """Give a forked worker the state of a spawned worker. Runs after every fork.

    A worker may start threads later, so it spawns its own processes.
    """
    global _is_launching
    if _is_launching:
        _is_launching = False
        multiprocessing.set_start_method("spawn", force=True)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # SGLang's handler there ends the whole server


# -- Registration -----------------------------------------------------------------------------------

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_HTTP_SIDE = f"{MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler"
_HOST_ALLOCATOR = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"


def register(in_launcher: bool, has_scheduler: bool) -> None:
    """Register the hooks of the CPU platform in this process, after those of every platform."""
    if in_launcher:
        _register_launcher()
    if has_scheduler:
        _register_scheduler()


def _register_launcher() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    add_hook(f"{_HTTP_SIDE}.release_memory_occupation", release, HookType.REPLACE)
    add_hook(f"{_HTTP_SIDE}.resume_memory_occupation", resume, HookType.REPLACE)
    for step in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        add_hook(f"{_ENGINE}.{step}", launch_workers, HookType.AROUND)
    os.register_at_fork(after_in_child=after_fork)


def _register_scheduler() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    around = HookType.AROUND
    add_hook(f"{UPDATER}.release_memory_occupation", memory.release, around)
    add_hook(f"{UPDATER}.resume_memory_occupation", memory.resume, around)
    add_hook(f"{SCHEDULER}.handle_generate_request", memory.refuse_without_memory, around)
    add_hook(f"{SCHEDULER}.get_next_batch_to_run", memory.hold_queued_requests, around)
    has_update_sessions = has_target(f"{UPDATER}.end_weight_update")
    update_steps = ("update_weights_from_tensor", "update_weights_from_distributed")
    for step in ("begin_weight_update", "check_weights", *(update_steps if has_update_sessions else ())):
        add_hook(f"{UPDATER}.{step}", memory.guard_update, around)
    last_steps = ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
    for step in (*last_steps, *(() if has_update_sessions else update_steps)):
        add_hook(f"{UPDATER}.{step}", memory.guard_last_update_step, around)
    add_hook(f"{SCHEDULER}.ingest_requests", ingest_requests, around)
    add_hook(f"{_SAMPLING_INFO}.from_schedule_batch", seeds.from_schedule_batch, HookType.AFTER)
    add_hook(f"{_SAMPLING_INFO}.merge_batch", seeds.merge_batch, HookType.BEFORE)
    add_hook(f"{_SAMPLER}.sampling_from_probs_torch", seeds.sample, around)
    add_hook(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", seeds.sample_filtered, around)
    for target in (
        "lora.LoRAAdapter.pin_weights_in_cpu",
        "lora_manager.LoRAManager.init_state",
        "lora_manager.LoRAManager.update_lora_info",
        "backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    ):
        add_hook(f"sglang.srt.lora.{target}", without_pinned_memory, around)
    if has_target(_HOST_ALLOCATOR):  # SGLang before 0.5.2x has none
        add_hook(_HOST_ALLOCATOR, allocate_unregistered, around)
    add_hook("sglang.srt.distributed.bootstrap._init_cpu_threads_env", bind_threads, HookType.REPLACE)
