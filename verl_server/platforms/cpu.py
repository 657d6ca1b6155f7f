"""The platform class: SGLang's answers to "what can this device do" for a plain CPU.

Everything here overrides a documented slot of `sglang.srt.platforms.interface.SRTPlatform`. The plain
CPU has no custom kernels, so each answer picks the torch-native path that SGLang already carries.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

from verl_server.platforms.defaults import apply_defaults

# Absent before SGLang 0.5.2x: older versions ask the `support_*` methods below instead.
_Capabilities = getattr(interface, "PlatformCapabilities", None)


class TorchNativeCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """SGLang on any CPU through torch's own operators; see `activate` for when it is chosen."""

    _enum = PlatformEnum.OOT
    if _Capabilities is not None:
        # All False: no Triton, no graphs. Core then takes its torch-native allocators and writers.
        capabilities = _Capabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        apply_defaults(server_args)

    def get_device(self, device_id: int | None = 0) -> str:
        """A string, not a `torch.device`: ServerArgs stores it as `device` and splits it at ':'."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Inductor would compile C++ for ten seconds in the first forward of TP 2, for one masked lookup."""
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
        """Make `torch.get_device_module()` answer `torch.cpu` in this (worker) process.

        A CUDA build of torch names CUDA as its accelerator even when no driver is there; SGLang then
        calls `torch.cuda.synchronize()` in `release_memory_occupation` and dies.
        """
        original = torch.get_device_module

        @functools.cache
        def get_device_module(device: torch.device | str | None = None) -> ModuleType:
            return torch.cpu if device is None else original(device)

        torch.get_device_module = get_device_module
