"""The platform class: what SGLang can use on a plain CPU.

Every method overrides a documented method of `sglang.srt.platforms.interface.SRTPlatform`. A plain CPU has no custom
kernels, so each method selects the implementation of SGLang that uses torch operators only.
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
