"""Checks of the memory of this machine and of /dev/shm."""

from __future__ import annotations

import shutil
from pathlib import Path

from verl_server.doctor.finding import Finding, fail, gib, ok, warn
from verl_server.platforms.available_memory import available_memory, container_memory
from verl_server.server.warden.shared_memory_files import SHM_DIR

SHM_FAIL_BYTES = 32 * 2**20
SHM_WARN_BYTES = 2**30
#: Bytes of a server without weights: three processes of about 1.1 GB each, much of it shared.
SERVER_BYTES = 2 * 2**30


def check_shared_memory(total: int, free: int) -> Finding:
    """Check the size of /dev/shm, in bytes. NCCL, multiprocessing and torch use it; weights do not, they use memfd."""
    detail = f"{gib(total)}, {gib(free)} free"
    symptom = "with more than one rank: Bus error, or NCCL: No space left on device"
    fix = (
        "Enlarge /dev/shm: docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium Memory."
    )
    if free < SHM_FAIL_BYTES:
        return fail("/dev/shm", detail, symptom=symptom, fix=fix)
    if free < SHM_WARN_BYTES:
        return warn("/dev/shm", detail, symptom=symptom, fix=fix)
    return ok("/dev/shm", detail)


def check_memory(available: int, limit: int | None = None) -> Finding:
    """Check the available memory, in bytes. `limit` is the memory limit of the container, None without one."""
    detail = f"{gib(available)} available" + (f" (container limit {gib(limit)})" if limit is not None else "")
    symptom = "the server ends during its start with `killed by SIGKILL` and nothing in its log"
    fix = "Free memory, or raise the memory limit of the container."
    if available < SERVER_BYTES:
        return fail("Memory", f"{detail}; a server without weights needs {gib(SERVER_BYTES)}", symptom=symptom, fix=fix)
    if available < 2 * SERVER_BYTES:
        return warn("Memory", f"{detail}, enough for small models only", symptom=symptom, fix=fix)
    return ok("Memory", detail)


def examine() -> list[Finding]:
    """Check the memory of this machine."""
    container = container_memory()
    shared = shutil.disk_usage(SHM_DIR) if Path(SHM_DIR).is_dir() else None
    return [
        check_memory(available_memory(), container[0] if container else None),
        check_shared_memory(shared.total, shared.free) if shared else check_shared_memory(0, 0),
    ]
