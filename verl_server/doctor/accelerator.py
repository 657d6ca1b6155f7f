"""Checks of the accelerator, of its free memory, and of the platform that SGLang selects."""

from __future__ import annotations

import os
from importlib import metadata

from verl_server.doctor.machine import Gpu, Hardware
from verl_server.doctor.report import Finding, fail, gib, ok, warn

PLATFORM_GROUP = "sglang.srt.platforms"
OUR_PLATFORM = "verl_server_cpu"
REINSTALL = "Reinstall verl-server in this environment: pip install verl-server, or pip install -e . in a clone."
#: Share of a GPU's memory that may be in use before the check warns.
IN_USE_SHARE = 0.15


def check_accelerator(hardware: Hardware) -> Finding:
    """Check whether torch can use the accelerator of this machine."""
    title = "Accelerator"
    if hardware.accelerator is not None:
        names = ", ".join(sorted({gpu.name for gpu in hardware.gpus})) or hardware.accelerator
        return ok(title, f"{hardware.devices} x {names}{_describe_cuda(hardware)}")
    if hardware.nvidia_device and not hardware.hidden:
        return _unusable_gpu(hardware)
    if hardware.cores < 2:
        return warn(
            title,
            "none, and only one CPU core",
            symptom="the server and the trainer share one core: a server takes minutes to start",
            fix="Give the machine or the container at least two cores.",
        )
    reason = "hidden by CUDA_VISIBLE_DEVICES" if hardware.nvidia_device else "none"
    return ok(title, f"{reason}; servers will use the CPU platform with {hardware.cores} cores")


def _unusable_gpu(hardware: Hardware) -> Finding:
    found, symptom = "this machine has an NVIDIA GPU, but ", "the server runs on the CPU, or ends with a CUDA error"
    if hardware.torch_cuda is None:
        return fail(
            "Accelerator",
            found + "torch was built without CUDA",
            symptom=symptom,
            fix="Install the CUDA build of torch: on Linux, `pip install torch` without an index URL.",
        )
    needed = _parse(hardware.torch_cuda)
    if hardware.driver_cuda is None:
        return fail(
            "Accelerator",
            found + "the driver library libcuda.so.1 cannot be loaded",
            symptom=symptom,
            fix="Start the container with the NVIDIA runtime (docker run --gpus all), or install the NVIDIA driver.",
        )
    if hardware.driver_cuda[0] < needed[0]:
        return fail(
            "Accelerator",
            f"{found}the driver supports CUDA {_dotted(hardware.driver_cuda)} and torch needs {hardware.torch_cuda}",
            symptom="The NVIDIA driver on your system is too old (found version ...)",
            fix=f"Update the driver, or install a torch built for CUDA {hardware.driver_cuda[0]}.",
        )
    return fail(
        "Accelerator",
        found + "torch cannot use it",
        symptom=symptom,
        fix="Run `python -c 'import torch; torch.cuda.init()'` and `nvidia-smi`; one of them prints the reason.",
    )


def check_gpu_memory(gpus: tuple[Gpu, ...]) -> list[Finding]:
    """Check that the memory of the GPUs is free before a server starts."""
    return [
        warn(
            f"GPU {index}",
            f"{gib(gpu.total - gpu.free)} of {gib(gpu.total)} are already in use",
            symptom="Not enough memory. Please try to increase --mem-fraction-static",
            fix="Find the processes with nvidia-smi and end them. If a colocated trainer uses the memory, lower "
            "--mem-fraction-static.",
        )
        for index, gpu in enumerate(gpus)
        if gpu.total - gpu.free > gpu.total * IN_USE_SHARE
    ]


def check_platform(registered: tuple[str, ...], *, selected: str, cpu_engine: bool, accelerator: str | None) -> Finding:
    """Check which platform SGLang selects.

    `registered` are the installed platform plugins, `selected` is the value of SGLANG_PLATFORM, and `cpu_engine` is
    True when SGLANG_USE_CPU_ENGINE is 1.
    """
    title, symptom = "SGLang platform", "the server ends at its start with a RuntimeError about the platform"
    if selected and selected not in registered:
        return fail(
            title,
            f"SGLANG_PLATFORM={selected} is not an installed plugin (installed: {', '.join(registered) or 'none'})",
            symptom=symptom,
            fix="unset SGLANG_PLATFORM",
        )
    if selected == OUR_PLATFORM and (accelerator or cpu_engine):
        return fail(
            title,
            f"SGLANG_PLATFORM={selected}, but this platform is not available with "
            + (f"the {accelerator} device" if accelerator else "SGLANG_USE_CPU_ENGINE=1"),
            symptom=symptom,
            fix="unset SGLANG_PLATFORM" if accelerator else "unset SGLANG_USE_CPU_ENGINE",
        )
    if selected:
        return ok(title, f"{selected} (chosen by SGLANG_PLATFORM)")
    if cpu_engine:
        return warn(
            title,
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine, which needs a kernel package built for AMX",
            symptom="the server's log shows an ImportError or missing operators of sgl_kernel",
            fix="unset SGLANG_USE_CPU_ENGINE (keep it only if the AMX kernels are installed)",
        )
    if accelerator:
        return ok(title, f"SGLang's own platform for {accelerator}")
    if OUR_PLATFORM not in registered:
        return fail(
            title,
            f"this machine has no accelerator, and the plugin {OUR_PLATFORM} is not installed",
            symptom="the server ends during its start because it finds no device or cannot import a GPU kernel",
            fix=REINSTALL,
        )
    others = [name for name in registered if name != OUR_PLATFORM]
    if others:
        return warn(
            title,
            f"{OUR_PLATFORM}, but other platform plugins are installed as well: {', '.join(others)}",
            symptom="RuntimeError: Multiple platform plugins activated",
            fix=f"export SGLANG_PLATFORM={OUR_PLATFORM}",
        )
    return ok(title, f"{OUR_PLATFORM} (torch-native, any CPU)")


def _describe_cuda(hardware: Hardware) -> str:
    if hardware.driver_cuda is None or hardware.torch_cuda is None:
        return ""
    return f", driver supports CUDA {_dotted(hardware.driver_cuda)}, torch for {hardware.torch_cuda}"


def _parse(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def examine(hardware: Hardware, *, runs_servers: bool = True) -> list[Finding]:
    """Check the accelerator, its free memory, and the platform that SGLang selects.

    `runs_servers`: whether servers run in this process's environment, so that its plugins count.
    """
    registered = tuple(sorted({point.name for point in metadata.entry_points(group=PLATFORM_GROUP)}))
    platform = check_platform(
        registered,
        selected=os.environ.get("SGLANG_PLATFORM", ""),
        cpu_engine=os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1",
        accelerator=hardware.accelerator,
    )
    return [
        check_accelerator(hardware),
        *check_gpu_memory(hardware.gpus),
        *([platform] if runs_servers else []),
    ]
