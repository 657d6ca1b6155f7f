"""Memory of the machine and shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from verl_server.doctor.finding import Finding, fail, gib, ok, warn
from verl_server.server.warden import SHM_DIR

SHM_FAIL_BYTES = 32 * 2**20
SHM_WARN_BYTES = 2**30
#: A server without weights: three processes of about 1.1 GB, much of it shared.
SERVER_BYTES = 2 * 2**30


def check_shared_memory(total: int, free: int) -> Finding:
    """Bytes of /dev/shm. Weights do not need it (they use memfd); NCCL, multiprocessing and torch do."""
    detail = f"{gib(total)}, {gib(free)} free"
    symptom = "Bus error, or NCCL: No space left on device, with more than one rank"
    fix = "Give the container more: docker run --shm-size=8g (or --ipc=host); in Kubernetes a memory emptyDir."
    if free < SHM_FAIL_BYTES:
        return fail("/dev/shm", detail, symptom=symptom, fix=fix)
    if free < SHM_WARN_BYTES:
        return warn("/dev/shm", detail, symptom=symptom, fix=fix)
    return ok("/dev/shm", detail)


def check_memory(available: int, limit: int | None = None) -> Finding:
    """Bytes that a new process could take. `limit`: the container's, where it has one."""
    detail = f"{gib(available)} available" + (f" (container limit {gib(limit)})" if limit is not None else "")
    symptom = "the server ends with `killed by SIGKILL` and no last words while it starts"
    fix = "Free memory, or raise the memory limit of the container."
    if available < SERVER_BYTES:
        return fail("Memory", f"{detail}; a server without weights takes {gib(SERVER_BYTES)}", symptom=symptom, fix=fix)
    if available < 2 * SERVER_BYTES:
        return warn("Memory", f"{detail}: enough for small models only", symptom=symptom, fix=fix)
    return ok("Memory", detail)


def container_memory() -> tuple[int, int] | None:
    """Limit and use in bytes of this process's control group (version 2, then 1), where there is a limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            numbers = int(limit.read_text()), int(used.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if numbers[0] < psutil.virtual_memory().total:
            return numbers
    return None


def available_memory() -> int:
    """Bytes that a new process could take, inside the container's limit."""
    available = psutil.virtual_memory().available
    container = container_memory()
    return available if container is None else max(0, min(available, container[0] - container[1]))


def examine() -> list[Finding]:
    """Look at the memory of this machine."""
    container = container_memory()
    shared = shutil.disk_usage(SHM_DIR) if Path(SHM_DIR).is_dir() else None
    return [
        check_memory(available_memory(), container[0] if container else None),
        check_shared_memory(shared.total, shared.free) if shared else check_shared_memory(0, 0),
    ]
