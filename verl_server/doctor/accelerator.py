"""Can the server use the accelerator of this machine, and which platform will SGLang choose for it?"""

from __future__ import annotations

import os
from importlib import metadata

from verl_server.doctor.finding import Finding, fail, gib, ok, warn
from verl_server.doctor.hardware import Gpu, Hardware

PLATFORM_GROUP = "sglang.srt.platforms"
OUR_PLATFORM = "verl_server_cpu"
REINSTALL = "Install verl-server again in this environment (pip install verl-server, or pip install -e . in a clone)."
TAKEN_BEFORE_START = 0.15


def check_accelerator(hardware: Hardware) -> Finding:
    """Can torch use what is in the machine?"""
    title = "Accelerator"
    if hardware.accelerator is not None:
        names = ", ".join(sorted({gpu.name for gpu in hardware.gpus})) or hardware.accelerator
        return ok(title, f"{hardware.devices} x {names}{_cuda_words(hardware)}")
    if hardware.nvidia_device and not hardware.hidden:
        return _unusable_gpu(hardware)
    if hardware.cores < 2:
        return warn(
            title,
            "none, and one CPU core",
            symptom="server and trainer take turns on the core: starts take minutes",
            fix="Give the machine or container two cores or more.",
        )
    why = "hidden by CUDA_VISIBLE_DEVICES" if hardware.nvidia_device else "none"
    return ok(title, f"{why}: the CPU platform will be used, on {hardware.cores} cores")


def _unusable_gpu(hardware: Hardware) -> Finding:
    found, symptom = "there is an NVIDIA GPU, but ", "the server runs on the CPU, or ends with a CUDA error"
    if hardware.torch_cuda is None:
        return fail(
            "Accelerator",
            found + "torch was built without CUDA",
            symptom=symptom,
            fix="Install the CUDA build of torch (the plain `pip install torch` on Linux).",
        )
    needed = _parse(hardware.torch_cuda)
    if hardware.driver_cuda is None:
        return fail(
            "Accelerator",
            found + "its driver library (libcuda.so.1) is not visible here",
            symptom=symptom,
            fix="Start the container with the NVIDIA runtime (docker run --gpus all), or install the driver.",
        )
    if hardware.driver_cuda[0] < needed[0]:
        return fail(
            "Accelerator",
            f"{found}its driver supports CUDA {_dotted(hardware.driver_cuda)} and torch needs {hardware.torch_cuda}",
            symptom="The NVIDIA driver on your system is too old (found version ...)",
            fix=f"Update the driver, or install a torch built for CUDA {hardware.driver_cuda[0]}.",
        )
    return fail(
        "Accelerator",
        found + "torch cannot use it",
        symptom=symptom,
        fix="Run `python -c 'import torch; torch.cuda.init()'` and nvidia-smi: one of them names the reason.",
    )


def check_gpu_memory(gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Is the GPUs' memory free before a server starts?"""
    return [
        warn(
            f"GPU {index}",
            f"{gib(gpu.total - gpu.free)} of {gib(gpu.total)} are taken already",
            symptom="Not enough memory. Please try to increase --mem-fraction-static",
            fix="See who holds it with nvidia-smi; a colocated trainer is fine if --mem-fraction-static leaves room.",
        )
        for index, gpu in enumerate(gpus)
        if gpu.total - gpu.free > gpu.total * TAKEN_BEFORE_START
    ]


def check_platform(registered: tuple[str, ...], *, selected: str, cpu_engine: bool, accelerator: str | None) -> Finding:
    """Which platform SGLang will choose. `selected` is SGLANG_PLATFORM, `cpu_engine` SGLANG_USE_CPU_ENGINE=1."""
    title, symptom = "SGLang platform", "the server ends at once with RuntimeError about the platform"
    if selected and selected not in registered:
        return fail(
            title,
            f"SGLANG_PLATFORM={selected} names no installed plugin (installed: {', '.join(registered) or 'none'})",
            symptom=symptom,
            fix="unset SGLANG_PLATFORM",
        )
    if selected == OUR_PLATFORM and (accelerator or cpu_engine):
        return fail(
            title,
            f"SGLANG_PLATFORM={selected}, but that platform steps back for "
            + (f"the {accelerator} device" if accelerator else "SGLANG_USE_CPU_ENGINE=1"),
            symptom=symptom,
            fix="unset SGLANG_PLATFORM" if accelerator else "unset SGLANG_USE_CPU_ENGINE",
        )
    if selected:
        return ok(title, f"{selected} (chosen by SGLANG_PLATFORM)")
    if cpu_engine:
        return warn(
            title,
            "SGLANG_USE_CPU_ENGINE=1: SGLang's own CPU engine, which needs a kernel package built for AMX",
            symptom="ImportError or missing operators from sgl_kernel in the server's log",
            fix="unset SGLANG_USE_CPU_ENGINE, unless you built those kernels",
        )
    if accelerator:
        return ok(title, f"SGLang's own, for {accelerator}")
    if OUR_PLATFORM not in registered:
        return fail(
            title,
            f"the plugin {OUR_PLATFORM} is not registered, and there is no accelerator",
            symptom="the server ends while it starts: no device, or an ImportError from a GPU kernel",
            fix=REINSTALL,
        )
    others = [name for name in registered if name != OUR_PLATFORM]
    if others:
        return warn(
            title,
            f"{OUR_PLATFORM}, but other plugins are installed, too: {', '.join(others)}",
            symptom="RuntimeError: Multiple platform plugins activated",
            fix=f"export SGLANG_PLATFORM={OUR_PLATFORM}",
        )
    return ok(title, f"{OUR_PLATFORM} (torch-native, any CPU)")


def _cuda_words(hardware: Hardware) -> str:
    if hardware.driver_cuda is None or hardware.torch_cuda is None:
        return ""
    return f", driver for CUDA {_dotted(hardware.driver_cuda)}, torch for {hardware.torch_cuda}"


def _parse(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def examine(hardware: Hardware) -> list[Finding]:
    """Findings on the accelerator and the platform that SGLang will choose."""
    registered = tuple(sorted({point.name for point in metadata.entry_points(group=PLATFORM_GROUP)}))
    return [
        check_accelerator(hardware),
        *check_gpu_memory(hardware.gpus),
        check_platform(
            registered,
            selected=os.environ.get("SGLANG_PLATFORM", ""),
            cpu_engine=os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1",
            accelerator=hardware.accelerator,
        ),
    ]
