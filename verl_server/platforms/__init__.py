"""The SGLang platform plugin that runs the real, unpatched SGLang on any CPU.

Two entry points, both called by SGLang itself in the launcher, scheduler and detokenizer processes:
`activate` (group `sglang.srt.platforms`) names the platform class, `register_hooks` (group
`sglang.srt.plugins`) adds what the platform interface has no slot for. On a machine with an accelerator
both do nothing. Importing this package imports neither torch nor sglang.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "verl_server.platforms.cpu:TorchNativeCpuPlatform"


def activate() -> str | None:
    """The platform class for this machine, or None when SGLang can do better on its own.

    None with any accelerator that torch can use (CUDA, ROCm, XPU, MPS, NPU, MUSA, ...) and None when
    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's in-tree AMX engine. `SGLANG_PLATFORM` is handled by
    SGLang before it comes here.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return None if _accelerator_present() else PLATFORM_CLASS


def register_hooks() -> None:
    """Register this platform's hooks with SGLang's `HookRegistry`; nothing unless it is the active one."""
    from sglang.srt.platforms import current_platform

    from verl_server.platforms.cpu import TorchNativeCpuPlatform

    if isinstance(current_platform, TorchNativeCpuPlatform):
        from verl_server.platforms.hooks import register

        register()


def _accelerator_present() -> bool:
    import torch

    # MUSA hides behind a CUDA look-alike that torch.accelerator only sees once torchada is imported.
    if getattr(torch.version, "musa", None) is not None:
        return True
    return bool(torch.accelerator.is_available())
