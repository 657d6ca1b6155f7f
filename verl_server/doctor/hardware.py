"""Reads the accelerators and CPU cores of this machine from torch, the NVIDIA driver and nvidia-smi."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. `total` and `free` are bytes of its memory."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Hardware:
    """Accelerators and CPU cores of this machine."""

    accelerator: str | None
    """Type of the accelerator that torch can use ("cuda", "xpu", ...), None without one."""
    devices: int = 0
    """Number of accelerators that torch can use."""
    torch_cuda: str | None = None
    """CUDA version for which torch was built, None for a build without CUDA."""
    driver_cuda: tuple[int, int] | None = None
    """Highest CUDA version that the driver supports; None without a driver."""
    nvidia_device: bool = False
    """Whether the kernel lists an NVIDIA device."""
    hidden: bool = False
    """Whether `CUDA_VISIBLE_DEVICES` hides all GPUs."""
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    """Number of CPU cores that this process may use."""


def probe() -> Hardware:
    """Read the hardware. Imports torch, which takes seconds; creates no CUDA context."""
    try:
        import torch
    except ImportError:
        return Hardware(accelerator=None, cores=len(os.sched_getaffinity(0)))
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Hardware(
        accelerator=device.type if device is not None else None,
        devices=torch.accelerator.device_count() if device is not None else 0,
        torch_cuda=torch.version.cuda,
        driver_cuda=_driver_cuda(),
        nvidia_device=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        gpus=visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")) if torch.cuda.is_available() else (),
        cores=len(os.sched_getaffinity(0)),
    )


def _driver_cuda() -> tuple[int, int] | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _gpus() -> tuple[Gpu, ...]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(output)


def parse_gpus(output: str) -> tuple[Gpu, ...]:
    """Parse the CSV of nvidia-smi (name, total MiB, free MiB). GPUs without numbers are left out."""
    gpus = []
    for line in output.splitlines():
        name, *sizes = (part.strip() for part in line.rsplit(",", 2))
        if len(sizes) == 2 and all(size.isdigit() for size in sizes):
            gpus.append(Gpu(name, int(sizes[0]) * 2**20, int(sizes[1]) * 2**20))
    return tuple(gpus)


def visible(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """The GPUs that are visible with CUDA_VISIBLE_DEVICES=`chosen`. All GPUs when it names them by UUID."""
    parts = [part.strip() for part in (chosen or "").split(",")]
    if not all(part.isdigit() and int(part) < len(gpus) for part in parts):
        return gpus
    return tuple(gpus[int(part)] for part in parts)
