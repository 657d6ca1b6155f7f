"""What a process may use on this machine or in its container: memory and cores."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PROC = Path("/proc")
NO_OVERCOMMIT = "2"
"""Value of `vm.overcommit_memory` with which the kernel refuses memory above `CommitLimit`."""


def container_memory(root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> tuple[int, int] | None:
    """Limit and use of memory in this process's control groups, in bytes. None without a limit.

    A process is also in all parents of its control group: the container, a job of SLURM, a unit of systemd. The one in
    which the least memory is left counts. cgroup v2 is read first, then v1. The page cache of files does not count as
    used: the kernel frees it when memory is needed.
    """
    try:
        lines = own_cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = {"v2": "/", "v1": "/"}
    for line in lines:  # "0::/PATH" of version 2, "NUMBER:CONTROLLERS:/PATH" of version 1
        _, controllers, name = line.split(":", 2)
        if not controllers:
            names["v2"] = name
        elif "memory" in controllers.split(","):
            names["v1"] = name
    total = int(psutil.virtual_memory().total)
    for name, mounted, limit_file, used_file in (
        (names["v2"], root, "memory.max", "memory.current"),
        (names["v1"], root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        group = PurePosixPath(name)
        folders = [mounted / parent.relative_to("/") for parent in (group, *group.parents)]
        found = [memory for folder in folders if (memory := _read_memory(folder, limit_file, used_file)) is not None]
        if limits := [memory for memory in found if memory[0] < total]:
            return min(limits, key=lambda memory: memory[0] - memory[1])
    return None


def _read_memory(folder: Path, limit_file: str, used_file: str) -> tuple[int, int] | None:
    """Limit and use of one control group. None without a limit."""
    try:
        limit_bytes, used_bytes = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
        return limit_bytes, max(0, used_bytes - _page_cache((folder / "memory.stat").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _page_cache(statistics: str) -> int:
    """The page cache in a `memory.stat`. In version 1, only the values `total_*` include the children of the group."""
    values = {name: int(value) for name, value in (line.split() for line in statistics.splitlines())}
    names = ("active_file", "inactive_file")
    return sum(values.get(f"total_{name}", values.get(name, 0)) for name in names)


def committable_memory(proc: Path = PROC) -> int | None:
    """Bytes that processes of this machine can still allocate with `vm.overcommit_memory=2`. None with other values."""
    try:
        if (proc / "sys/vm/overcommit_memory").read_text().strip() != NO_OVERCOMMIT:
            return None
        lines = [line.split() for line in (proc / "meminfo").read_text().splitlines()]
    except OSError:
        return None
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return max(0, sizes["CommitLimit"] - sizes["Committed_AS"])


def available_memory() -> int:
    """Bytes that a new process can allocate within the limits of its control groups and of the machine."""
    available = int(psutil.virtual_memory().available)
    container, committable = container_memory(), committable_memory()
    if container is not None:
        available = min(available, container[0] - container[1])
    if committable is not None:
        available = min(available, committable)
    return max(0, available)


def available_cores() -> list[int]:
    """Numbers of the cores that this process may use, sorted."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def split_cores(ranks: int, cores: list[int] | None = None) -> str:
    """The cores of each rank as SGLang and vLLM write them, for example "0,1|2,3". Ranks share too few cores."""
    cores = available_cores() if cores is None else cores
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(ranks))
