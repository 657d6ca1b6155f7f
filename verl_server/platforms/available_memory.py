"""How much memory a process can allocate on this machine or in its container."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


def container_memory(root: Path = CGROUP_ROOT) -> tuple[int, int] | None:
    """Limit and use of memory in this process's control group (cgroup v2, then v1), in bytes. None without a limit.

    The page cache of files does not count as used: the kernel frees it when memory is needed.
    """
    for limit, used, statistics in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        try:
            limit_bytes, used_bytes = int(limit.read_text()), int(used.read_text())
            lines = [line.split() for line in statistics.read_text().splitlines()]
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cached = sum(int(line[1]) for line in lines if line[0] in ("active_file", "inactive_file"))
        if limit_bytes < psutil.virtual_memory().total:
            return limit_bytes, max(0, used_bytes - cached)
    return None


def available_memory() -> int:
    """Bytes that a new process can allocate within the limit of the container."""
    available = int(psutil.virtual_memory().available)
    container = container_memory()
    return available if container is None else max(0, min(available, container[0] - container[1]))
