"""Processes below a process, read from `/proc`. Imports the standard library only: the warden uses it."""

from __future__ import annotations

import contextlib
import os


def list_descendants(root: int) -> list[int]:
    """Process ids of the tree below `root`, parents first. Zombies are left out; processes below a zombie are not.

    A killed process is a zombie as soon as its first thread has ended. Its children stay its children until its last
    thread has ended.
    """
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state, parent = fields[0], int(fields[1])
        if state == b"Z":
            zombies.add(int(entry))
        children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if pid not in zombies]


def read_tree(root: int) -> list[int]:
    """Process ids of the tree below `root`, parents first. Looks at the processes of the tree only.

    `list_descendants` reads all of `/proc` instead. It misses no process; here a process that ends meanwhile may hide
    another one.
    """
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):
        return list_descendants(root)  # a kernel without these files, or the process has ended
    found = _read_children(root)
    for pid in found:  # grows while it is read
        found += _read_children(pid)
    return found


def _read_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process or one of its threads has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
    return found


def is_descendant(pid: int, root: int) -> bool:
    """Whether a living process is in the tree below `root`."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False
        if pid == root:
            return True
    return False


def read_command_line(pid: int) -> bytes:
    """The command line of a process, with arguments separated by NUL bytes. Empty when the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_cleanup_helper(pid: int) -> bool:
    """Whether a process is a helper that removes shared memory after its owner has ended."""
    command_line = read_command_line(pid)
    return b"resource_tracker" in command_line or b"torch_shm_manager" in command_line


def worker_name(pid: int, prefix: str) -> str | None:
    """Name of an engine's worker, for example `sglang::scheduler`. None for other processes.

    `prefix`: how the names of the engine's workers begin. A server cannot work without one of its workers. A program
    that a worker starts is no worker: between `fork` and `exec` it has the name of the worker.
    """
    name = _title(pid)
    return name if name.startswith(prefix) and name != _title(_parent(pid)) else None


def _title(pid: int) -> str:
    """The first argument of a process, which is its name if it has set one."""
    return read_command_line(pid).partition(b"\0")[0].decode("utf-8", "replace")


def _parent(pid: int) -> int:
    """Process id of the parent. 0 when the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
