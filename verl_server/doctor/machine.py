"""Checks of a machine: accelerators, memory, limits, what ended servers left, proxies."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_server.doctor.report import Finding, check_amount, fail, gib, ok, warn
from verl_server.platforms.limits import available_memory, container_memory
from verl_server.server.warden.processes import SHM_DIR, SHM_NAMES, find_shared_memory

# -- Hardware ---------------------------------------------------------------------------------------
# Reads the accelerators and CPU cores of this machine from torch, the NVIDIA driver and nvidia-smi.


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


# -- Compute ----------------------------------------------------------------------------------------
# Checks of the accelerators and of their free memory.

#: Share of a GPU's memory that may be in use before the check warns.
IN_USE_SHARE = 0.15


def check_accelerator(hardware: Hardware) -> Finding:
    """Check whether torch can use the accelerator of this machine."""
    title, driver, torch_cuda = "Accelerator", hardware.driver_cuda, hardware.torch_cuda
    if hardware.accelerator is not None:
        names = ", ".join(sorted({gpu.name for gpu in hardware.gpus})) or hardware.accelerator
        cuda = f", driver supports CUDA {_dotted(driver)}, torch for {torch_cuda}" if driver and torch_cuda else ""
        return ok(title, f"{hardware.devices} x {names}{cuda}")
    if not hardware.nvidia_device or hardware.hidden:
        reason = "hidden by CUDA_VISIBLE_DEVICES" if hardware.nvidia_device else "none"
        if hardware.cores > 1:
            return ok(title, f"{reason}; servers will use the CPU platform with {hardware.cores} cores")
        return warn(
            title,
            f"{reason}, and only one CPU core",
            symptom="the server and the trainer share one core: a server takes minutes to start",
            fix="Give the machine or the container at least two cores.",
        )
    if torch_cuda is None:
        problem = "torch was built without CUDA"
        fix = "Install the CUDA build of torch: on Linux, `pip install torch` without an index URL."
    elif driver is None:
        problem = "the driver library libcuda.so.1 cannot be loaded"
        fix = "Start the container with the NVIDIA runtime (docker run --gpus all), or install the NVIDIA driver."
    elif driver[0] < int(torch_cuda.partition(".")[0]):
        problem = f"the driver supports CUDA {_dotted(driver)} and torch needs {torch_cuda}"
        fix = f"Update the driver, or install a torch built for CUDA {driver[0]}."
    else:
        problem = "torch cannot use it"
        fix = "Run `python -c 'import torch; torch.cuda.init()'` and `nvidia-smi`; one of them prints the reason."
    symptom = "the server runs on the CPU, or ends with a CUDA error"
    return fail(title, f"this machine has an NVIDIA GPU, but {problem}", symptom=symptom, fix=fix)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


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


def examine_compute(hardware: Hardware) -> list[Finding]:
    """Check the accelerators and their free memory."""
    return [check_accelerator(hardware), *check_gpu_memory(hardware.gpus)]


# -- Memory -----------------------------------------------------------------------------------------
# Checks of the memory of this machine and of /dev/shm.

#: Bytes of a server without weights: three processes of about 1.1 GB each, much of it shared.
SERVER_BYTES = 2 * 2**30


def check_shared_memory(total: int, free: int) -> Finding:
    """Check the size of /dev/shm, in bytes. NCCL, multiprocessing and torch use it; weights do not, they use memfd."""
    return check_amount(
        "/dev/shm",
        f"{gib(total)}, {gib(free)} free",
        free,
        minimum=32 * 2**20,
        recommended=2**30,
        symptom="with more than one rank: Bus error, or NCCL: No space left on device",
        fix="Enlarge /dev/shm: docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium "
        "Memory.",
    )


def check_memory(available: int, limit: int | None = None) -> Finding:
    """Check the available memory, in bytes. `limit` is the memory limit of the container, None without one."""
    container = "" if limit is None else f" (container limit {gib(limit)})"
    return check_amount(
        "Memory",
        f"{gib(available)} available{container}; a server without weights needs {gib(SERVER_BYTES)}",
        available,
        minimum=SERVER_BYTES,
        recommended=2 * SERVER_BYTES,
        symptom="the server ends during its start with `killed by SIGKILL` and nothing in its log",
        fix="Free memory, or raise the memory limit of the container.",
    )


def examine_memory() -> list[Finding]:
    """Check the memory of this machine."""
    container = container_memory()
    shared = shutil.disk_usage(SHM_DIR) if Path(SHM_DIR).is_dir() else None
    return [
        check_memory(available_memory(), container[0] if container else None),
        check_shared_memory(shared.total, shared.free) if shared else check_shared_memory(0, 0),
    ]


# -- Limits -----------------------------------------------------------------------------------------
# Checks of operating system limits, of the memory through which servers read weights, and of the local network.

OPEN_FILES = 65536
PROCESSES = 4096
UNLIMITED = resource.RLIM_INFINITY
#: Program of the second process in the test of the staging memory.
READER = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
MESSAGE = b"weights"


def check_open_files(limit: int, hard: int = UNLIMITED) -> Finding:
    """Check `ulimit -n`. Each request in flight uses one open file in the server and one in the client.

    `limit` and `hard` are the soft and the hard limit.
    """
    can_be_raised = hard == UNLIMITED or hard >= OPEN_FILES
    return check_amount(
        "Open files",
        _describe_limit(limit, OPEN_FILES),
        math.inf if limit == UNLIMITED else limit,
        minimum=4096,
        recommended=OPEN_FILES,
        symptom="with many requests in flight: OSError: Too many open files, or refused connections",
        fix=f"ulimit -n {OPEN_FILES}"
        if can_be_raised
        else f"Raise the hard limit, now {hard}, in limits.conf, or start the container with --ulimit nofile="
        f"{OPEN_FILES}.",
    )


def check_processes(limit: int) -> Finding:
    """Check `ulimit -u`, which counts threads. A server with several ranks has hundreds of threads."""
    return check_amount(
        "Processes",
        _describe_limit(limit, PROCESSES),
        math.inf if limit == UNLIMITED else limit,
        minimum=512,
        recommended=PROCESSES,
        symptom="RuntimeError: can't start new thread, or Resource temporarily unavailable",
        fix=f"ulimit -u {PROCESSES}; in a container also raise its limit (docker run --pids-limit)",
    )


def _describe_limit(limit: int, recommended: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit}, recommended {recommended}"


def probe_staging() -> str:
    """Let a second process read a memory file of this process through /proc/PID/fd, as a weight update does."""
    fd = os.memfd_create("verl_server_doctor", os.MFD_CLOEXEC)
    try:
        os.write(fd, MESSAGE)
        command = [sys.executable, "-I", "-S", "-c", READER, f"/proc/{os.getpid()}/fd/{fd}"]
        reader = subprocess.run(command, capture_output=True, timeout=30)
    finally:
        os.close(fd)
    if reader.stdout != MESSAGE:
        lines = reader.stderr.decode(errors="replace").strip().splitlines() or ["the process read other bytes"]
        raise OSError(f"another process of this user cannot open /proc/PID/fd: {lines[-1]}")
    return "another process of this user can read it (/proc/PID/fd)"


def probe_loopback() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        with socket.create_connection(server.getsockname(), timeout=5.0):
            server.accept()[0].close()
    return "connections over 127.0.0.1 work"


#: What each server needs of the system: title, a function that tries it, symptom and fix. The function returns the
#: detail, or raises the error.
PROBES: tuple[tuple[str, Callable[[], str], str, str], ...] = (
    (
        "Staging memory",
        probe_staging,
        "update_weights_from_tensor fails: the server cannot open the arena",
        "Run the trainer and the server as the same user in the same container (or with --pid=host). Mount /proc "
        "without hidepid. In a sandbox, allow memfd_create and access to /proc/PID/fd.",
    ),
    (
        "Loopback",
        probe_loopback,
        "a server cannot bind 127.0.0.1, or never becomes ready",
        "Enable the loopback device (ip link set lo up). In a sandbox, allow local sockets.",
    ),
)


def check_probe(title: str, probe: Callable[[], str], symptom: str, fix: str) -> Finding:
    """A finding about one of `PROBES`."""
    try:
        return ok(title, probe())
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return fail(title, str(error), symptom=symptom, fix=fix)


def examine_limits() -> list[Finding]:
    """Check the limits of this process, and what servers need of the system."""
    return [
        *(check_probe(*probe) for probe in PROBES),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
    ]


# -- Leftovers --------------------------------------------------------------------------------------

#: Maximum number of file names in a finding.
MAX_NAMES = 8
#: Seconds since the last write. A younger file can belong to a program that has not mapped it yet.
LEFTOVER_AGE_S = 600.0
#: Seconds after which an orphan must still live. The processes of a server that is being stopped end within this time.
ORPHAN_RECHECK_S = 1.0
#: Programs that become the parent of orphaned processes, at any depth of the process tree.
INIT_PROGRAMS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan")
#: Programs that start servers. As PID 1 of a container they are the launcher, so their children are not orphans.
LAUNCHERS = ("python", "sglang", "vllm", "VLLM::", "verl", "ray", "torchrun")
#: How the titles of the processes begin that SGLang's and vLLM's launchers start. The launchers have other titles.
SGLANG_TITLES, VLLM_TITLES = ("sglang::",), ("VLLM::EngineCore", "VLLM::Worker", "VLLM::DPCoordinator")


@dataclass(frozen=True)
class Process:
    """One process of this machine."""

    pid: int
    parent: int
    """PID of the parent process."""
    name: str
    """Program name: the first word of the command line, without its folder."""


def check_orphans(processes: list[Process]) -> Finding:
    """Check for processes of SGLang and vLLM whose launcher has ended. They hold memory until a user ends them.

    The launcher starts these processes as its children. The kernel makes them children of an init program when the
    launcher has ended; from then on no process sends them requests. vLLM's workers are children of its engine.
    """
    orphans = _orphans(processes)
    if not orphans:
        return ok("Orphaned servers", "none")
    pids = " ".join(str(process.pid) for process in orphans)
    engines = " and ".join(sorted({process.name.partition("::")[0] + "::" for process in orphans}))
    return warn(
        "Orphaned servers",
        f"{len(orphans)} {engines} processes whose launcher has ended: {pids}",
        symptom="memory stays in use although no server runs; the next start ends with CUDA out of memory",
        # vLLM's processes end at SIGTERM, and their resource tracker then removes their files in shared memory.
        fix=f"kill {pids}; if they live after 10 s, kill -9 {pids}",
    )


def _orphans(processes: list[Process]) -> list[Process]:
    by_pid = {process.pid: process for process in processes}
    return [process for process in processes if _is_of_server(process.name) and _has_no_launcher(process, by_pid)]


def _is_of_server(name: str) -> bool:
    return name.startswith((*SGLANG_TITLES, *VLLM_TITLES))


def _has_no_launcher(process: Process, by_pid: dict[int, Process]) -> bool:
    """Whether an init program is the parent of the topmost process of a server."""
    while (parent := by_pid.get(process.parent)) is not None and _is_of_server(parent.name):
        process = parent
    return _is_init(process.parent, "" if parent is None else parent.name)


def _is_init(pid: int, name: str) -> bool:
    return name in INIT_PROGRAMS or (pid == 1 and not name.startswith(LAUNCHERS))


def check_leftovers(files: dict[str, int]) -> Finding:
    """Check for files in shared memory that no visible process uses. `files` maps names to bytes."""
    if not files:
        return ok("Leftover files", "none in /dev/shm")
    names = sorted(files, key=lambda name: -files[name])
    paths = " ".join(SHM_DIR + name for name in names[:MAX_NAMES])
    return warn(
        "Leftover files",
        f"{len(names)} in /dev/shm, {gib(sum(files.values()))}: not written for {LEFTOVER_AGE_S / 60:.0f} minutes, and "
        "no process that this user can inspect maps them or has them open"
        + (f"; the fix names the {MAX_NAMES} largest" if len(names) > MAX_NAMES else ""),
        symptom="free memory shrinks with every run, until an error says: No space left on device",
        # Processes of other users and of containers that share /dev/shm cannot be inspected.
        fix=f"If no other process uses them, also in a container that shares /dev/shm (as root: fuser -v {paths}): "
        f"rm {paths}",
    )


def processes() -> list[Process]:
    """All processes that this user can see and that have not ended."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "status"]):
        info = process.info
        if info["status"] == psutil.STATUS_ZOMBIE:
            continue
        title = (info["cmdline"] or [info["name"] or ""])[0].split(" ")[0]
        found.append(Process(info["pid"], info["ppid"] or 0, title.rpartition("/")[2]))
    return found


def leftovers(folder: Path = Path(SHM_DIR)) -> dict[str, int]:
    """Files of this user that torch, SGLang or multiprocessing created and that no process uses, with bytes.

    A process uses a file that it maps or has open. Processes of other users cannot be inspected.
    """
    old: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else []:
        with contextlib.suppress(OSError):
            status = path.stat()
            mine = status.st_uid == os.getuid()
            if mine and SHM_NAMES.match(path.name) and time.time() - status.st_mtime > LEFTOVER_AGE_S:
                old[path.name] = status.st_blocks * 512
    pids = set(psutil.pids())
    used = find_shared_memory(pids).keys() | find_open_files(pids) if old else set()
    return {name: size for name, size in old.items() if name not in used and not _owner_is_running(name, pids)}


def find_open_files(pids: Iterable[int]) -> set[str]:
    """Names of the files in `/dev/shm` that these processes have open, as far as this user can inspect them."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return {path.removeprefix(SHM_DIR) for path in found if path.startswith(SHM_DIR)}


def _owner_is_running(name: str, pids: set[int]) -> bool:
    """torch puts the PID of the owner into the file name. The owner may not have mapped the file yet."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and int(owner[1]) in pids


def examine_leftovers() -> list[Finding]:
    """Check for leftover files and processes. Takes a second longer when there are orphans."""
    found = processes()
    if _orphans(found):
        time.sleep(ORPHAN_RECHECK_S)
        first_pids = {process.pid for process in found}
        found = [process for process in processes() if process.pid in first_pids]
    return [check_leftovers(leftovers()), check_orphans(found)]


# -- Proxies ----------------------------------------------------------------------------------------

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def check_proxies(env: Mapping[str, str]) -> Finding:
    """Check for proxy variables without an exception for loopback.

    The values can contain passwords, so the finding shows only the names of the variables.
    """
    names = [name for name in env if name.lower() in PROXIES and env[name]]
    if not names:
        return ok("Proxies", "no proxy variables")
    exceptions = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    hosts = {host.strip() for host in exceptions.split(",")}
    if "*" in hosts or ("localhost" in hosts and hosts & {"127.0.0.1", "127.0.0.0/8", "127."}):
        return ok("Proxies", f"{', '.join(names)}, with an exception for loopback")
    return warn(
        "Proxies",
        f"{', '.join(names)} set, but no_proxy does not contain both localhost and 127.0.0.1",
        symptom="curl, requests or an agent receives 403, 502 or 504 from the proxy instead of a reply of the server "
        "(the adapters of this library ignore proxies)",
        fix='export no_proxy="localhost,127.0.0.1,::1${no_proxy:+,$no_proxy}"; export NO_PROXY="$no_proxy"',
    )
