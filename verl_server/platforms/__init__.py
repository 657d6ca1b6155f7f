"""An SGLang platform plugin that runs SGLang, without changes to its code, on any CPU.

SGLang calls two entry points in its launcher, scheduler and detokenizer processes. `activate` (entry point group
`sglang.srt.platforms`) names the platform class. `register_hooks` (group `sglang.srt.plugins`) registers functions for
behaviour that the platform interface does not cover. On a machine with an accelerator `activate` does nothing, and only
the hooks of the prefix cache and of the released memory are registered. Importing this package imports neither torch
nor sglang.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "verl_server.cpu.platform:TorchNativeCpuPlatform"
#: The entry points of `setup.py` that SGLang calls, by group. A server whose environment does not have this package
#: installed gets them from a folder on its `PYTHONPATH`, see `verl_server/server/environment.py`.
ENTRY_POINTS = {
    "sglang.srt.platforms": "verl_server_cpu = verl_server.platforms:activate",
    "sglang.srt.plugins": "verl_server_cpu = verl_server.platforms:register_hooks",
}


def activate() -> str | None:
    """Return the platform class for this machine, or None to leave the choice to SGLang.

    None with any accelerator that torch can use (CUDA, ROCm, XPU, MPS, NPU, MUSA, ...), and None when
    `SGLANG_USE_CPU_ENGINE=1` selects SGLang's own CPU engine, which needs AMX. SGLang handles `SGLANG_PLATFORM` before
    it calls this function.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return None if _has_accelerator() else PLATFORM_CLASS


def register_hooks() -> None:
    """Register hooks with SGLang's `HookRegistry`: most of them only if this platform is the active platform."""
    from sglang.srt.platforms import current_platform

    from verl_server.platforms import scheduler_hooks

    active = type(current_platform)
    on_cpu = f"{active.__module__}:{active.__qualname__}" == PLATFORM_CLASS
    sides = scheduler_hooks.find_hooked_sides()
    scheduler_hooks.register(*sides, on_cpu=on_cpu)
    if on_cpu:
        from verl_server.cpu import hooks

        hooks.register(*sides)


def _has_accelerator() -> bool:
    import torch

    # A MUSA device imitates CUDA. torch.accelerator finds it only after torchada has been imported.
    if getattr(torch.version, "musa", None) is not None:
        return True
    return bool(torch.accelerator.is_available())
