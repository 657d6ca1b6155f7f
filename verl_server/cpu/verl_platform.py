"""verl's platform for machines without an accelerator. verl has none (`verl/plugin/platform/`).

The platform is used only where verl finds no other: no process of the machine and no node of the Ray cluster has an
accelerator. `VERL_PLATFORM=cpu` chooses it in any case.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform

from verl_server.server.environment import may_have_accelerator

NAME = "cpu"


class _CpuModule(ModuleType):
    """`torch.cpu`, and functions that verl calls on `torch.cuda`, which do nothing here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(torch.cpu, name, None)
        return value if value is not None else _VALUES.get(name, _do_nothing)


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


_VALUES: dict[str, Any] = {
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *_, **__: 0
    ),
    "mem_get_info": lambda *_, **__: (os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _total_memory()),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "get_device_name": lambda *_, **__: NAME,
}


def _total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CpuPlatform(PlatformBase):  # type: ignore[misc] # verl has no types
    """A machine without an accelerator. Ray lends each rank a GPU that does not exist: verl counts ranks in GPUs."""

    _module = _CpuModule("verl_server_cpu")

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether neither this machine nor the Ray cluster has an accelerator."""
        return not may_have_accelerator(dict(os.environ)) and not _cluster_has_accelerator()

    def current_device(self) -> str:
        """The device, which verl passes to `Tensor.to`."""
        return NAME

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        """ "GPU": the only name that verl's check of the resources knows without an NPU."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def _cluster_has_accelerator() -> bool:
    """Whether a node of the Ray cluster of this process has an accelerator: the driver may run on a node without."""
    import ray

    if not ray.is_initialized():
        return False
    return any(name.startswith("accelerator_type:") for name in ray.cluster_resources())


def register() -> None:
    """Register the platform, and prepare verl for it if verl chooses it."""
    PlatformRegistry.register(NAME)(CpuPlatform)
    if get_platform().device_name != NAME:
        return
    # FSDP engines are registered for the devices cuda and npu only (verl/workers/engine/base.py).
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _use_gloo_once()


def _use_gloo_once() -> None:
    """verl joins the backends of the CPU and of the device to "cpu:gloo,cpu:gloo", which torch refuses."""
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize
